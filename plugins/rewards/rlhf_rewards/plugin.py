"""The plugin: what rlhf-rewards registers."""

from __future__ import annotations

from rlhf_core import REWARD, Registry, hookimpl
from rlhf_rewards import functions
from rlhf_rewards.math import MathVerify


@hookimpl
def rlhf_register(registry: Registry) -> None:
    registry.add(REWARD, "exact_match", functions.exact_match)
    registry.add(REWARD, "numeric_answer", functions.numeric_answer)
    registry.add(REWARD, "math_verify", MathVerify)
    registry.add(REWARD, "regex", functions.Regex)
    registry.add(REWARD, "length", functions.length)
    registry.add(REWARD, "soft_overlong", functions.SoftOverlong)
    registry.add(REWARD, "repetition", functions.repetition)
