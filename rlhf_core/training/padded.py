"""Losses over padded batches: laid out as rows, they are the trainers' own, as plain functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from rlhf_core.config import Component
from rlhf_core.contracts import Rows
from rlhf_core.metrics import Metric, results
from rlhf_core.packing import Packed
from rlhf_core.plugins import installed_registry
from rlhf_core.runtime.caches import Exact
from rlhf_core.step import mean_losses, split_step

if TYPE_CHECKING:
    from rlhf_core.contracts import Kind
    from rlhf_core.models import Definition
    from rlhf_core.state import TrainState
    from rlhf_core.step import Loss


def padded_rows(
    *sequences: tuple[jax.Array, jax.Array, jax.Array],
    start: int = 0,
    token_values: Mapping[str, jax.Array] | None = None,
    sequence_values: Mapping[str, jax.Array] | None = None,
) -> Packed:
    """Lay out a padded batch as the rows that objectives read, for use inside jit.

    sequences: of each row, as (token ids, attention mask, weights of trained tokens), [B, T] each; T may differ, and
    padding be on either side. They lie one after the other in the row and do not see each other. The first attended
    token of each is not trained on, since nothing predicts it. start: columns before it have no trained token.
    token_values: {name: float32 [B, ΣT − start]}, which may be anything outside of trained tokens. sequence_values:
    {name: float32 [B, sequences]}.
    """
    parts, last, end = [], [], 0
    for number, (ids, mask, weights) in enumerate(sequences):
        attended = mask != 0
        columns = end + jnp.arange(ids.shape[1], dtype=jnp.int32)
        end += ids.shape[1]
        positions = jnp.maximum(jnp.cumsum(attended, axis=1, dtype=jnp.int32) - 1, 0)
        fill = partial(jnp.broadcast_to, shape=ids.shape)
        parts.append(
            Rows(
                tokens=ids,
                positions=positions,
                visible_until=jnp.where(attended, jnp.int32(end), 0),
                parent=fill(jnp.maximum(columns - 1, 0)),
                sequence=fill(jnp.int32(number)),
                weight=jnp.where(positions > 0, weights, 0).astype(jnp.float32),
            )
        )
        last.append(jnp.max(jnp.where(attended, columns, -1), axis=1))
    rows = Rows(*(jnp.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True)))
    trained = jnp.where(rows.weight != 0, jnp.arange(end, dtype=jnp.int32), -1)[:, start:]
    values = {name: jnp.where(trained >= 0, x, 0.0) for name, x in (token_values or {}).items()}
    ends: Any = jnp.stack(last, axis=1)
    arrays: Any = (rows, ends, trained, values, dict(sequence_values or {}), jnp.zeros_like(ends))
    return Packed(*arrays)


@jax.tree_util.register_pytree_with_keys_class
class StepMetrics(dict[str, jax.Array]):
    """The metrics of one step by name, and as attributes: `metrics["loss"]` is `metrics.loss`."""

    def __getattr__(self, name: str) -> jax.Array:
        if name not in self:
            raise AttributeError(f"there is no metric '{name}'; there are {', '.join(sorted(self))}")
        return self[name]

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, jax.Array]], tuple[str, ...]]:
        names = tuple(sorted(self))
        return [(jax.tree_util.DictKey(name), self[name]) for name in names], names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Iterable[Any]) -> StepMetrics:
        return cls(zip(names, values, strict=True))


@dataclass(frozen=True)
class PaddedObjective:
    """Update a state by a loss over padded batches, and evaluate it.

    A subclass is a frozen dataclass whose fields are the loss's options, hashable: those that are equal, in types
    too, share their compiled programs until the next run. As under `jax.jit`, a loss reads globals when it is traced;
    `jax.clear_caches()` lets it read them again. It names the arrays of its batches, and defines `compute`.
    """

    ids: ClassVar[tuple[str, ...]] = ()
    """Arrays that a batch must have, taken as int32: ids and masks."""
    numbers: ClassVar[tuple[str, ...]] = ()
    """Arrays that it must have, taken as float32."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Arrays that it may have, taken as float32."""

    def compute(
        self, model: Definition, params: Any, batch: Mapping[str, jax.Array]
    ) -> tuple[Loss, Mapping[str, Metric]]:
        """Compute the loss, as sum and count, and the metrics of a batch of the declared arrays; for use inside jit."""
        raise NotImplementedError

    def update(
        self, state: TrainState, batch: Mapping[str, Any], splits: int = 1
    ) -> tuple[TrainState, StepMetrics]:
        """Update the state from a batch in `splits` equal parts along the first axis; nothing is donated.

        Returns the next state and the metrics, with `loss` and `grad_norm` (before the optimizer). Arrays of rank 0 are
        not split. Raises ValueError where the parts do not divide the batch, or an array is missing.
        """
        return _update(Exact(self), state, self.arrays(batch), splits)

    def evaluate(self, state: TrainState, batch: Mapping[str, Any]) -> StepMetrics:
        """Compute the metrics and `loss` without an update, and so without `grad_norm`."""
        return _evaluate(Exact(self), state, self.arrays(batch))

    def arrays(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Take the declared arrays of a batch. Raises ValueError where one is missing."""
        missing = [name for name in (*self.ids, *self.numbers) if batch.get(name) is None]
        if missing:
            raise ValueError(f"batch lacks {', '.join(missing)}; it has {', '.join(sorted(batch))}")
        dtypes = dict.fromkeys(self.ids, jnp.int32) | dict.fromkeys(
            (*self.numbers, *self.optional), jnp.float32
        )
        return {
            name: jnp.asarray(batch[name], dtype)
            for name, dtype in dtypes.items()
            if batch.get(name) is not None
        }


@partial(jax.jit, static_argnames=("exact", "splits"))
def _update(
    exact: Exact, state: TrainState, batch: Mapping[str, jax.Array], splits: int
) -> tuple[TrainState, StepMetrics]:
    state, metrics = split_step(partial(exact.value.compute, state.model), state, batch, splits)
    return state, StepMetrics(results(metrics))


@partial(jax.jit, static_argnames="exact")
def _evaluate(exact: Exact, state: TrainState, batch: Mapping[str, jax.Array]) -> StepMetrics:
    loss, metrics = exact.value.compute(state.model, state.params, batch)
    return StepMetrics({**results(metrics), **results(mean_losses(loss))})


def named_loss(kind: Kind[Any], loss: Any, **options: Any) -> tuple[str, Any]:
    """Return a loss and the name under which its own metrics are logged.

    loss: the name of an installed one, a table of a name and its options, or a component. options: for a loss that is
    given by its name alone, where it has them.
    """
    registry = installed_registry()
    if isinstance(loss, str):
        known = registry.options(kind, loss)
        given = {name: value for name, value in options.items() if name in known}
        return loss, registry.make(kind, loss, given)
    if isinstance(loss, Mapping):
        table = Component(**loss)
        return table.name, registry.get(kind, table.name, **table.options)
    return type(loss).__name__, loss
