"""Importance sampling between the distribution that drew the completions and the one the trainer computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from rlhf_core.metrics import Max, Mean, Metric, Min

if TYPE_CHECKING:
    from rlhf_core import PolicyInputs
    from rlhf_grpo.config import SamplerCorrection


def importance(inputs: PolicyInputs, sampling_logps: jax.Array, correction: SamplerCorrection) -> jax.Array:
    """What the policy loss of a token is multiplied by, float32 [N, T], no gradient.

    The ratio is exp(old − sampling) of the token, or exp of the sum of that over the sequence's trained tokens;
    outside [min, max] it is clipped ("truncate", Espeholt et al. 2018) or taken as 0 ("mask").
    """
    difference = jnp.where(inputs.mask > 0, inputs.old_logps - sampling_logps, 0.0)
    if correction.level == "sequence":
        difference = inputs.sequence_sum(difference)
    ratio = jax.lax.stop_gradient(jnp.exp(difference))
    if correction.mode == "truncate":
        return jnp.clip(ratio, correction.min, correction.max)
    return jnp.where((ratio >= correction.min) & (ratio <= correction.max), ratio, 0.0)


def mismatch(inputs: PolicyInputs, sampling_logps: jax.Array, ratio: jax.Array | None) -> dict[str, Metric]:
    """How far sampler and trainer are apart, over trained tokens; `ratio` is what `importance` returned."""
    difference = jnp.abs(inputs.old_logps - sampling_logps)
    out: dict[str, Metric] = {
        "sampling/logp_difference_max": Max.of(difference, inputs.mask > 0),
        "sampling/logp_difference_mean": Mean.of(difference, inputs.mask),
    }
    if ratio is not None:
        out |= {
            "sampling/importance_ratio_mean": Mean.of(ratio, inputs.mask),
            "sampling/importance_ratio_min": Min.of(ratio, inputs.mask > 0),
            "sampling/importance_ratio_max": Max.of(ratio, inputs.mask > 0),
        }
    return out
