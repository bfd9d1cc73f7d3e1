"""Rollouts: completions of prompts with their rewards, the updates that they serve, evaluation and previews."""

from rlhf_core.rewards.checks import forecast_rewards as forecast_rewards
from rlhf_core.rewards.reward import Reward as Reward
from rlhf_core.rewards.reward import WeightedReward as WeightedReward
from rlhf_core.rollouts.collector import RolloutCollector as RolloutCollector
from rlhf_core.rollouts.completions import completion as completion
from rlhf_core.rollouts.completions import empty_warning as empty_warning
from rlhf_core.rollouts.completions import total_reward as total_reward
from rlhf_core.rollouts.fixed_prompts import FixedPrompts as FixedPrompts
from rlhf_core.rollouts.rollout import Rollout as Rollout
from rlhf_core.rollouts.updates import RolloutUpdates as RolloutUpdates

__all__ = [
    "FixedPrompts",
    "Reward",
    "Rollout",
    "RolloutCollector",
    "RolloutUpdates",
    "WeightedReward",
    "completion",
    "empty_warning",
    "forecast_rewards",
    "total_reward",
]
