"""Reward models from preference pairs: pairwise losses, the trainer, and the reward `model` that reads its output."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhf_core import PAIRWISE_LOSS, REWARD, TRAINER, hookimpl

if TYPE_CHECKING:
    from rlhf_core import Registry
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


@hookimpl
def rlhf_register(registry: Registry) -> None:
    registry.add(TRAINER, "reward", "rlhf_reward.train:trainer")
    losses = {
        "bradley_terry": "BradleyTerry",
        "conservative": "Conservative",
        "hinge": "Hinge",
        "squared": "Squared",
    }
    for name, loss in losses.items():
        registry.add(PAIRWISE_LOSS, name, f"rlhf_reward.losses:{loss}")
    registry.add(REWARD, "model", "rlhf_reward.model_reward:ModelReward")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhf_reward' has no attribute '{name}'")
    return getattr(importlib.import_module(f"rlhf_reward.{_HOMES[name]}"), name)
