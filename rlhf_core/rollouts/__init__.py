"""Rollouts: completions of prompts with their rewards, the updates that they serve, and what evaluates them."""

from rlhf_core.environments import EnvironmentOptions as EnvironmentOptions
from rlhf_core.rewards.checks import forecast_rewards as forecast_rewards
from rlhf_core.rewards.checks import set_up as set_up
from rlhf_core.rewards.reward import Reward as Reward
from rlhf_core.rewards.reward import WeightedReward as WeightedReward
from rlhf_core.rewards.reward import logged_metrics as logged_metrics
from rlhf_core.rewards.reward import open_rewards as open_rewards
from rlhf_core.rewards.reward import score as score
from rlhf_core.rollouts.collector import RolloutCollector as RolloutCollector
from rlhf_core.rollouts.collector import RolloutOptions as RolloutOptions
from rlhf_core.rollouts.fixed_prompts import FixedPrompts as FixedPrompts
from rlhf_core.rollouts.open_collector import open_collector as open_collector
from rlhf_core.rollouts.rollout import Rollout as Rollout
from rlhf_core.rollouts.rollout_rows import choose_rollout_rows as choose_rollout_rows
from rlhf_core.rollouts.sampling_plan import SamplingTestOptions as SamplingTestOptions
from rlhf_core.rollouts.sampling_test import SamplingTest as SamplingTest
from rlhf_core.rollouts.updates import Reading as Reading
from rlhf_core.rollouts.updates import RolloutSteps as RolloutSteps
from rlhf_core.rollouts.updates import RolloutUpdates as RolloutUpdates

__all__ = [
    "EnvironmentOptions",
    "FixedPrompts",
    "Reading",
    "Reward",
    "Rollout",
    "RolloutCollector",
    "RolloutOptions",
    "RolloutSteps",
    "RolloutUpdates",
    "SamplingTest",
    "SamplingTestOptions",
    "WeightedReward",
    "choose_rollout_rows",
    "open_collector",
    "open_rewards",
]
