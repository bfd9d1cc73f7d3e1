"""The reward trainer's loss and update as plain functions over padded batches."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp

from rlhf_core import PAIRWISE_LOSS, PairInputs
from rlhf_core.metrics import Mean, Metric
from rlhf_core.training import PaddedObjective, named_loss, padded_rows
from rlhf_reward.objective import objective, pair_loss

if TYPE_CHECKING:
    from rlhf_core import PairwiseLoss, TrainState
    from rlhf_core.models import Definition

    Loss: TypeAlias = str | Mapping[str, Any] | PairwiseLoss

SIDES = ("chosen", "rejected")
_named = partial(named_loss, PAIRWISE_LOSS)


def pairwise_loss(
    chosen: jax.Array,
    rejected: jax.Array,
    margin: jax.Array | None = None,
    *,
    loss: Loss = "bradley_terry",
    center_rewards_coefficient: float | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute a pairwise loss over score arrays.

    chosen, rejected, margin: float32 [pairs], reward units. loss: a registered name, a table of the name and its
    options as in a file, {"name": "conservative", "label_smoothing": 0.2}, or a component.
    Returns the mean loss, float32 [], and the metrics accuracy (strict), ties, margin, mean_reward, min_reward,
    max_reward, float32 [] each.
    """
    chosen, rejected = jnp.asarray(chosen, jnp.float32), jnp.asarray(rejected, jnp.float32)
    margin = (
        jnp.zeros_like(chosen) if margin is None else jnp.asarray(margin, jnp.float32).reshape(chosen.shape)
    )
    pairs = PairInputs(chosen, rejected, margin)
    present = jnp.ones(chosen.shape, bool)
    name, component = _named(loss)
    value, metrics, _ = pair_loss(component, pairs, present, center_rewards_coefficient, name=name)
    return value.result(), {k: metric.result() for k, metric in metrics.items()}


def training_step(
    state: TrainState,
    batch: Mapping[str, Any],
    loss_config: Any = None,
    learning_rate_fn: Any = None,
    partition_spec: Any = None,
    gradient_accumulation_steps: int = 1,
    center_rewards_coefficient: float | None = None,
    *,
    loss: Loss = "bradley_terry",
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Update the state from a padded batch; nothing is donated.

    batch: input_ids_chosen, attention_mask_chosen, input_ids_rejected, attention_mask_rejected, int [pairs, T]
    (chosen and rejected may differ in T; padding on either side), and optionally margin, float [pairs].
    The batch is processed in `gradient_accumulation_steps` equal parts; the result does not depend on them.
    loss_config: as EasyDeL's, a table or an object: its `label_smoothing` makes the loss "conservative".
    learning_rate_fn, partition_spec: EasyDeL's; a warning says what takes their place.
    Returns the next state and the metrics of `pairwise_loss`, with `loss` and `grad_norm` (before the optimizer), by
    name and as attributes. Raises ValueError where the parts do not divide the batch.
    """
    _warn_unused(learning_rate_fn=learning_rate_fn, partition_spec=partition_spec)
    padded = _PaddedPairs(_smoothed(loss, loss_config), center_rewards_coefficient)
    return padded.update(state, batch, gradient_accumulation_steps)


def evaluation_step(
    state: TrainState,
    batch: Mapping[str, Any],
    loss_config: Any = None,
    partition_spec: Any = None,
    center_rewards_coefficient: float | None = None,
    *,
    loss: Loss = "bradley_terry",
) -> dict[str, jax.Array]:
    """Compute the loss and metrics of `training_step` without an update."""
    _warn_unused(partition_spec=partition_spec)
    return _PaddedPairs(_smoothed(loss, loss_config), center_rewards_coefficient).evaluate(state, batch)


UNUSED = {
    "learning_rate_fn": "the transformation that the state was created with has the schedule",
    "partition_spec": "a batch is split as its arrays and the state are placed",
}
"""Arguments of EasyDeL's functions that have no effect: what takes their place."""


def _warn_unused(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            warnings.warn(f"{name}: has no effect here: {UNUSED[name]}", stacklevel=3)


def _smoothed(loss: Loss, loss_config: Any) -> tuple[str, PairwiseLoss]:
    """Return the loss, with the label smoothing of EasyDeL's `loss_config`; its other settings are a warning."""
    if loss_config is None:
        return _named(loss)
    settings = dict(loss_config if isinstance(loss_config, Mapping) else vars(loss_config))
    if is_dataclass(loss_config):
        defaults = {field.name: field.default for field in fields(loss_config)}
        settings = {name: value for name, value in settings.items() if value != defaults.get(name)}
    smoothing = settings.pop("label_smoothing", 0.0)
    if settings:
        unused = ", ".join(sorted(settings))
        warnings.warn(f"loss_config: only label_smoothing has an effect here, not {unused}", stacklevel=3)
    if not smoothing:
        return _named(loss)
    if loss != "bradley_terry":
        raise ValueError("loss_config: label_smoothing belongs into `loss`, which is also given")
    return _named({"name": "conservative", "label_smoothing": float(smoothing)})


@dataclass(frozen=True)
class _PaddedPairs(PaddedObjective):
    """The trainer's objective of a padded batch."""

    ids = tuple(f"{part}_{side}" for side in SIDES for part in ("input_ids", "attention_mask"))
    optional = ("margin",)
    loss: tuple[str, PairwiseLoss]
    coefficient: float | None

    def compute(
        self, model: Definition, params: Any, batch: Mapping[str, jax.Array]
    ) -> tuple[Mean, Mapping[str, Metric]]:
        sides = [(batch[f"input_ids_{side}"], batch[f"attention_mask_{side}"]) for side in SIDES]
        margin = batch["margin"].reshape(-1) if "margin" in batch else jnp.zeros(len(sides[0][0]))
        rows = padded_rows(
            *((ids, mask, jnp.zeros(ids.shape)) for ids, mask in sides),
            sequence_values={"margin": jnp.stack([margin, margin], axis=1)},
        )
        name, component = self.loss
        measure = partial(pair_loss, component, coefficient=self.coefficient, name=name)
        loss, metrics, _ = objective(model, measure, params, rows)
        return loss, metrics
