"""The GRPO objective: a policy loss with its aggregation, KL and entropy terms, over packed rows or padded arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp

from rlhf_core import POLICY_LOSS, PolicyInputs
from rlhf_core.metrics import Max, Mean, Metric, Min
from rlhf_core.objective import loss_output, trained_logps, trained_moments, trained_sequence, trained_weight
from rlhf_grpo.losses import Level, ratio

if TYPE_CHECKING:
    from rlhf_core import PolicyInputs, PolicyLoss
    from rlhf_core.models import Definition
    from rlhf_core.packing import Packed
    from rlhf_grpo.config import GRPOConfig, SamplerCorrection


def importance(inputs: PolicyInputs, sampling_logps: jax.Array, correction: SamplerCorrection) -> jax.Array:
    """Compute the factor of each token's policy loss, float32 [N, T], without gradient.

    The ratio is exp(old − sampling) of the token, or exp of its sum or mean over the sequence's trained tokens;
    outside [min, max] it is clipped ("truncate", Espeholt et al. 2018) or taken as 0 ("mask").
    """
    difference = jnp.where(inputs.mask > 0, inputs.old_logps - sampling_logps, 0.0)
    if correction.level == "sequence":
        difference = inputs.sequence_sum(difference)
    elif correction.level == "geometric":
        difference = inputs.sequence_mean(difference)
    ratio = jax.lax.stop_gradient(jnp.exp(difference))
    if correction.mode == "truncate":
        return jnp.clip(ratio, correction.min, correction.max)
    return jnp.where((ratio >= correction.min) & (ratio <= correction.max), ratio, 0.0)


def mismatch(inputs: PolicyInputs, sampling_logps: jax.Array, ratio: jax.Array | None) -> dict[str, Metric]:
    """Measure how far sampler and trainer differ over trained tokens; `ratio` is what `importance` returned."""
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


@dataclass(frozen=True)
class Terms:
    """The terms that the trainer adds to a policy loss, and how it averages.

    name: the loss's, in front of the metrics it reports. beta, kl, bias_correction: of the KL term in the loss.
    entropy_coef: weight of the mean entropy. max_completion_length: what `fixed_length` divides by.
    """

    name: str
    beta: float = 0.0
    kl: str = "k3"
    bias_correction: bool = False
    entropy_coef: float = 0.0
    max_completion_length: int = 1

    @classmethod
    def of(cls, config: GRPOConfig) -> Terms:
        return cls(
            name=config.loss.name,
            beta=config.kl.beta if config.kl.place == "loss" else 0.0,
            kl=config.kl.name,
            bias_correction=config.use_bias_correction_kl,
            entropy_coef=config.entropy_coef,
            max_completion_length=config.sampling.max_completion_length,
        )


def kl_estimate(logps: jax.Array, ref_logps: jax.Array, name: str) -> jax.Array:
    """Estimate KL(policy ‖ reference) per token from the sampled token, nats (Schulman 2020).

    With d = ref − logp: k1 = −d, k2 = d²/2, k3 = exp(d) − d − 1.
    """
    d = ref_logps - logps
    if name == "k1":
        return -d
    if name == "k2":
        return 0.5 * jnp.square(d)
    if name == "k3":
        return jnp.exp(d) - d - 1.0
    raise ValueError(f"kl: '{name}' is not one of k1, k2, k3")


def combine(
    loss: PolicyLoss,
    inputs: PolicyInputs,
    terms: Terms,
    *,
    sequences: Any,
    kept: jax.Array | None = None,
    importance: jax.Array | None = None,
    num_items: Any = None,
) -> tuple[Mean | Mapping[str, Mean], dict[str, Metric]]:
    """Combine a policy loss with KL and entropy terms: return it as sum and count, with its metrics.

    With `entropy_coef` it is two losses, "policy" and "entropy", whose means are over different tokens.

    sequences: how many there are, those without a trained token included (they count in the average over sequences).
    kept: float32 [N, T], 0 where the entropy quantile leaves a token out of the policy loss (KL stays).
    importance: float32 [N, T], what the policy loss is multiplied by, as `importance` gives it.
    num_items: the tokens that a mean over tokens divides by; None: those of the mask.

    Raises InputError for a loss that raises, or does not return one number per token.
    """
    mask = inputs.mask
    out = loss_output(
        loss, inputs, mask.shape, what=f"policy loss '{terms.name}'", element="token", caller=__file__
    )
    value = out.loss if kept is None else out.loss * kept
    value = value if importance is None else value * importance
    metrics: dict[str, Metric] = {
        key if key.startswith("clip_ratio/") else f"{terms.name}/{key}": Mean.of(x, mask)
        for key, x in out.metrics.items()
    }
    if inputs.ref_logps is not None:
        kl = kl_estimate(inputs.logps, inputs.ref_logps, terms.kl)
        metrics["kl"] = Mean.of(kl, mask)
        if terms.beta:
            level = cast("Level", POLICY_LOSS.attribute(loss, "importance_sampling_level"))
            value = value + terms.beta * (kl * ratio(inputs, level) if terms.bias_correction else kl)
    aggregation = POLICY_LOSS.attribute(loss, "aggregation")
    if aggregation == "token_mean":
        total = (value * mask).sum()
        count = mask.sum() if num_items is None else num_items
    elif aggregation == "sequence_mean":
        length = jnp.maximum(inputs.sequence_sum(jnp.ones_like(mask)), 1.0)
        total = (value * mask / length).sum()
        count = sequences
    else:
        total = (value * mask).sum()
        count = sequences * terms.max_completion_length
    policy = Mean(total, jnp.asarray(count, jnp.float32))
    if inputs.entropies is None:
        return policy, metrics
    metrics["entropy"] = Mean.of(inputs.entropies, mask)
    if not terms.entropy_coef:
        return policy, metrics
    bonus = Mean.of(-terms.entropy_coef * inputs.entropies, mask if kept is None else mask * kept)
    return {"policy": policy, "entropy": bonus}, metrics


def objective(
    model: Definition,
    loss: PolicyLoss,
    terms: Terms,
    params: Any,
    batch: Packed,
    *,
    temperature: float,
    correction: SamplerCorrection | None = None,
    num_items: Any = None,
    moments: bool = False,
) -> tuple[Any, ...]:
    """Compute the loss and metrics of rows, and with `moments` the values that the sampling test reads.

    Per trained token they carry `advantages` and, where they are known, `sampling_logps`, `old_logps` (without: the
    policy's own, so that the ratio is 1 with its gradient), `ref_logps` (NaN: this policy is the reference) and `kept`;
    per sequence `reward`, where it is known. num_items: as for `combine`.
    """
    if moments:
        found = trained_moments(model, params, batch, temperature=temperature)
        logps, entropies = found.logps, found.entropies
    else:
        logps, entropies = trained_logps(model, params, batch, temperature=temperature, entropy=True)
    mask, sequence = trained_weight(batch), trained_sequence(batch)
    values = {name: jnp.asarray(value) for name, value in batch.token_values.items()}
    own = jax.lax.stop_gradient(logps)
    rewards = batch.sequence_values.get("reward")
    reference = values.get("ref_logps")
    if reference is not None:
        reference = jnp.where(jnp.isnan(reference), own, reference)
    inputs = PolicyInputs(
        logps=logps,
        old_logps=values.get("old_logps", own),
        advantages=values["advantages"],
        mask=mask,
        ref_logps=reference,
        entropies=entropies,
        sequence=sequence,
        sequences=batch.last.shape[1],
        rewards=None if rewards is None else jnp.take_along_axis(rewards, sequence, axis=1),
    )
    sampling = values.get("sampling_logps")
    corrected = None
    if sampling is not None and correction is not None:
        corrected = importance(inputs, sampling, correction)
    value, metrics = combine(
        loss,
        inputs,
        terms,
        sequences=(batch.last >= 0).sum(),
        kept=values.get("kept"),
        importance=corrected,
        num_items=num_items,
    )
    if sampling is not None:
        metrics |= mismatch(inputs, sampling, corrected)
    return (value, metrics, found.named()) if moments else (value, metrics)
