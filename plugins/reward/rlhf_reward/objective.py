"""The reward model's objective: a pairwise loss, plus centring, over the pairs of packed rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp

from rlhf_core import PairInputs
from rlhf_core.metrics import Max, Mean, Metric, Min
from rlhf_core.objective import loss_output, sequence_scores

if TYPE_CHECKING:
    from rlhf_core import PairwiseLoss
    from rlhf_core.models import Definition
    from rlhf_core.packing import Packed

Measure: TypeAlias = Callable[[PairInputs, jax.Array], tuple[Mean, Mapping[str, Metric], jax.Array]]
"""(pairs, bool [pairs]: which are present) → the loss, the metrics and each pair's loss: `pair_loss` with its other
arguments bound."""


def pair_loss(
    loss: PairwiseLoss, pairs: PairInputs, present: jax.Array, coefficient: float | None, *, name: str
) -> tuple[Mean, dict[str, Metric], jax.Array]:
    """Compute the mean over pairs of loss(pair) + coefficient · (chosen + rejected)², the metrics of the scores, and
    the terms of the pairs, float32 [pairs].

    present: bool [pairs], False where there is no pair. name: prefix of the loss's own metrics. The centring term is
    from Eisenstein et al. 2023.
    """
    chosen, rejected = pairs.chosen, pairs.rejected
    what = f"pairwise loss '{name}'"
    out = loss_output(loss, pairs, chosen.shape, what=what, element="pair", caller=__file__)
    value = out.loss
    if coefficient:
        value = value + coefficient * jnp.square(chosen + rejected)
    both = jnp.concatenate([chosen, rejected])
    there = jnp.concatenate([present, present])
    metrics: dict[str, Metric] = {
        "accuracy": Mean.of(chosen > rejected, present),
        "ties": Mean.of(chosen == rejected, present),
        "margin": Mean.of(chosen - rejected, present),
        "mean_reward": Mean.of(both, there),
        "min_reward": Min.of(both, there),
        "max_reward": Max.of(both, there),
    }
    own = {f"{name}/{k}": Mean.of(v, present) for k, v in out.metrics.items()}
    return Mean.of(value, present), metrics | own, value


def objective(
    model: Definition, measure: Measure, params: Any, batch: Packed
) -> tuple[Mean, Mapping[str, Metric], Mapping[str, jax.Array]]:
    """Measure rows whose sequences 2i and 2i + 1 are the chosen and the rejected one of a pair.

    The value `loss` is the pair's, at both of its sequences.
    """
    scores = sequence_scores(model, params, batch)
    chosen, rejected = scores[:, 0::2], scores[:, 1::2]
    pairs = PairInputs(
        chosen=chosen.reshape(-1),
        rejected=rejected.reshape(-1),
        margin=jnp.asarray(batch.sequence_values["margin"])[:, 0::2].reshape(-1),
    )
    loss, metrics, losses = measure(pairs, jnp.asarray(batch.last[:, 0::2] >= 0).reshape(-1))
    return loss, metrics, {"loss": jnp.repeat(losses, 2).reshape(batch.last.shape)}
