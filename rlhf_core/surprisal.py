"""What is known of sampled tokens' surprisal: moments of their distributions, and bets against an honest sampler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

LAMBDAS = (1 / 2, -1 / 2, 1 / 8, -1 / 8, 1 / 32, -1 / 32)
"""The exponents of the bets: large ones find large gaps soon, small ones small gaps at all."""
MOMENTS = tuple(
    f"surprisal/{name}"
    for name in ("logps", "entropies", "variances", *(f"power{each:+g}" for each in LAMBDAS))
)
"""The names of `Moments` as an objective's values."""


class Moments(NamedTuple):
    """A token's log-probability and the moments of the distribution p that it is drawn from, float32 of one shape.

    logps, entropies: nats. variances: Σ p (log p)² − H², nats². powers: log Σ p^(1 + λ) for every λ of LAMBDAS.
    All are 0 where there is no token.
    """

    logps: jax.Array
    entropies: jax.Array
    variances: jax.Array
    powers: tuple[jax.Array, ...]

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names that `named` gives."""
        return MOMENTS

    def named(self) -> dict[str, jax.Array]:
        """Return them by name, as the values of an objective, without a gradient."""
        flat = (self.logps, self.entropies, self.variances, *self.powers)
        return {name: jax.lax.stop_gradient(values) for name, values in zip(MOMENTS, flat, strict=True)}


def raised(log_q: jax.Array) -> tuple[jax.Array, ...]:
    """Compute q^(1 + λ) for every λ of LAMBDAS; log_q: float32, at most 0.

    By an exponential each, since XLA on a CPU keeps every square root that two sums share as an array.
    """
    return tuple(jnp.exp((1.0 + each) * log_q) for each in LAMBDAS)


def log_bets(moments: Mapping[str, Any], tolerance: float) -> NDArray[np.float64]:
    """Compute log e_λ of every token, float64 [tokens, λ of LAMBDAS]; NaN where the moments are.

    e_λ(x) = p(x)^λ / Σ_v p(v)^(1 + λ) has mean 1 where x is drawn from p, so that products of it over tokens are
    e-values (Grünwald et al. 2024, "Safe testing"). tolerance: nats per token that count as honest, |λ| times which
    is taken off. moments: by the names of MOMENTS, float32 [tokens].
    """
    logps = np.asarray(moments["surprisal/logps"], np.float64)
    powers = np.stack([np.asarray(moments[name], np.float64) for name in MOMENTS[3:]], axis=1)
    exponents = np.array(LAMBDAS)
    bets: NDArray[np.float64] = exponents * logps[:, None] - powers - np.abs(exponents) * tolerance
    return bets
