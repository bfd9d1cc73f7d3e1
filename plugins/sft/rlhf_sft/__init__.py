"""Supervised fine-tuning: the next-token loss on demonstrations, and the smallest example of a trainer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_sft.config import SFTConfig as SFTConfig
    from rlhf_sft.train import SFTTrainer as SFTTrainer

_HOMES = {"SFTConfig": "config", "SFTTrainer": "train"}
__all__ = ["SFTConfig", "SFTTrainer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhf_sft' has no attribute '{name}'")
    return getattr(importlib.import_module(f"rlhf_sft.{_HOMES[name]}"), name)
