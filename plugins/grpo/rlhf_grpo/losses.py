"""Policy losses: per-token values from log-probabilities and advantages.

r = exp(logp − old) is the importance ratio of a token or of its sequence, A its advantage. The attribute `aggregation`
of a loss chooses how the trainer averages it; KL, entropy terms and masks are the trainer's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from rlhf_core import LossOutput, PolicyInputs

Level = Literal["token", "sequence", "sequence_token"]


def ratio(inputs: PolicyInputs, level: Level = "token") -> jax.Array:
    """Compute the importance ratio, float32 [N, T].

    token: exp(logp − old). sequence: exp of the sequence's mean of logp − old (GSPO, Zheng et al. 2025, eq. 7).
    sequence_token: the sequence's value with each token's own gradient (GSPO-token, eq. 14).
    """
    difference = inputs.logps - inputs.old_logps
    if level == "sequence":
        difference = inputs.sequence_mean(difference)
    elif level == "sequence_token":
        mean = jax.lax.stop_gradient(inputs.sequence_mean(difference))
        difference = mean + inputs.logps - jax.lax.stop_gradient(inputs.logps)
    elif level != "token":
        raise ValueError(
            f"importance_sampling_level: '{level}' is not one of token, sequence, sequence_token"
        )
    return jnp.exp(difference)


@dataclass(frozen=True)
class Clipped:
    """−min(min(r, δ) A, clip(r, 1 − ε, 1 + ε_high) A): PPO's surrogate (Schulman et al. 2017, eq. 7), with separate
    bounds (DAPO, Yu et al. 2025), an upper bound δ that holds for negative advantages too (INTELLECT-2, Prime Intellect
    2025), and dual clipping: for A < 0 the loss is at most −c A (Ye et al. 2020).
    """

    epsilon: float = 0.2
    epsilon_high: float | None = 0.2
    delta: float | None = None
    dual_clip: float | None = None
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "token"
    aggregation: ClassVar[str] = "token_mean"

    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        a = inputs.advantages
        free = ratio(inputs, self.importance_sampling_level)
        r = free if self.delta is None else jnp.minimum(free, self.delta)
        loss = -jnp.minimum(r * a, jnp.clip(free, 1 - self.epsilon, 1 + high) * a)
        if self.dual_clip is not None:
            loss = jnp.where(a < 0, jnp.minimum(loss, -self.dual_clip * a), loss)
        low = (r < 1 - self.epsilon) & (a < 0)
        up = (r > 1 + high) & (a > 0)
        return LossOutput(loss, clip_metrics(low, up))


def clip_metrics(low: jax.Array, high: jax.Array) -> dict[str, jax.Array]:
    """Return the clip metrics, one value per token."""
    return {
        "clip_ratio/low_mean": low.astype(jnp.float32),
        "clip_ratio/high_mean": high.astype(jnp.float32),
        "clip_ratio/region_mean": (low | high).astype(jnp.float32),
    }


@dataclass(frozen=True)
class DAPO(Clipped):
    """The clipped surrogate, averaged over all tokens of the update (Yu et al. 2025, eq. 8)."""


@dataclass(frozen=True)
class GRPO(Clipped):
    """The clipped surrogate, averaged within each sequence, then over sequences (Shao et al. 2024, eq. 3)."""

    aggregation: ClassVar[str] = "sequence_mean"


@dataclass(frozen=True)
class DrGRPO(Clipped):
    """The clipped surrogate, summed and divided by sequences × maximum length (Liu et al. 2025)."""

    aggregation: ClassVar[str] = "fixed_length"


@dataclass(frozen=True)
class GSPO(GRPO):
    """Sequence-level ratios (GSPO, Zheng et al. 2025, eq. 5); their ε is about 3e-4."""

    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "sequence"


@dataclass(frozen=True)
class GSPOToken(GRPO):
    """Sequence-level ratios with token-level gradients (Zheng et al. 2025, eq. 13)."""

    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "sequence_token"


@dataclass(frozen=True)
class CISPO:
    """−sg(min(r, ε_high)) A logp: the weight is capped, the gradient never cut off (MiniMax-M1 2025, eqs. 4 and 5).

    `epsilon_high` is the cap itself, where the paper's is its distance from 1; 0.2 scales every on-policy gradient by
    0.2. There is no lower bound, as in the paper's experiments.
    """

    epsilon_high: float = 0.2
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "token"
    aggregation: ClassVar[str] = "token_mean"

    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        r = ratio(inputs, self.importance_sampling_level)
        weight = jax.lax.stop_gradient(jnp.minimum(r, self.epsilon_high))
        capped = (r > self.epsilon_high) & (inputs.advantages > 0)
        return LossOutput(
            -weight * inputs.advantages * inputs.logps, clip_metrics(jnp.zeros_like(capped), capped)
        )


@dataclass(frozen=True)
class SAPO:
    """−4 σ(τ (r − 1)) / τ A with a temperature τ for each sign of A: a gate in place of a clip (Gao et al. 2025)."""

    temperature_pos: float = 1.0
    temperature_neg: float = 1.05
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "token"
    aggregation: ClassVar[str] = "sequence_mean"

    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        r = ratio(inputs, self.importance_sampling_level)
        t = jnp.where(inputs.advantages > 0, self.temperature_pos, self.temperature_neg)
        return LossOutput(-4.0 * jax.nn.sigmoid(t * (r - 1.0)) / t * inputs.advantages)
