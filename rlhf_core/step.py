"""One update as two programs: `accumulate` once a micro-batch, `apply` once an update.

An objective returns sums, so the number of micro-batches and what lies in which of them cancel out of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from rlhf_core.metrics import Mean, Metric, merge
from rlhf_core.state import TrainState

Objective: TypeAlias = Callable[[Any, Any], tuple[Mean, Mapping[str, Metric]]]
"""(params, batch) → (the loss as sum and count, metrics). The gradient is the sum's, divided by the update's count."""


class Accumulated(NamedTuple):
    """What the micro-batches of an update have added up to so far."""

    grads: Any
    """float32, like the parameters: gradient of `loss.total`."""
    loss: Mean
    metrics: dict[str, Metric]


def accumulate(objective: Objective, params: Any, batch: Any, before: Accumulated | None) -> Accumulated:
    """Add one micro-batch; `before` is None for the first of an update, which saves a pass over zeros."""

    def total(p: Any) -> tuple[jax.Array, tuple[Mean, dict[str, Metric]]]:
        loss, metrics = objective(p, batch)
        return loss.total, (loss, dict(metrics))

    grads, (loss, metrics) = jax.grad(total, has_aux=True)(params)
    if before is None:
        return Accumulated(grads, loss, metrics)
    return Accumulated(
        jax.tree.map(jnp.add, before.grads, grads), before.loss.merge(loss), merge(before.metrics, metrics)
    )


def apply(state: TrainState, done: Accumulated) -> tuple[TrainState, dict[str, Metric]]:
    """One optimizer update from the mean gradient, applied only while every loss and gradient has been finite.

    Metrics: those of the objective, `loss` and `grad_norm` (before the optimizer).
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


@dataclass(frozen=True)
class Programs:
    """The compiled pair, for the loop. `accumulate` donates what came before, `apply` the state."""

    accumulate: Callable[[Any, Any, Accumulated | None], Accumulated]
    apply: Callable[[TrainState, Accumulated], tuple[TrainState, dict[str, Metric]]]

    def compiled(self) -> int:
        """How many programs have been compiled so far."""
        jitted: tuple[Any, ...] = (self.accumulate, self.apply)
        return sum(f._cache_size() for f in jitted)


def programs(objective: Objective, state: TrainState) -> Programs:
    """Jit `accumulate` and `apply`; gradients and the next state stay sharded as `state` is."""
    shardings = jax.tree.map(lambda x: x.sharding, state)
    return Programs(
        accumulate=jax.jit(
            partial(accumulate, objective),
            donate_argnums=2,
            out_shardings=Accumulated(shardings.params, None, None),  # type: ignore[arg-type]
        ),
        apply=jax.jit(apply, donate_argnums=0, out_shardings=(shardings, None)),
    )


def split_step(
    objective: Objective, state: TrainState, batch: Any, splits: int
) -> tuple[TrainState, dict[str, Metric]]:
    """One update from a batch given whole, in `splits` equal parts along the first axis; for use inside jit.

    Leaves of rank 0 are not split. Raises ValueError where a leaf's rows do not divide.
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

    done = accumulate(objective, state.params, micro([x[0] for x in stacked]), None)
    if splits > 1:
        done, _ = jax.lax.scan(
            lambda before, parts: (accumulate(objective, state.params, micro(parts), before), None),
            done,
            [x[1:] for x in stacked],
        )
    return apply(state, done)
