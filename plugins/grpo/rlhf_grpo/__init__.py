"""Group relative policy optimization: rollouts, rewards, group-normalised advantages, clipped policy losses."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_grpo.advantages import group_advantages as group_advantages
    from rlhf_grpo.config import GRPOConfig as GRPOConfig
    from rlhf_grpo.functional import compute_per_token_logps as compute_per_token_logps
    from rlhf_grpo.functional import get_per_token_logps as get_per_token_logps
    from rlhf_grpo.functional import get_per_token_logps_and_entropies as get_per_token_logps_and_entropies
    from rlhf_grpo.functional import grpo_step as grpo_step
    from rlhf_grpo.functional import policy_loss as policy_loss
    from rlhf_grpo.train import GRPOTrainer as GRPOTrainer

_HOMES = {
    "GRPOConfig": "config",
    "GRPOTrainer": "train",
    "compute_per_token_logps": "functional",
    "get_per_token_logps": "functional",
    "get_per_token_logps_and_entropies": "functional",
    "group_advantages": "advantages",
    "grpo_step": "functional",
    "policy_loss": "functional",
}
__all__ = [
    "GRPOConfig",
    "GRPOTrainer",
    "compute_per_token_logps",
    "get_per_token_logps",
    "get_per_token_logps_and_entropies",
    "group_advantages",
    "grpo_step",
    "policy_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhf_grpo' has no attribute '{name}'")
    return getattr(importlib.import_module(f"rlhf_grpo.{_HOMES[name]}"), name)
