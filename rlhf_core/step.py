"""An update as two programs: `accumulate` once per micro-batch, `apply` once per update.

Objectives return sums, so that the result does not depend on how examples are split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlhf_core.mesh import abstract_rows, replicated_sharding
from rlhf_core.metrics import Mean, Metric, empty_metric, merge
from rlhf_core.models.lora import has_noise, with_noise
from rlhf_core.models.params import Path, join, split
from rlhf_core.runtime.background import BackgroundCompiler
from rlhf_core.state import TrainState

__all__ = ["Objective"]


Objective: TypeAlias = Callable[[Any, Any], tuple[Mean, Mapping[str, Metric]]]
"""(params, batch) → (the loss as sum and count, metrics). The sum's gradient is divided by the update's count."""


class Accumulated(NamedTuple):
    """Sums over the micro-batches of an update so far."""

    grads: Any
    """float32, like the trained parameters: gradient of `loss.total`."""
    loss: Mean
    metrics: dict[str, Metric]


def accumulate(
    objective: Objective,
    params: Any,
    batch: Any,
    before: Accumulated | None,
    key: jax.Array | None = None,
    fixed: frozenset[Path] = frozenset(),
) -> Accumulated:
    """Add one micro-batch; before=None for the first of an update saves a pass over zeros.

    key: for the adapters' dropout; None: no dropout. fixed: paths of parameters without a gradient.
    """
    params = params if key is None else with_noise(params, key)
    trained, rest = split(params, fixed) if fixed else (params, {})

    def total(p: Any) -> tuple[jax.Array, tuple[Mean, dict[str, Metric]]]:
        loss, metrics = objective(join(p, rest) if fixed else p, batch)
        return loss.total, (loss, dict(metrics))

    grads, (loss, metrics) = jax.grad(total, has_aux=True)(trained)
    if before is None:
        return Accumulated(grads, loss, metrics)
    return Accumulated(
        jax.tree.map(jnp.add, before.grads, grads), before.loss.merge(loss), merge(before.metrics, metrics)
    )


def apply(state: TrainState, done: Accumulated) -> tuple[TrainState, dict[str, Metric]]:
    """Update the state by the mean gradient, unless a loss or gradient has not been finite.

    state: from `TrainState.trained`, so that all of its parameters are trained. Returns the next state, and the
    objective's metrics with `loss` and `grad_norm` (before the optimizer).
    """
    scale = 1.0 / jnp.maximum(done.loss.count, jnp.finfo(jnp.float32).tiny)
    grads = jax.tree.map(lambda g: g * jnp.where(done.loss.count > 0, scale, 0.0), done.grads)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(done.loss.total)
    good = finite & (state.guard < 0)
    updates, opt_state = state.tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    keep = partial(jax.tree.map, lambda new, old: jnp.where(good, new, old))
    following = replace(
        state,
        step=state.step + good.astype(jnp.int32),
        params=keep(params, state.params),
        opt_state=keep(opt_state, state.opt_state),
        guard=jnp.where((state.guard < 0) & ~finite, state.step, state.guard),
    )
    # An update without a trained token has loss 0, not 0/0.
    loss = Mean(done.loss.total, jnp.where(done.loss.count > 0, done.loss.count, 1.0))
    return following, {**done.metrics, "loss": loss, "grad_norm": Mean.of(norm)}


class Programs:
    """Compiled `accumulate` and `apply`, which donate the previous sums and the trained part of the state."""

    def __init__(self, objective: Objective, state: TrainState, *, from_zero: bool = False) -> None:
        """Shard gradients and the next state like `state`.

        from_zero: add the first micro-batch of an update to zeros. This takes one program per shape instead of two and
        an extra pass over the gradient, which pays for updates of several micro-batches.
        """
        shardings = jax.tree.map(lambda x: x.sharding, state.trained())
        everywhere: Any = replicated_sharding(state.step.sharding.mesh)
        placed = Accumulated(shardings.params, everywhere, everywhere)
        self._accumulate = jax.jit(
            partial(accumulate, objective, fixed=state.fixed), donate_argnums=2, out_shardings=placed
        )
        self._zeros = jax.jit(lambda: _zeros(self._done), out_shardings=placed)
        self._apply = jax.jit(apply, donate_argnums=0, out_shardings=(shardings, everywhere))
        self._noise = has_noise(state.params)
        self._ahead = BackgroundCompiler()
        self._from_zero = from_zero
        self._done: Accumulated | None = None

    def compile(self, state: TrainState, calls: Sequence[tuple[Any, bool]]) -> None:
        """Start to compile the programs of these calls, then `apply`, in the background; a call waits for its program.

        calls: micro-batches, read for shapes and dtypes only, and whether each follows another in its update; see
        `rlhf_core.fit.batches.expected_calls`. Programs that are compiled or being compiled are skipped.
        """
        mesh = state.step.sharding.mesh
        key = _dropout_key(state, 0) if self._noise else None
        for batch, follows in calls:
            rows, follows = abstract_rows(mesh, batch), follows or self._from_zero
            if (name := _program_name(rows, follows)) in self._ahead:
                continue
            if self._done is None or not follows:
                traced = self._accumulate.trace(state.params, rows, None, key)
                self._done = traced.out_info
            if follows:
                traced = self._accumulate.trace(state.params, rows, self._done, key)
            self._ahead.compile(name, traced.lower())
            if "apply" not in self._ahead:
                self._ahead.compile("apply", self._apply.lower(state.trained(), self._done))

    def wait(self) -> None:
        """Wait until every program that was started is compiled."""
        self._ahead.wait_for_all()

    def accumulate(
        self, state: TrainState, batch: Any, before: Accumulated | None, number: int = 0
    ) -> Accumulated:
        """Add micro-batch `number` of the update."""
        key = _dropout_key(state, number) if self._noise else None
        if before is None and self._from_zero:
            if self._done is None:
                self._done = self._accumulate.trace(state.params, batch, None, key).out_info
            before = self._zeros()
        self._ahead.wait(_program_name(batch, before is not None))
        done: Accumulated = self._accumulate(state.params, batch, before, key)
        return done

    def apply(self, state: TrainState, done: Accumulated) -> tuple[TrainState, dict[str, Metric]]:
        """Apply `apply` to the trained part of the state; fixed parameters stay as they are."""
        self._ahead.wait("apply")
        following, metrics = self._apply(state.trained(), done)
        return state.with_trained(following), metrics

    def compiled(self) -> int:
        """Count the programs compiled so far."""
        jitted: tuple[Any, ...] = (self._accumulate, self._apply)
        return sum(f._cache_size() for f in jitted)


def _zeros(like: Any) -> Accumulated:
    """Make the sums over no micro-batch, in the shapes of `like`."""
    return Accumulated(
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like.grads),
        Mean.of(jnp.zeros(0)),
        {name: empty_metric(metric) for name, metric in like.metrics.items()},
    )


def _program_name(batch: Any, follows: bool) -> tuple[Any, ...]:
    return follows, *(x.shape for x in jax.tree.leaves(batch))


def _fold(key: jax.Array, step: Any, number: Any) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, step), number)


@jax.jit
def _fold_jitted(key: jax.Array, step: jax.Array, number: jax.Array) -> jax.Array:
    return _fold(key, step, number)


def _dropout_key(state: TrainState, number: int) -> jax.Array:
    """Make the dropout key of a micro-batch from seed, update and number, so that a restart does not change it."""
    return _fold_jitted(state.key, state.step, jax.device_put(np.int32(number), state.step.sharding))


def split_step(
    objective: Objective, state: TrainState, batch: Any, splits: int
) -> tuple[TrainState, dict[str, Metric]]:
    """Update the state from a whole batch in `splits` equal parts along the first axis; for use inside jit.

    Leaves of rank 0 are not split. Raises ValueError where `splits` does not divide the rows of a leaf.
    """

    def part(x: jax.Array) -> jax.Array:
        if x.shape[0] % splits:
            raise ValueError(
                f"gradient_accumulation_steps={splits} does not divide a batch leaf with {x.shape[0]} rows"
            )
        return x.reshape(splits, x.shape[0] // splits, *x.shape[1:])

    leaves: list[Any]
    tree: Any
    leaves, tree = jax.tree.flatten(batch)
    split = [jnp.ndim(x) > 0 for x in leaves]
    stacked = [part(x) for x, is_split in zip(leaves, split, strict=True) if is_split]

    def micro(parts: list[jax.Array]) -> Any:
        rest = iter(parts)
        return tree.unflatten([next(rest) if s else x for x, s in zip(leaves, split, strict=True)])

    noise = has_noise(state.params)

    def one(before: Accumulated | None, number: Any, parts: list[jax.Array]) -> Accumulated:
        key = _fold(state.key, state.step, number) if noise else None
        return accumulate(objective, state.params, micro(parts), before, key, state.fixed)

    done = one(None, 0, [x[0] for x in stacked])
    if splits > 1:
        done, _ = jax.lax.scan(
            lambda before, part: (one(before, *part), None),
            done,
            (jnp.arange(1, splits), [x[1:] for x in stacked]),
        )
    following, metrics = apply(state.trained(), done)
    return state.with_trained(following), metrics
