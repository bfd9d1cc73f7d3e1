"""A policy loss in a package of its own: `loss = { name = "tanh", temperature = 2.0 }`."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from rlhf_core import LossOutput, PolicyInputs


@dataclass(frozen=True)
class TanhLoss:
    """−tanh(k (ratio − 1)) · advantage: a policy gradient whose every token is bounded by its advantage.

    temperature: k > 0, unitless; at ratio 1 it scales the gradient, far from 1 the loss goes flat.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}")

    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        """Float32 [N, T], one value a token; the trainer masks, weighs and averages them."""
        ratio = jnp.exp(inputs.logps - inputs.old_logps)
        bounded = jnp.tanh(self.temperature * (ratio - 1.0))
        return LossOutput(-bounded * inputs.advantages, {"ratio": ratio})
