"""Direct preference optimization: its trainer, its losses, and the kind under which others add theirs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhf_core import TRAINER, hookimpl
from rlhf_dpo.config import DPOConfig as DPOConfig
from rlhf_dpo.losses import DPO_LOSS as DPO_LOSS
from rlhf_dpo.losses import DPOInputs as DPOInputs

if TYPE_CHECKING:
    from rlhf_core import Registry
    from rlhf_dpo.functional import completion_logps as completion_logps
    from rlhf_dpo.functional import dpo_loss as dpo_loss
    from rlhf_dpo.functional import evaluation_step as evaluation_step
    from rlhf_dpo.functional import training_step as training_step
    from rlhf_dpo.train import DPOTrainer as DPOTrainer

_FUNCTIONS = ("completion_logps", "dpo_loss", "evaluation_step", "training_step")
__all__ = [
    "DPO_LOSS",
    "DPOConfig",
    "DPOInputs",
    "DPOTrainer",
    "completion_logps",
    "dpo_loss",
    "evaluation_step",
    "training_step",
]


@hookimpl
def rlhf_register(registry: Registry) -> None:
    from rlhf_core.training import define_trainer
    from rlhf_dpo.losses import LOSSES
    from rlhf_dpo.train import build

    registry.add(TRAINER, "dpo", define_trainer(DPOConfig, {"model": "language_model"}, build))
    for name, loss in LOSSES.items():
        registry.add(DPO_LOSS, name, loss)


def __getattr__(name: str) -> Any:
    if name != "DPOTrainer" and name not in _FUNCTIONS:
        raise AttributeError(f"module 'rlhf_dpo' has no attribute '{name}'")
    home = "functional" if name in _FUNCTIONS else "train"
    return getattr(importlib.import_module(f"rlhf_dpo.{home}"), name)
