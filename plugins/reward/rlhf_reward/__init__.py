"""Reward models from preference pairs: pairwise losses, the trainer, and the reward `model` that reads its output."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhf_core import PAIRWISE_LOSS, REWARD, TRAINER, hookimpl
from rlhf_reward.config import RewardConfig as RewardConfig

if TYPE_CHECKING:
    from rlhf_core import Registry
    from rlhf_reward.functional import evaluation_step as evaluation_step
    from rlhf_reward.functional import pairwise_loss as pairwise_loss
    from rlhf_reward.functional import training_step as training_step
    from rlhf_reward.train import RewardTrainer as RewardTrainer

__all__ = ["RewardConfig", "RewardTrainer", "evaluation_step", "pairwise_loss", "training_step"]


@hookimpl
def rlhf_register(registry: Registry) -> None:
    from rlhf_core.training import define_trainer
    from rlhf_reward.losses import LOSSES
    from rlhf_reward.model_reward import ModelReward
    from rlhf_reward.train import build

    registry.add(TRAINER, "reward", define_trainer(RewardConfig, {"model": "reward_model"}, build))
    for name, loss in LOSSES.items():
        registry.add(PAIRWISE_LOSS, name, loss)
    registry.add(REWARD, "model", ModelReward)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rlhf_reward' has no attribute '{name}'")
    home = "train" if name == "RewardTrainer" else "functional"
    return getattr(importlib.import_module(f"rlhf_reward.{home}"), name)
