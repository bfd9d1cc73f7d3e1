"""Reward models from preference pairs: pairwise losses, the trainer, and the reward `model` that reads its output."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_reward.config import RewardConfig as RewardConfig
    from rlhf_reward.functional import evaluation_step as evaluation_step
    from rlhf_reward.functional import pairwise_loss as pairwise_loss
    from rlhf_reward.functional import training_step as training_step
    from rlhf_reward.train import RewardTrainer as RewardTrainer

_HOMES = {
    "RewardConfig": "config",
    "RewardTrainer": "train",
    "evaluation_step": "functional",
    "pairwise_loss": "functional",
    "training_step": "functional",
}
__all__ = ["RewardConfig", "RewardTrainer", "evaluation_step", "pairwise_loss", "training_step"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhf_reward' has no attribute '{name}'")
    return getattr(importlib.import_module(f"rlhf_reward.{_HOMES[name]}"), name)
