"""The DPO objective: a loss and the metrics of implicit rewards, over the pairs of packed rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp

from rlhf_core.metrics import Mean, Metric
from rlhf_core.objective import loss_output, sequence_sums, trained_logps
from rlhf_dpo.contract import DPOInputs

if TYPE_CHECKING:
    from rlhf_core.models import Definition
    from rlhf_core.packing import Packed
    from rlhf_dpo.contract import DPOLoss

Measure: TypeAlias = Callable[[DPOInputs, jax.Array], tuple[Mean, Mapping[str, Metric], jax.Array]]
"""(pairs, bool [pairs]: which are present) → the loss, the metrics and each pair's loss: `pair_loss` with its other
arguments bound."""


def pair_loss(
    loss: DPOLoss, inputs: DPOInputs, present: jax.Array, *, name: str
) -> tuple[Mean, dict[str, Metric], jax.Array]:
    """Compute the mean over pairs of loss(pair), the metrics of the implicit rewards β (log π − log π_ref), the losses.

    present: bool [pairs], False where there is no pair. name: prefix of the loss's own metrics.
    """
    shape = jnp.shape(inputs.logps_chosen)
    out = loss_output(loss, inputs, shape, what=f"dpo loss '{name}'", element="pair", caller=__file__)
    chosen, rejected = inputs.beta * inputs.ratio_chosen, inputs.beta * inputs.ratio_rejected
    metrics: dict[str, Metric] = {
        "rewards/chosen": Mean.of(chosen, present),
        "rewards/rejected": Mean.of(rejected, present),
        "rewards/accuracies": Mean.of(chosen > rejected, present),
        "rewards/margins": Mean.of(chosen - rejected, present),
        "logps/chosen": Mean.of(inputs.logps_chosen, present),
        "logps/rejected": Mean.of(inputs.logps_rejected, present),
    }
    own = {f"{name}/{k}": Mean.of(v, present) for k, v in out.metrics.items()}
    return Mean.of(out.loss, present), metrics | own, out.loss


def sequence_logps(model: Definition, params: Any, batch: Packed) -> jax.Array:
    """Sum the log-probabilities of every sequence's trained tokens, float32 [rows, sequences], nats; 0 without any."""
    logps, _ = trained_logps(model, params, batch)
    return sequence_sums(logps, batch)


def inputs_of(logps: Any, reference: Any, tokens: Any, beta: float) -> DPOInputs:
    """Make the inputs of a loss from arrays float32 [..., 2 pairs], chosen and rejected in turn.

    reference: None for a loss that does not read it: 0.
    """
    reference = jnp.zeros_like(logps) if reference is None else reference
    arrays = (jnp.asarray(x) for x in (logps, reference, tokens))
    (a, b), (ref_a, ref_b), (n, m) = ((x[..., 0::2].reshape(-1), x[..., 1::2].reshape(-1)) for x in arrays)
    return DPOInputs(a, b, ref_a, ref_b, jnp.maximum(n, 1.0), jnp.maximum(m, 1.0), beta)


def objective(
    model: Definition, measure: Measure, params: Any, batch: Packed, *, beta: float
) -> tuple[Mean, Mapping[str, Metric], Mapping[str, jax.Array]]:
    """Measure rows whose sequences 2i and 2i + 1 are the chosen and the rejected one of a pair.

    Sequences carry the values `tokens`, their number, and `reference`, their log-probability under the reference, where
    the loss reads it. The value `loss` is the pair's, at both of its sequences.
    """
    values = batch.sequence_values
    logps = sequence_logps(model, params, batch)
    pairs = inputs_of(logps, values.get("reference"), values["tokens"], beta)
    loss, metrics, losses = measure(pairs, jnp.asarray(batch.last[:, 0::2] >= 0).reshape(-1))
    return loss, metrics, {"loss": jnp.repeat(losses, 2).reshape(batch.last.shape)}
