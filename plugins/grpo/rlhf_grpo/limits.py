"""Stopping a run that is collapsing, with what it shows and what to try."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_grpo.config import Limits


def watch(limits: Limits) -> Callable[[Mapping[str, float]], str | None] | None:
    """A function of a logged step's metrics: why the run should stop, or None. None where there are no limits."""
    if limits.kl is None and limits.entropy is None:
        return None

    def reason(metrics: Mapping[str, float]) -> str | None:
        kl, entropy = metrics.get("kl"), metrics.get("entropy")
        shown = ", ".join(
            f"{name} {metrics[name]:.4g}"
            for name in ("reward", "reward_std", "kl", "entropy", "completions/mean_length")
            if name in metrics
        )
        if limits.kl is not None and kl is not None and kl > limits.kl:
            return (
                f"the policy has left its reference: kl {kl:.4g} nats a token is above limits.kl={limits.kl:g} "
                f"({shown}). It may be exploiting the reward: read the newest completions. Raise kl.beta, lower "
                "learning_rate, or train for fewer updates"
            )
        if limits.entropy is not None and entropy is not None and entropy < limits.entropy:
            return (
                f"the policy has collapsed: entropy {entropy:.4g} nats a token is below "
                f"limits.entropy={limits.entropy:g} ({shown}). Its completions are nearly all the same, so groups "
                "have little left to compare. Raise loss.epsilon_high, entropy_coef or kl.beta, or lower learning_rate"
            )
        return None

    return reason
