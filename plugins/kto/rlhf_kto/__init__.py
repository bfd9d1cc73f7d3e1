"""Kahneman-Tversky optimization: its trainer, its losses, and the kind under which others add theirs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhf_kto.contract import KTO_LOSS as KTO_LOSS
from rlhf_kto.contract import KTOInputs as KTOInputs

if TYPE_CHECKING:
    from rlhf_kto.config import KTOConfig as KTOConfig
    from rlhf_kto.functional import kto_loss as kto_loss
    from rlhf_kto.train import KTOTrainer as KTOTrainer

_HOMES = {"KTOConfig": "config", "KTOTrainer": "train", "kto_loss": "functional"}
__all__ = ["KTO_LOSS", "KTOConfig", "KTOInputs", "KTOTrainer", "kto_loss"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhf_kto' has no attribute '{name}'")
    return getattr(importlib.import_module(f"rlhf_kto.{_HOMES[name]}"), name)
