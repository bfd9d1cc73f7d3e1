"""The DPO trainer's loss and update as plain functions over padded batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp

from rlhf_core.logprobs import token_logps
from rlhf_core.metrics import Mean, Metric
from rlhf_core.models import Model
from rlhf_core.training import PaddedObjective, named_loss
from rlhf_dpo.losses import DPO_LOSS, LOSSES, DPOInputs
from rlhf_dpo.objective import pair_loss

if TYPE_CHECKING:
    from rlhf_core import TrainState
    from rlhf_core.models import Definition
    from rlhf_dpo.losses import DPOLoss

    Loss: TypeAlias = str | Mapping[str, Any] | DPOLoss

SIDES = ("chosen", "rejected")
_named = partial(named_loss, DPO_LOSS, LOSSES)


def dpo_loss(
    logps_chosen: jax.Array,
    logps_rejected: jax.Array,
    ref_logps_chosen: jax.Array,
    ref_logps_rejected: jax.Array,
    *,
    tokens_chosen: jax.Array | None = None,
    tokens_rejected: jax.Array | None = None,
    beta: float = 0.1,
    loss_type: Loss = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute a DPO loss over log-probabilities, differentiable in those of the policy.

    logps_…, ref_logps_…: float32 [pairs], nats, sums over a completion's tokens. tokens_…: their number, [pairs]; None:
    1, so that losses which divide by it use the sums. loss_type: a registered name, a table of the name and its
    options as in a file, {"name": "ipo", "mean": False}, or a component. label_smoothing: for losses that have it,
    named without a table.
    Returns the mean loss, float32 [], and the metrics rewards/chosen, rewards/rejected, rewards/accuracies (strict),
    rewards/margins, logps/chosen and logps/rejected, float32 [] each.
    """
    one = jnp.ones(jnp.shape(logps_chosen), jnp.float32)
    inputs = _inputs(
        (logps_chosen, logps_rejected),
        (ref_logps_chosen, ref_logps_rejected),
        (
            one if tokens_chosen is None else tokens_chosen,
            one if tokens_rejected is None else tokens_rejected,
        ),
        beta,
    )
    name, component = _named(loss_type, label_smoothing=label_smoothing)
    value, metrics = pair_loss(component, inputs, jnp.ones(one.shape, bool), name=name)
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
    beta: float = 0.1,
    loss_type: Loss = "sigmoid",
    gradient_accumulation_steps: int = 1,
    label_smoothing: float = 0.0,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Update the state from a padded batch; nothing is donated.

    batch: input_ids_chosen, attention_mask_chosen, completion_mask_chosen and the same of rejected, int [pairs, T]
    (chosen and rejected may differ in T; padding on either side), ref_logps_chosen and ref_logps_rejected, float
    [pairs], nats. A completion's log-probability is the sum over the tokens of its mask, each predicted from all before
    it; losses that divide by its length count the tokens of its mask.
    The batch is processed in `gradient_accumulation_steps` equal parts; the result does not depend on them.
    loss_type, label_smoothing: as for `dpo_loss`.
    Returns the next state and the metrics of `dpo_loss`, with `loss` and `grad_norm` (before the optimizer).
    Raises ValueError where the parts do not divide the batch, or an array is missing.
    """
    objective = _Objective(_named(loss_type, label_smoothing=label_smoothing), float(beta))
    return objective.update(state, batch, gradient_accumulation_steps)


def evaluation_step(
    state: TrainState,
    batch: Mapping[str, Any],
    *,
    beta: float = 0.1,
    loss_type: Loss = "sigmoid",
    label_smoothing: float = 0.0,
) -> dict[str, jax.Array]:
    """Compute the loss and metrics of `training_step` without an update."""
    objective = _Objective(_named(loss_type, label_smoothing=label_smoothing), float(beta))
    return objective.evaluate(state, batch)


def _logps(
    model: Definition, params: Any, ids: jax.Array, attended: jax.Array, completion: jax.Array
) -> jax.Array:
    hidden = model.padded_hidden(params, ids, attended)
    kernel, softcap = model.unembedding(params)
    # Nothing predicts a first token; with padding on the left, padding would.
    predicted = (completion[:, 1:] != 0) & (attended[:, 1:] != 0) & (attended[:, :-1] != 0)
    targets = jnp.where(predicted, ids[:, 1:], -1)
    return token_logps(hidden[:, :-1], kernel, targets, softcap=softcap)[0].sum(1)


@partial(jax.jit, static_argnums=0)
def _completion_logps(model: Definition, params: Any, *arrays: jax.Array) -> jax.Array:
    return _logps(model, params, *arrays)


@dataclass(frozen=True)
class _Objective(PaddedObjective):
    """`pair_loss` of the completions of a padded batch."""

    ids = tuple(
        f"{part}_{side}"
        for side in ("chosen", "rejected")
        for part in ("input_ids", "attention_mask", "completion_mask")
    )
    numbers = ("ref_logps_chosen", "ref_logps_rejected")
    loss: tuple[str, DPOLoss]
    beta: float

    def compute(
        self, model: Definition, params: Any, batch: Mapping[str, jax.Array]
    ) -> tuple[Mean, Mapping[str, Metric]]:
        masks = [batch[f"completion_mask_{side}"] for side in SIDES]
        logps = [
            _logps(model, params, batch[f"input_ids_{side}"], batch[f"attention_mask_{side}"], mask)
            for side, mask in zip(SIDES, masks, strict=True)
        ]
        reference = [batch[name].reshape(-1) for name in self.numbers]
        inputs = _inputs(logps, reference, [(mask != 0).sum(1) for mask in masks], self.beta)
        name, component = self.loss
        return pair_loss(component, inputs, jnp.ones(logps[0].shape, bool), name=name)


def _inputs(
    logps: Sequence[jax.Array], reference: Sequence[jax.Array], tokens: Sequence[jax.Array], beta: float
) -> DPOInputs:
    """Make the inputs of a loss from arrays of the chosen and the rejected completions."""
    (a, b), (ref_a, ref_b), (n, m) = (
        [jnp.asarray(x, jnp.float32) for x in sides] for sides in (logps, reference, tokens)
    )
    return DPOInputs(a, b, ref_a, ref_b, jnp.maximum(n, 1.0), jnp.maximum(m, 1.0), float(beta))
