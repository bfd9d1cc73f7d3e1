"""Rewards that need no weights: answers, patterns, lengths and mathematics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core import REWARD, hookimpl
from rlhf_rewards.functions import Regex as Regex
from rlhf_rewards.functions import SoftOverlong as SoftOverlong
from rlhf_rewards.functions import exact_match as exact_match
from rlhf_rewards.functions import length as length
from rlhf_rewards.functions import numeric_answer as numeric_answer
from rlhf_rewards.functions import repetition as repetition
from rlhf_rewards.math import MathVerify as MathVerify

if TYPE_CHECKING:
    from rlhf_core import Registry

__all__ = [
    "MathVerify",
    "Regex",
    "SoftOverlong",
    "exact_match",
    "length",
    "numeric_answer",
    "repetition",
]


@hookimpl
def rlhf_register(registry: Registry) -> None:
    registry.add(REWARD, "exact_match", exact_match)
    registry.add(REWARD, "numeric_answer", numeric_answer)
    registry.add(REWARD, "math_verify", MathVerify)
    registry.add(REWARD, "regex", Regex)
    registry.add(REWARD, "length", length)
    registry.add(REWARD, "soft_overlong", SoftOverlong)
    registry.add(REWARD, "repetition", repetition)
