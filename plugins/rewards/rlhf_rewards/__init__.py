"""Rewards that need no weights (answers, patterns, lengths, mathematics), and `rlhf score`.

Names are resolved on first use: `rlhf --help` imports this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_rewards.functions import Regex as Regex
    from rlhf_rewards.functions import SoftOverlong as SoftOverlong
    from rlhf_rewards.functions import exact_match as exact_match
    from rlhf_rewards.functions import length as length
    from rlhf_rewards.functions import numeric_answer as numeric_answer
    from rlhf_rewards.functions import repetition as repetition
    from rlhf_rewards.math import MathVerify as MathVerify

__all__ = [
    "MathVerify",
    "Regex",
    "SoftOverlong",
    "exact_match",
    "length",
    "numeric_answer",
    "repetition",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rlhf_rewards' has no attribute '{name}'")
    return getattr(import_module(f"rlhf_rewards.{'math' if name == 'MathVerify' else 'functions'}"), name)
