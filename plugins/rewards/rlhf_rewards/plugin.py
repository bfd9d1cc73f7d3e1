"""The plugin: what rlhf-rewards registers."""

from __future__ import annotations

from rlhf_core import REWARD, Registry, hookimpl


@hookimpl
def rlhf_register(registry: Registry) -> None:
    for name in ("exact_match", "numeric_answer", "length", "repetition"):
        registry.add(REWARD, name, f"rlhf_rewards.functions:{name}")
    registry.add(REWARD, "math_verify", "rlhf_rewards.math:MathVerify")
    registry.add(REWARD, "regex", "rlhf_rewards.functions:Regex")
    registry.add(REWARD, "soft_overlong", "rlhf_rewards.functions:SoftOverlong")
