"""The KTO objective: a loss and the metrics of implicit rewards, over the completions of packed rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp

from rlhf_core.metrics import Mean, Metric
from rlhf_core.objective import loss_output, sequence_sums, trained_logps
from rlhf_kto.contract import KTO_LOSS, KTOInputs

if TYPE_CHECKING:
    from rlhf_core.models import Definition
    from rlhf_core.packing import Packed
    from rlhf_kto.contract import KTOLoss

Measure: TypeAlias = Callable[[KTOInputs, Any], tuple[Mean, dict[str, Metric], jax.Array]]
"""`completion_loss` with all but its inputs and `present` bound."""


def completion_loss(
    loss: KTOLoss, inputs: KTOInputs, present: jax.Array, *, name: str, weights: tuple[float, float]
) -> tuple[Mean, dict[str, Metric], jax.Array]:
    """Compute the mean over completions of weight · loss, the metrics of the implicit rewards β log (π / π_ref), and
    the weighted losses, float32 in the inputs' shape.

    present: bool, False where there is no completion. name: prefix of the loss's own metrics. weights: of desirable
    and of undesirable completions. Metrics of one label are NaN where no completion has it.
    """
    shape = jnp.shape(inputs.logps)
    out = loss_output(loss, inputs, shape, what=f"kto loss '{name}'", element="completion", caller=__file__)
    good = present & inputs.desirable
    bad = present & ~inputs.desirable
    reward = inputs.beta * inputs.ratio
    gain = inputs.ratio - inputs.kl
    metrics: dict[str, Metric] = {
        "rewards/chosen": Mean.of(reward, good),
        "rewards/rejected": Mean.of(reward, bad),
        "rewards/accuracies": Mean.of(jnp.where(inputs.desirable, gain > 0, gain < 0), present),
        "logps/chosen": Mean.of(inputs.logps, good),
        "logps/rejected": Mean.of(inputs.logps, bad),
    }
    if KTO_LOSS.attribute(loss, "reads_kl"):
        metrics["kl"] = Mean.of(inputs.kl, present)
    metrics |= {f"{name}/{k}": Mean.of(v, present) for k, v in out.metrics.items()}
    losses = jnp.where(inputs.desirable, *weights) * out.loss
    return Mean.of(losses, present), metrics, losses


def sequence_logps(model: Definition, params: Any, batch: Packed) -> jax.Array:
    """Sum the log-probabilities of every sequence's trained tokens, float32 [rows, sequences], nats; 0 without any."""
    logps, _ = trained_logps(model, params, batch)
    return sequence_sums(logps, batch)


def objective(
    model: Definition, measure: Measure, params: Any, batch: Packed, *, beta: float
) -> tuple[Mean, Mapping[str, Metric], Mapping[str, jax.Array]]:
    """Measure rows whose sequences have their `reference` log-probability, their `label` and perhaps the `kl`."""
    values = {name: jnp.asarray(array) for name, array in batch.sequence_values.items()}
    logps = sequence_logps(model, params, batch)
    kl = values.get("kl", jnp.zeros_like(logps))
    inputs = KTOInputs(logps, values["reference"], values["label"] > 0, kl, beta)
    loss, metrics, losses = measure(inputs, batch.last >= 0)
    return loss, metrics, {"loss": losses}
