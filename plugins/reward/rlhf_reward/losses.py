"""Pairwise losses: a value per pair, from the scores of the chosen and of the rejected sequence.

With d = chosen − rejected − margin in reward units; margin is 0 where the data has none. Each is finite, and so is its
gradient, for every finite d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from pydantic import Field

from rlhf_core import LossOutput, PairInputs


def difference(inputs: PairInputs) -> jax.Array:
    """d = chosen − rejected − margin, float32 [pairs], reward units."""
    return inputs.chosen - inputs.rejected - inputs.margin


@dataclass(frozen=True)
class BradleyTerry:
    """−log σ(d): the negative log-likelihood of the Bradley-Terry model (Bradley and Terry 1952; Ouyang et al. 2022,
    eq. 1), with the margin of Llama 2 (Touvron et al. 2023, eq. 2) where the data has one.
    """

    def __call__(self, inputs: PairInputs) -> LossOutput:
        return LossOutput(-jax.nn.log_sigmoid(difference(inputs)))


@dataclass(frozen=True)
class Conservative:
    """−(1 − ε) log σ(d) − ε log σ(−d): Bradley-Terry with label smoothing, for labels that are wrong with probability
    ε (Mitchell 2023, there for DPO). Lowest at d = log((1 − ε) / ε).

    label_smoothing: ε; at 0.5 and above the labels would mean nothing, or the opposite.
    """

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.1

    def __call__(self, inputs: PairInputs) -> LossOutput:
        d = difference(inputs)
        e = self.label_smoothing
        return LossOutput(-(1 - e) * jax.nn.log_sigmoid(d) - e * jax.nn.log_sigmoid(-d))


@dataclass(frozen=True)
class Hinge:
    """max(0, 1 − d), the loss of a ranking SVM (Joachims 2002): 0 once chosen − rejected reaches 1 + margin."""

    def __call__(self, inputs: PairInputs) -> LossOutput:
        return LossOutput(jnp.maximum(0.0, 1.0 - difference(inputs)))


@dataclass(frozen=True)
class Squared:
    """(d − 1 / (2 τ))²: chosen − rejected is drawn to margin + 1 / (2 τ), from above too (the loss of IPO, Azar et al.
    2024, eq. 17, with scores in place of log-ratios).

    tau: τ, above 0; a smaller one asks for a larger difference.
    """

    tau: Annotated[float, Field(gt=0)] = 0.5

    def __call__(self, inputs: PairInputs) -> LossOutput:
        return LossOutput(jnp.square(difference(inputs) - 1.0 / (2.0 * self.tau)))
