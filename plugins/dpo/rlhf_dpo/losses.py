"""DPO losses: a value per pair.

With h = β [(log π − log π_ref)(chosen) − (log π − log π_ref)(rejected)], log-probabilities summed over a completion.
Each is finite, and so is its gradient, for every finite h. Losses with `reads_reference = False` compare with no
reference: π_ref is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import jax
import jax.numpy as jnp
from pydantic import Field

from rlhf_core import LossOutput
from rlhf_dpo.contract import DPOInputs

if TYPE_CHECKING:
    import jax

NEAREST_TO_ONE = -(2.0**-23)
"""The log-probability, nats, nearest to 0 at which odds are taken: 1 − p is then the precision of float32."""


def difference(inputs: DPOInputs) -> jax.Array:
    """Compute h, the difference of the implicit rewards, float32 [pairs]."""
    return inputs.beta * (inputs.ratio_chosen - inputs.ratio_rejected)


def mean_difference(inputs: DPOInputs) -> jax.Array:
    """Subtract the two log-ratios, each a mean over its completion's tokens, float32 [pairs], nats."""
    return inputs.ratio_chosen / inputs.tokens_chosen - inputs.ratio_rejected / inputs.tokens_rejected


def smoothed_log_sigmoid(h: jax.Array, share: float) -> jax.Array:
    """Compute −(1 − ε) log σ(h) − ε log σ(−h) with ε = share."""
    value = -(1 - share) * jax.nn.log_sigmoid(h)
    return value - share * jax.nn.log_sigmoid(-h) if share else value


@dataclass(frozen=True)
class Sigmoid:
    """−log σ(h) (DPO, Rafailov et al. 2023, eq. 7); with label smoothing −(1 − ε) log σ(h) − ε log σ(−h) (conservative
    DPO, Mitchell 2023), lowest at h = log((1 − ε) / ε).

    label_smoothing: ε, the share of labels taken to be wrong.
    """

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0

    def __call__(self, inputs: DPOInputs) -> LossOutput:
        return LossOutput(smoothed_log_sigmoid(difference(inputs), self.label_smoothing))


@dataclass(frozen=True)
class SigmoidNorm:
    """−log σ(h) with each log-ratio divided by its completion's tokens (length-normalised DPO, Lambert et al. 2024), so
    that long completions do not count more. β is then larger, by about a completion's length.

    label_smoothing: as in `sigmoid`.
    """

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0

    def __call__(self, inputs: DPOInputs) -> LossOutput:
        return LossOutput(smoothed_log_sigmoid(inputs.beta * mean_difference(inputs), self.label_smoothing))


@dataclass(frozen=True)
class Ipo:
    """(d − 1 / (2 β))², d the difference of the two log-ratios (IPO, Azar et al. 2024, eq. 17, where β is called τ):
    they are drawn to a finite distance, so that pairs which never contradict each other do not pull without end.

    mean: take log-ratios as means over tokens, so that β means the same at every length; false: sums, as in the paper.
    """

    mean: bool = True

    def __call__(self, inputs: DPOInputs) -> LossOutput:
        d = mean_difference(inputs) if self.mean else inputs.ratio_chosen - inputs.ratio_rejected
        return LossOutput(jnp.square(d - 1.0 / (2.0 * inputs.beta)))


@dataclass(frozen=True)
class HingeOnRewards:
    """max(0, 1 − h) (SLiC, Zhao et al. 2023, on the implicit rewards, Liu et al. 2024): pairs with a large
    enough margin have no gradient.
    """

    def __call__(self, inputs: DPOInputs) -> LossOutput:
        return LossOutput(jnp.maximum(0.0, 1.0 - difference(inputs)))


@dataclass(frozen=True)
class Robust:
    """[−(1 − ε) log σ(h) + ε log σ(−h)] / (1 − 2 ε) (robust DPO, Ray Chowdhury et al. 2024): where a share ε of the
    labels is flipped at random, its mean is that of −log σ(h) on the true ones.

    label_smoothing: ε; 0 is `sigmoid`.
    """

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0

    def __call__(self, inputs: DPOInputs) -> LossOutput:
        h = difference(inputs)
        e = self.label_smoothing
        value = -(1 - e) * jax.nn.log_sigmoid(h) + e * jax.nn.log_sigmoid(-h)
        return LossOutput(value / (1 - 2 * e))


def likelihood_loss(inputs: DPOInputs) -> jax.Array:
    """Compute the mean negative log-likelihood per token of the chosen completion, float32 [pairs], nats."""
    return -inputs.logps_chosen / inputs.tokens_chosen


def log_odds(mean_logps: jax.Array) -> jax.Array:
    """Compute log(p / (1 − p)) with p = exp(mean_logps), the mean log-probability of a completion's tokens, nats.

    Value and gradient are finite where p rounds to 1.
    """
    logps = jnp.minimum(mean_logps, NEAREST_TO_ONE)
    return logps - jnp.log(-jnp.expm1(logps))


@dataclass(frozen=True)
class Simpo:
    """−log σ(β (m(chosen) − m(rejected)) − γ), m the mean log-probability of a completion's tokens (SimPO, Meng et al.
    2024): the implicit reward is β m, as completions are sampled, and long ones do not count more.

    gamma: γ, the margin by which the reward of the chosen completion should be the higher one, in units of β m.
    """

    reads_reference: ClassVar[bool] = False

    gamma: Annotated[float, Field(ge=0)] = 1.0

    def __call__(self, inputs: DPOInputs) -> LossOutput:
        margins = inputs.beta * mean_difference(inputs)
        metrics = {"margins": margins, "accuracies": (margins > 0).astype(jnp.float32)}
        return LossOutput(-jax.nn.log_sigmoid(margins - self.gamma), metrics)


@dataclass(frozen=True)
class Orpo:
    """The mean negative log-likelihood per token of the chosen completion, less weight × log σ(log odds(chosen) −
    log odds(rejected)), odds p / (1 − p) with p = exp(mean log-probability of the tokens) (ORPO, Hong et al. 2024):
    SFT and preferences in one stage. β has no part in it.

    weight: λ, that of the odds ratio.
    """

    reads_reference: ClassVar[bool] = False

    weight: Annotated[float, Field(ge=0)] = 0.1

    def __call__(self, inputs: DPOInputs) -> LossOutput:
        nll = likelihood_loss(inputs)
        ratio = log_odds(-nll) - log_odds(inputs.logps_rejected / inputs.tokens_rejected)
        metrics = {"nll": nll, "accuracies": (ratio > 0).astype(jnp.float32)}
        return LossOutput(nll - self.weight * jax.nn.log_sigmoid(ratio), metrics)


@dataclass(frozen=True)
class Cpo:
    """−log σ(β (log π(chosen) − log π(rejected))) plus alpha × the mean negative log-likelihood per token of the chosen
    completion (CPO, Xu et al. 2024): DPO with a uniform reference, held to what was chosen.

    alpha: weight of the likelihood.
    """

    reads_reference: ClassVar[bool] = False

    alpha: Annotated[float, Field(ge=0)] = 1.0

    def __call__(self, inputs: DPOInputs) -> LossOutput:
        nll = likelihood_loss(inputs)
        return LossOutput(self.alpha * nll - jax.nn.log_sigmoid(difference(inputs)), {"nll": nll})
