"""What trainers that sample share: prompts, a sampler, reward functions with weights, and their metrics."""

from rlhf_core.rewards.calls import score as score
from rlhf_core.rewards.checks import check_columns as check_columns
from rlhf_core.rewards.checks import forecast_rewards as forecast_rewards
from rlhf_core.rewards.checks import set_up as set_up
from rlhf_core.rewards.reward import Reward as Reward
from rlhf_core.rewards.reward import WeightedReward as WeightedReward
from rlhf_core.rewards.reward import restore as restore
from rlhf_core.rewards.reward import snapshots as snapshots
from rlhf_core.rollouts.completions import completion as completion
from rlhf_core.rollouts.completions import empty_warning as empty_warning
from rlhf_core.rollouts.completions import measure as measure
from rlhf_core.rollouts.completions import reward_inputs as reward_inputs
from rlhf_core.rollouts.completions import rollout_metrics as rollout_metrics
from rlhf_core.rollouts.completions import total_reward as total_reward

__all__ = [
    "Reward",
    "WeightedReward",
    "check_columns",
    "completion",
    "empty_warning",
    "forecast_rewards",
    "measure",
    "restore",
    "reward_inputs",
    "rollout_metrics",
    "score",
    "set_up",
    "snapshots",
    "total_reward",
]
