"""One update and one evaluation on padded batches, for trainers' mathematics as plain functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp

from rlhf_core import plugins
from rlhf_core.config import Component
from rlhf_core.metrics import Mean, Metric, results
from rlhf_core.step import split_step

if TYPE_CHECKING:
    from rlhf_core.contracts import Kind
    from rlhf_core.models import Definition
    from rlhf_core.state import TrainState

PaddedObjective: TypeAlias = Callable[["Definition", Any, Any], tuple[Mean, Mapping[str, Metric]]]
"""(model, params, batch) → the loss as sum and count, metrics; hashable, such as a frozen dataclass."""


@partial(jax.jit, static_argnames=("objective", "splits"))
def update_once(
    objective: PaddedObjective, state: TrainState, batch: Any, *, splits: int = 1
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Update the state from a batch in `splits` equal parts; nothing is donated.

    Returns the next state and the objective's metrics with `loss` and `grad_norm` (before the optimizer). Raises
    ValueError where the parts do not divide the batch.
    """
    state, metrics = split_step(partial(objective, state.model), state, batch, splits)
    return state, results(metrics)


@partial(jax.jit, static_argnames="objective")
def evaluate_once(objective: PaddedObjective, state: TrainState, batch: Any) -> dict[str, jax.Array]:
    """Compute the objective's metrics and `loss` without an update."""
    loss, metrics = objective(state.model, state.params, batch)
    return {**results(metrics), "loss": loss.result()}


def batch_arrays(
    batch: Mapping[str, Any], ids: Iterable[str], numbers: Iterable[str]
) -> dict[str, jax.Array]:
    """Return the named arrays: int32 for `ids`, float32 [rows] for `numbers`. Raises ValueError for missing ones."""
    ids, numbers = list(ids), list(numbers)
    if missing := [name for name in (*ids, *numbers) if batch.get(name) is None]:
        raise ValueError(f"batch lacks {', '.join(missing)}; it has {', '.join(sorted(batch))}")
    arrays = {name: jnp.asarray(batch[name], jnp.int32) for name in ids}
    return arrays | {name: jnp.asarray(batch[name], jnp.float32).reshape(-1) for name in numbers}


def named_loss(kind: Kind[Any], losses: Mapping[str, Any], loss: Any, **options: Any) -> tuple[str, Any]:
    """Return a loss and the name under which its own metrics are logged.

    loss: a name of `losses` or of the registry, a table of a name and its options, or a component. options: for a loss
    named from `losses`, where it has them.
    """
    if isinstance(loss, str) and loss in losses:
        names = {field.name for field in fields(losses[loss])}
        return loss, losses[loss](**{name: value for name, value in options.items() if name in names})
    if isinstance(loss, str | Mapping):
        table = Component(**({"name": loss} if isinstance(loss, str) else loss))
        return table.name, plugins.load().registry.get(kind, table.name, **table.options)
    return type(loss).__name__, loss
