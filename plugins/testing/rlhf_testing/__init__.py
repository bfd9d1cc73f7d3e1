"""Check a component with one call, which reports every property that it breaks.

    from rlhf_core.testing import check_policy_loss

    def test_it() -> None:
        check_policy_loss(MyLoss(temperature=2.0))

A kit raises one AssertionError with a line per broken property: its name, what happened, with numbers, and what to do.
It needs no test framework. Everything runs on models, texts and arrays of a few elements.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_testing.advantage import check_advantage as check_advantage
    from rlhf_testing.environment import check_environment as check_environment
    from rlhf_testing.fixtures import MODEL_TABLE as MODEL_TABLE
    from rlhf_testing.fixtures import pairs as pairs
    from rlhf_testing.fixtures import prompts as prompts
    from rlhf_testing.fixtures import texts as texts
    from rlhf_testing.fixtures import tokenizer as tokenizer
    from rlhf_testing.liars import LIES as LIES
    from rlhf_testing.liars import lying_sampler as lying_sampler
    from rlhf_testing.logger import check_logger as check_logger
    from rlhf_testing.model import check_model as check_model
    from rlhf_testing.pairwise import check_pairwise_loss as check_pairwise_loss
    from rlhf_testing.policy import check_policy_loss as check_policy_loss
    from rlhf_testing.reward import check_reward as check_reward
    from rlhf_testing.trainer import check_trainer as check_trainer

__all__ = [
    "LIES",
    "MODEL_TABLE",
    "check_advantage",
    "check_environment",
    "check_logger",
    "check_model",
    "check_pairwise_loss",
    "check_policy_loss",
    "check_reward",
    "check_trainer",
    "lying_sampler",
    "pairs",
    "prompts",
    "texts",
    "tokenizer",
]

_HOMES = {
    "LIES": "liars",
    "lying_sampler": "liars",
    "check_advantage": "advantage",
    "check_environment": "environment",
    "check_logger": "logger",
    "check_model": "model",
    "check_pairwise_loss": "pairwise",
    "check_policy_loss": "policy",
    "check_reward": "reward",
    "check_trainer": "trainer",
}


def __getattr__(name: str) -> Any:
    """Import a kit when it is used: `rlhf --help` imports this package, and needs none."""
    if name not in __all__:
        raise AttributeError(f"module 'rlhf_testing' has no attribute '{name}'")
    home = _HOMES.get(name, "fixtures")
    return getattr(import_module(f"rlhf_testing.{home}"), name)
