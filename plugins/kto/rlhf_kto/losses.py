"""KTO losses: a value per completion, between 0 and 1, with r = log π − log π_ref, summed over the completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from rlhf_core import LossOutput
from rlhf_kto.contract import KTOInputs


def loss_of_gain(inputs: KTOInputs, gain: jax.Array) -> LossOutput:
    """Compute 1 − σ(β gain) of desirable completions, 1 − σ(−β gain) of undesirable ones. gain: nats."""
    # 1 − σ(x) is σ(−x), which loses no digits where σ(x) is nearly 1.
    return LossOutput(jax.nn.sigmoid(inputs.beta * jnp.where(inputs.desirable, -gain, gain)))


@dataclass(frozen=True)
class Kto:
    """1 − σ(β (r − z0)) of a desirable completion, 1 − σ(β (z0 − r)) of an undesirable one, z0 being the estimate of
    the policy's KL to the reference (KTO, Ethayarajh et al. 2024, eq. 7).
    """

    def __call__(self, inputs: KTOInputs) -> LossOutput:
        return loss_of_gain(inputs, inputs.ratio - inputs.kl)


@dataclass(frozen=True)
class ApoZeroUnpaired:
    """1 − σ(β r) of a desirable completion, σ(β r) of an undesirable one (APO-zero, D'Oosterlinck et al. 2024, of
    completions that are no pairs). The KL is not estimated.
    """

    reads_kl: ClassVar[bool] = False

    def __call__(self, inputs: KTOInputs) -> LossOutput:
        return loss_of_gain(inputs, inputs.ratio)
