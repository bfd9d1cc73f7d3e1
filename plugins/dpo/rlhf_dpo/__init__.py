"""Direct preference optimization: its trainer, its losses, and the kind under which others add theirs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhf_dpo.contract import DPO_LOSS as DPO_LOSS
from rlhf_dpo.contract import DPOInputs as DPOInputs

if TYPE_CHECKING:
    from rlhf_dpo.config import DPOConfig as DPOConfig
    from rlhf_dpo.functional import completion_logps as completion_logps
    from rlhf_dpo.functional import dpo_loss as dpo_loss
    from rlhf_dpo.functional import evaluation_step as evaluation_step
    from rlhf_dpo.functional import training_step as training_step
    from rlhf_dpo.online import OnlineDPOTrainer as OnlineDPOTrainer
    from rlhf_dpo.online_config import OnlineDPOConfig as OnlineDPOConfig
    from rlhf_dpo.train import DPOTrainer as DPOTrainer

_HOMES = {
    "DPOConfig": "config",
    "DPOTrainer": "train",
    "OnlineDPOConfig": "online_config",
    "OnlineDPOTrainer": "online",
    "completion_logps": "functional",
    "dpo_loss": "functional",
    "evaluation_step": "functional",
    "training_step": "functional",
}
__all__ = [
    "DPO_LOSS",
    "DPOConfig",
    "DPOInputs",
    "DPOTrainer",
    "OnlineDPOConfig",
    "OnlineDPOTrainer",
    "completion_logps",
    "dpo_loss",
    "evaluation_step",
    "training_step",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhf_dpo' has no attribute '{name}'")
    return getattr(importlib.import_module(f"rlhf_dpo.{_HOMES[name]}"), name)
