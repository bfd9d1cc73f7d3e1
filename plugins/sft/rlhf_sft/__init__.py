"""Supervised fine-tuning: the next-token loss on demonstrations, and the smallest example of a trainer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhf_core import TRAINER, hookimpl

if TYPE_CHECKING:
    from rlhf_core import Registry
    from rlhf_sft.config import SFTConfig as SFTConfig
    from rlhf_sft.train import SFTTrainer as SFTTrainer

_HOMES = {"SFTConfig": "config", "SFTTrainer": "train"}
__all__ = ["SFTConfig", "SFTTrainer"]


@hookimpl
def rlhf_register(registry: Registry) -> None:
    registry.add(TRAINER, "sft", "rlhf_sft.train:trainer")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhf_sft' has no attribute '{name}'")
    return getattr(importlib.import_module(f"rlhf_sft.{_HOMES[name]}"), name)
