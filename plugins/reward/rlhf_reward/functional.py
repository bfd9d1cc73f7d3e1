"""The reward trainer's loss and update as plain functions over padded batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp

from rlhf_core import PAIRWISE_LOSS, PairInputs
from rlhf_core.metrics import Mean, Metric
from rlhf_core.training import PaddedObjective, named_loss, padded_rows
from rlhf_reward.losses import LOSSES
from rlhf_reward.objective import objective, pair_loss

if TYPE_CHECKING:
    from rlhf_core import PairwiseLoss, TrainState
    from rlhf_core.models import Definition

    Loss: TypeAlias = str | Mapping[str, Any] | PairwiseLoss

SIDES = ("chosen", "rejected")
_named = partial(named_loss, PAIRWISE_LOSS, LOSSES)


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
    pairs, present = PairInputs(chosen, rejected, margin), jnp.ones(chosen.shape, bool)
    name, component = _named(loss)
    value, metrics = pair_loss(component, pairs, present, center_rewards_coefficient, name=name)
    return value.result(), {k: metric.result() for k, metric in metrics.items()}


def training_step(
    state: TrainState,
    batch: Mapping[str, Any],
    center_rewards_coefficient: float | None = 0.1,
    gradient_accumulation_steps: int = 1,
    *,
    loss: Loss = "bradley_terry",
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Update the state from a padded batch; nothing is donated.

    batch: input_ids_chosen, attention_mask_chosen, input_ids_rejected, attention_mask_rejected, int [pairs, T]
    (chosen and rejected may differ in T; padding on either side), and optionally margin, float [pairs].
    The batch is processed in `gradient_accumulation_steps` equal parts; the result does not depend on them.
    Returns the next state and the metrics of `pairwise_loss`, with `loss` and `grad_norm` (before the optimizer).
    Raises ValueError where the parts do not divide the batch.
    """
    padded = _Objective(_named(loss), center_rewards_coefficient)
    return padded.update(state, batch, gradient_accumulation_steps)


def evaluation_step(
    state: TrainState,
    batch: Mapping[str, Any],
    center_rewards_coefficient: float | None = 0.1,
    *,
    loss: Loss = "bradley_terry",
) -> dict[str, jax.Array]:
    """Compute the loss and metrics of `training_step` without an update."""
    return _Objective(_named(loss), center_rewards_coefficient).evaluate(state, batch)


@dataclass(frozen=True)
class _Objective(PaddedObjective):
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
        return objective(model, measure, params, rows)
