"""Check a component with one call, which reports every property that it breaks.

    from rlhf_core.testing import check_policy_loss

    def test_it() -> None:
        check_policy_loss(MyLoss(temperature=2.0))

A kit raises one AssertionError with a line per broken property: its name, what happened, with numbers, and what to do.
It needs no test framework. Everything runs on models, texts and arrays of a few elements.
"""

from __future__ import annotations

from rlhf_core.testing.advantage import check_advantage as check_advantage
from rlhf_core.testing.dataset import check_dataset as check_dataset
from rlhf_core.testing.environment import check_environment as check_environment
from rlhf_core.testing.fixtures import MODEL_TABLE as MODEL_TABLE
from rlhf_core.testing.fixtures import pairs as pairs
from rlhf_core.testing.fixtures import prompts as prompts
from rlhf_core.testing.fixtures import texts as texts
from rlhf_core.testing.fixtures import tokenizer as tokenizer
from rlhf_core.testing.logger import check_logger as check_logger
from rlhf_core.testing.model import check_model as check_model
from rlhf_core.testing.optimizer import check_optimizer as check_optimizer
from rlhf_core.testing.pairwise import check_pairwise_loss as check_pairwise_loss
from rlhf_core.testing.policy import check_policy_loss as check_policy_loss
from rlhf_core.testing.reward import check_reward as check_reward
from rlhf_core.testing.trainer import check_trainer as check_trainer

__all__ = [
    "MODEL_TABLE",
    "check_advantage",
    "check_dataset",
    "check_environment",
    "check_logger",
    "check_model",
    "check_optimizer",
    "check_pairwise_loss",
    "check_policy_loss",
    "check_reward",
    "check_trainer",
    "pairs",
    "prompts",
    "texts",
    "tokenizer",
]
