"""What is known of sampled tokens' surprisal: moments of their distributions, and bets against an honest sampler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

LAMBDAS = (1 / 2, -1 / 2, 1 / 8, -1 / 8, 1 / 32, -1 / 32)
"""The sizes of the bets: large ones find large gaps soon, small ones small gaps at all. Above 0 they are won by tokens
that are likelier than the entropy says, below 0 by those that are less likely."""
MOMENTS = ("surprisal/logps", "surprisal/entropies", "surprisal/variances")
"""The names of `Moments` as an objective's values."""


class Moments(NamedTuple):
    """A token's log-probability and the moments of the distribution p that it is drawn from, float32 of one shape.

    logps, entropies: nats. variances: Σ p (log p)² − H², nats². All are 0 where there is no token.
    """

    logps: jax.Array
    entropies: jax.Array
    variances: jax.Array

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names that `named` gives."""
        return MOMENTS

    def named(self) -> dict[str, jax.Array]:
        """Return them by name, as the values of an objective, without a gradient."""
        return {name: jax.lax.stop_gradient(values) for name, values in zip(MOMENTS, self, strict=True)}


def log_bets(moments: Mapping[str, Any], tolerance: float) -> NDArray[np.float64]:
    """Compute log e_λ of every token, float64 [tokens, λ of LAMBDAS]; NaN where the moments are.

    s = −log p(x) − H is at least −H, and has mean 0 and variance V where x is drawn from p. e_λ then has a mean of at
    most 1, so that products of it over tokens are e-values (Grünwald et al. 2024, "Safe testing"):

    λ > 0: exp(−λ s) over the largest mean that it has for any such s (Bennett 1962, "Probability inequalities for the
        sum of independent random variables").
    λ < 0: 1 + c s with c = min(−λ, 1 / 2 H), which stays above 1/2 (Waudby-Smith & Ramdas 2024, "Estimating means of
        bounded random variables by betting").

    tolerance: nats per token that count as honest, |λ| or c times which is taken off. moments: by the names of MOMENTS,
    float32 [tokens].
    """
    logps, entropies, variances = (np.asarray(moments[name], np.float64) for name in MOMENTS)
    excess = -logps - entropies
    # A policy without entropy has s = 0 and nothing to bet on.
    least = np.maximum(entropies, SMALLEST_ENTROPY)
    bets = [
        _bet_on_likely(excess, least, variances, each, tolerance)
        if each > 0
        else _bet_on_unlikely(excess, least, -each, tolerance)
        for each in LAMBDAS
    ]
    return np.stack(bets, axis=-1)


SMALLEST_ENTROPY = 1e-9
"""Of a distribution that is divided by, nats."""


def _bet_on_likely(
    excess: NDArray[np.float64],
    entropies: NDArray[np.float64],
    variances: NDArray[np.float64],
    exponent: float,
    tolerance: float,
) -> NDArray[np.float64]:
    squares = np.square(entropies)
    rare = squares * np.exp(-exponent * variances / entropies)
    most = (variances * np.exp(exponent * entropies) + rare) / (variances + squares)
    return -exponent * (excess + tolerance) - np.log(most)


def _bet_on_unlikely(
    excess: NDArray[np.float64], entropies: NDArray[np.float64], most: float, tolerance: float
) -> NDArray[np.float64]:
    factors = np.minimum(most, 0.5 / entropies)
    return np.log1p(factors * excess) - factors * tolerance
