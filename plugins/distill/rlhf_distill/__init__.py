"""On-policy distillation: its trainer, its divergences, and the kind under which others add theirs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhf_core import TRAINER, hookimpl
from rlhf_distill.config import DistillConfig as DistillConfig
from rlhf_distill.divergences import DIVERGENCE as DIVERGENCE

if TYPE_CHECKING:
    from rlhf_core import Registry
    from rlhf_distill.train import DistillTrainer as DistillTrainer
    from rlhf_distill.vocabulary import Head as Head
    from rlhf_distill.vocabulary import token_divergences as token_divergences

_HOMES = {"DistillTrainer": "train", "Head": "vocabulary", "token_divergences": "vocabulary"}
__all__ = ["DIVERGENCE", "DistillConfig", "DistillTrainer", "Head", "token_divergences"]


@hookimpl
def rlhf_register(registry: Registry) -> None:
    from rlhf_core.training import define_trainer
    from rlhf_distill.divergences import DIVERGENCES
    from rlhf_distill.train import build

    registry.add(TRAINER, "distill", define_trainer(DistillConfig, {"model": "language_model"}, build))
    for name, divergence in DIVERGENCES.items():
        registry.add(DIVERGENCE, name, divergence)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhf_distill' has no attribute '{name}'")
    return getattr(importlib.import_module(f"rlhf_distill.{_HOMES[name]}"), name)
