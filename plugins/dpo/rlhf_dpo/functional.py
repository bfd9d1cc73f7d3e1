"""The DPO trainer's loss and update as plain functions over padded batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp

from rlhf_core.metrics import Mean, Metric
from rlhf_core.models import Model
from rlhf_core.training import PaddedObjective, named_loss, padded_rows
from rlhf_dpo.config import BETA, BETAS
from rlhf_dpo.contract import DPO_LOSS
from rlhf_dpo.objective import inputs_of, objective, pair_loss, sequence_logps

if TYPE_CHECKING:
    from rlhf_core import TrainState
    from rlhf_core.models import Definition
    from rlhf_core.packing import Packed
    from rlhf_dpo.contract import DPOLoss

    Loss: TypeAlias = str | Mapping[str, Any] | DPOLoss

SIDES = ("chosen", "rejected")
PARTS = ("input_ids", "attention_mask", "completion_mask")
_named = partial(named_loss, DPO_LOSS)


def dpo_loss(
    logps_chosen: jax.Array,
    logps_rejected: jax.Array,
    ref_logps_chosen: jax.Array | None = None,
    ref_logps_rejected: jax.Array | None = None,
    *,
    tokens_chosen: jax.Array | None = None,
    tokens_rejected: jax.Array | None = None,
    beta: float | None = None,
    loss_type: Loss = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute a DPO loss over log-probabilities, differentiable in those of the policy.

    logps_…, ref_logps_…: float32 [pairs], nats, sums over a completion's tokens. A loss that compares with no reference
    does not read the latter, and they may be left out. tokens_…: their number, [pairs]; None: 1, so that losses which
    divide by it use the sums. beta: None: 0.1, and simpo's 2.0. loss_type: a registered name, a table of the name and
    its options as in a file, {"name": "ipo", "mean": False}, or a component. label_smoothing: for losses that have it,
    named without a table.
    Returns the mean loss, float32 [], and the metrics rewards/chosen, rewards/rejected, rewards/accuracies (strict),
    rewards/margins, logps/chosen and logps/rejected, float32 [] each, with those of the loss.
    Raises ValueError where the loss reads a reference that is not given.
    """
    name, component = _named(loss_type, label_smoothing=label_smoothing)
    present = jnp.ones(jnp.shape(logps_chosen), bool)
    inputs = inputs_of(
        _both(logps_chosen, logps_rejected),
        _reference(name, component, ref_logps_chosen, ref_logps_rejected),
        _both(
            present if tokens_chosen is None else tokens_chosen,
            present if tokens_rejected is None else tokens_rejected,
        ),
        _beta(name, beta),
    )
    value, metrics, _ = pair_loss(component, inputs, present, name=name)
    return value.result(), {k: metric.result() for k, metric in metrics.items()}


def completion_logps(model: Model, input_ids: Any, attention_mask: Any, completion_mask: Any) -> jax.Array:
    """Compute the log-probability of each row's completion, float32 [B], nats: `ref_logps_chosen` and `…_rejected`.

    input_ids, attention_mask, completion_mask: int [B, T]; padding on either side.
    """
    arrays = (jnp.asarray(x, jnp.int32) for x in (input_ids, attention_mask, completion_mask))
    return _completion_logps(model.definition, model.params, *arrays)


def training_step(
    state: TrainState,
    batch: Mapping[str, Any],
    *,
    beta: float | None = None,
    loss_type: Loss = "sigmoid",
    gradient_accumulation_steps: int = 1,
    label_smoothing: float = 0.0,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Update the state from a padded batch; nothing is donated.

    batch: input_ids_chosen, attention_mask_chosen, completion_mask_chosen and the same of rejected, int [pairs, T]
    (chosen and rejected may differ in T; padding on either side), and, where the loss reads them, ref_logps_chosen and
    ref_logps_rejected, float [pairs], nats. A completion's log-probability is the sum over the tokens of its mask, each
    predicted from all before it; losses that divide by its length count the tokens of its mask.
    The batch is processed in `gradient_accumulation_steps` equal parts; the result does not depend on them.
    beta, loss_type, label_smoothing: as for `dpo_loss`.
    Returns the next state and the metrics of `dpo_loss`, with `loss` and `grad_norm` (before the optimizer).
    Raises ValueError where the parts do not divide the batch, or an array is missing.
    """
    padded = _padded(_named(loss_type, label_smoothing=label_smoothing), beta)
    return padded.update(state, batch, gradient_accumulation_steps)


def evaluation_step(
    state: TrainState,
    batch: Mapping[str, Any],
    *,
    beta: float | None = None,
    loss_type: Loss = "sigmoid",
    label_smoothing: float = 0.0,
) -> dict[str, jax.Array]:
    """Compute the loss and metrics of `training_step` without an update."""
    padded = _padded(_named(loss_type, label_smoothing=label_smoothing), beta)
    return padded.evaluate(state, batch)


@partial(jax.jit, static_argnums=0)
def _completion_logps(model: Definition, params: Any, *arrays: jax.Array) -> jax.Array:
    return sequence_logps(model, params, _rows(arrays))[:, 0]


@dataclass(frozen=True)
class _PaddedDPO(PaddedObjective):
    """The trainer's objective of a padded batch."""

    ids = tuple(f"{part}_{side}" for side in SIDES for part in PARTS)
    numbers: ClassVar[tuple[str, ...]] = ("ref_logps_chosen", "ref_logps_rejected")
    loss: tuple[str, DPOLoss]
    beta: float

    def compute(
        self, model: Definition, params: Any, batch: Mapping[str, jax.Array]
    ) -> tuple[Mean, Mapping[str, Metric]]:
        sides = [[batch[f"{part}_{side}"] for part in PARTS] for side in SIDES]
        values = {"tokens": _both(*((completion != 0).sum(1) for *_, completion in sides))}
        if self.numbers:
            values["reference"] = _both(*(batch[name].reshape(-1) for name in self.numbers))
        name, component = self.loss
        measure = partial(pair_loss, component, name=name)
        rows = _rows(*sides, sequence_values=values)
        loss, metrics, _ = objective(model, measure, params, rows, beta=self.beta)
        return loss, metrics


@dataclass(frozen=True)
class _PaddedWithoutReference(_PaddedDPO):
    """The same of a loss that compares with no reference."""

    numbers = ()


def _padded(loss: tuple[str, DPOLoss], beta: float | None) -> _PaddedDPO:
    name, component = loss
    made = _PaddedDPO if _reads_reference(component) else _PaddedWithoutReference
    return made(loss, _beta(name, beta))


def _reads_reference(component: DPOLoss) -> bool:
    reads: bool = DPO_LOSS.attribute(component, "reads_reference")
    return reads


def _beta(name: str, given: float | None) -> float:
    return BETAS.get(name, BETA) if given is None else float(given)


def _reference(name: str, component: DPOLoss, chosen: Any, rejected: Any) -> jax.Array | None:
    """Join the log-probabilities under the reference; None where the loss does not read them."""
    if not _reads_reference(component):
        return None
    if chosen is None or rejected is None:
        raise ValueError(
            f"dpo loss '{name}' compares with a reference: give ref_logps_chosen and ref_logps_rejected"
        )
    return _both(chosen, rejected)


def _rows(*sides: Sequence[jax.Array], **values: Any) -> Packed:
    """Lay out sequences, each as `PARTS`: those of a pair in one row."""
    return padded_rows(*((ids, mask, (mask != 0) & (there != 0)) for ids, mask, there in sides), **values)


def _both(chosen: Any, rejected: Any) -> jax.Array:
    """Join arrays of the chosen and the rejected completions, float32 [pairs, 2]."""
    return jnp.stack([jnp.asarray(x, jnp.float32) for x in (chosen, rejected)], axis=-1)
