"""On-policy distillation: its trainer, its divergences, and the kind under which others add theirs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhf_distill.contract import DIVERGENCE as DIVERGENCE

if TYPE_CHECKING:
    from rlhf_distill.config import DistillConfig as DistillConfig
    from rlhf_distill.train import DistillTrainer as DistillTrainer
    from rlhf_distill.vocabulary import Head as Head
    from rlhf_distill.vocabulary import token_divergences as token_divergences

_HOMES = {
    "DistillConfig": "config",
    "DistillTrainer": "train",
    "Head": "vocabulary",
    "token_divergences": "vocabulary",
}
__all__ = ["DIVERGENCE", "DistillConfig", "DistillTrainer", "Head", "token_divergences"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhf_distill' has no attribute '{name}'")
    return getattr(importlib.import_module(f"rlhf_distill.{_HOMES[name]}"), name)
