"""Pairwise losses: per-pair values from the scores of a preferred and a rejected reply.

With d = chosen − rejected − margin, all in reward units.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rlhf_core import LossOutput, PairInputs


@dataclass(frozen=True)
class BradleyTerry:
    """−log σ(d): the negative log-likelihood of the Bradley-Terry model (Bradley and Terry 1952; Ouyang et al. 2022,
    eq. 1), with the margin of Llama 2 (Touvron et al. 2023, eq. 2) where the data has one.
    """

    def __call__(self, inputs: PairInputs) -> LossOutput:
        return LossOutput(-jax.nn.log_sigmoid(inputs.chosen - inputs.rejected - inputs.margin))


@dataclass(frozen=True)
class Conservative:
    """−(1 − ε) log σ(d) − ε log σ(−d): label smoothing, for labels wrong with probability ε (Mitchell 2023)."""

    label_smoothing: float = 0.1

    def __call__(self, inputs: PairInputs) -> LossOutput:
        d = inputs.chosen - inputs.rejected - inputs.margin
        e = self.label_smoothing
        return LossOutput(-(1 - e) * jax.nn.log_sigmoid(d) - e * jax.nn.log_sigmoid(-d))


@dataclass(frozen=True)
class Hinge:
    """max(0, 1 − d)."""

    def __call__(self, inputs: PairInputs) -> LossOutput:
        return LossOutput(jnp.maximum(0.0, 1.0 - (inputs.chosen - inputs.rejected - inputs.margin)))


@dataclass(frozen=True)
class Squared:
    """(d − 1 / (2 τ))²: regression of the difference, in the style of IPO (Azar et al. 2023, eq. 17)."""

    tau: float = 0.5

    def __call__(self, inputs: PairInputs) -> LossOutput:
        d = inputs.chosen - inputs.rejected - inputs.margin
        return LossOutput(jnp.square(d - 1.0 / (2.0 * self.tau)))


LOSSES = {"bradley_terry": BradleyTerry, "conservative": Conservative, "hinge": Hinge, "squared": Squared}
