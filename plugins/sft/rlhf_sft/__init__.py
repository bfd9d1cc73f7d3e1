"""Supervised fine-tuning: the next-token loss on demonstrations, and the smallest example of a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core import TRAINER, hookimpl
from rlhf_sft.config import SFTConfig as SFTConfig

if TYPE_CHECKING:
    from rlhf_core import Registry
    from rlhf_sft.train import SFTTrainer as SFTTrainer

__all__ = ["SFTConfig", "SFTTrainer"]


@hookimpl
def rlhf_register(registry: Registry) -> None:
    from rlhf_core.training import define_trainer
    from rlhf_sft.train import build

    registry.add(TRAINER, "sft", define_trainer(SFTConfig, {"model": "language_model"}, build))


def __getattr__(name: str) -> object:
    if name == "SFTTrainer":
        from rlhf_sft.train import SFTTrainer

        return SFTTrainer
    raise AttributeError(f"module 'rlhf_sft' has no attribute '{name}'")
