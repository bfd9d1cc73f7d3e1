"""An update as two programs: `accumulate` once per micro-batch, `apply` once per update.

Objectives return sums, so that the result does not depend on how examples are split into micro-batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_core.errors import InputError, error_line, suggest
from rlhf_core.mesh import (
    HOST,
    abstract_rows,
    on_device,
    over_parts,
    put_rows,
    replicated_sharding,
    sum_over_parts,
)
from rlhf_core.metrics import Balance, Mean, Metric, empty_metric, merge
from rlhf_core.models.lora import has_noise, with_noise
from rlhf_core.models.params import (
    Layers,
    Path,
    by_layer,
    join,
    paths,
    split,
    with_layers,
    without_layers,
)
from rlhf_core.runtime.background import BackgroundCompiler
from rlhf_core.state import TrainState

__all__ = ["Objective"]

log = logging.getLogger("rlhf_core")


Loss: TypeAlias = Mean | Mapping[str, Mean | Balance]
"""A loss as sum and count, or several by name: each is divided by its own count, then they are added up."""
Values: TypeAlias = Mapping[str, jax.Array]
"""{name: [rows, trained tokens] or [rows, sequences]}, of one micro-batch."""
Objective: TypeAlias = Callable[
    [Any, Any], tuple[Loss, Mapping[str, Metric]] | tuple[Loss, Mapping[str, Metric], Values]
]
"""(params, batch) → (loss, metrics) or (loss, metrics, values). A sum's gradient is divided by the count of the whole
update.

An objective of several losses returns {"policy": Mean.of(…), "value": Mean.of(0.5 * errors, mask)}: a weight is a
factor of the values. `loss`, `loss/policy` and `loss/value` are logged. Counts depend on the batch alone, not on
parameters.

Rows are independent: what is added for a row must not depend on other rows, which may be in another micro-batch or,
where the mesh has `data`, in another part of the same batch.

Values, a number for every trained token or sequence of a micro-batch, are what evaluations average by the rows of the
data, and what actions get that ask for them by name; an update does not compute those that none asks for.

It is traced once in a run: what it reads of globals and the environment is what they hold then.
"""
Adjust: TypeAlias = Callable[[Any, Mapping[str, Metric]], Any]
"""(trained parameters, the objective's metrics of an update) → the parameters."""
Counts: TypeAlias = Mapping[str, Any]
"""Of every loss of several: what its sum is divided by, float32 []; the count of a `Balance`."""


class Accumulated(NamedTuple):
    """Sums over the micro-batches of an update so far."""

    grads: Any
    """float32, like the trained parameters: gradient of `loss.total`; of several losses, of Σ total / count."""
    loss: Loss
    metrics: dict[str, Metric]
    values: Mapping[str, jax.Array] = {}
    """Of the newest micro-batch alone, as far as they are asked for."""


def accumulate(
    objective: Objective,
    params: Any,
    batch: Any,
    before: Accumulated | None,
    *,
    fixed: frozenset[Path] = frozenset(),
) -> Accumulated:
    """Add one micro-batch; before=None for the first of an update. fixed: paths of parameters without a gradient."""
    return _accumulate(partial(_gradients, objective, fixed), params, batch, before)


def _accumulate(
    gradients: Callable[..., Any],
    params: Any,
    batch: Any,
    before: Accumulated | None,
    key: jax.Array | None = None,
    counts: Counts | None = None,
) -> Accumulated:
    """Do what `accumulate` does; before=None saves a pass over zeros.

    gradients: `_gradients` with its first two arguments bound. key: for the adapters' dropout; None: no dropout.
    counts: of several losses, over the whole update; None: the micro-batch is the whole update.
    Jitted on its own, the same object is traced once for the first micro-batch of an update and for those that follow.
    """
    params = params if key is None else with_noise(params, key)
    grads, (loss, metrics, values) = jax.jit(gradients)(params, batch, counts)
    if before is None:
        return Accumulated(grads, loss, metrics, values)
    return Accumulated(
        jax.tree.map(jnp.add, before.grads, grads),
        _merge_losses(before.loss, loss),
        merge(before.metrics, metrics),
        values,
    )


def _gradients(
    objective: Objective,
    fixed: frozenset[Path],
    params: Any,
    batch: Any,
    counts: Counts | None,
    *,
    asked: tuple[str, ...] = (),
) -> tuple[Any, tuple[Loss, dict[str, Metric], Values]]:
    """Compute (gradient of the sum, (losses, metrics, values)) of a micro-batch.

    fixed: parameters without a gradient. asked: names of the objective's values. Raises InputError for those that it
    does not return.
    """
    trained, rest = split(params, fixed) if fixed else (params, {})

    def total(p: Any) -> tuple[jax.Array, tuple[Loss, dict[str, Metric], Values]]:
        loss, metrics, *others = objective(join(p, rest) if fixed else p, batch)
        values = chosen_values(others[0] if others else {}, asked)
        if isinstance(loss, Mean):
            return loss.total, (loss, dict(metrics), values)
        return _sum_of_means(loss, counts), (dict(loss), dict(metrics), values)

    gradients: Any = jax.grad(total, has_aux=True)(trained)
    return gradients


def chosen_values(values: Values, asked: Collection[str]) -> Values:
    """Choose values by name. Raises InputError for those that the objective does not return."""
    for name in asked:
        if name not in values:
            raise InputError(
                f"an action or an evaluation asks for the values '{name}', which the objective does not return."
                f"{suggest(name, values)} It returns: {', '.join(sorted(values)) or 'none'}"
            )
    return {name: values[name] for name in asked}


def count(objective: Objective, params: Any, batch: Any) -> Counts | None:
    """Count what each of several losses is divided by. The compiler leaves out the model, which this does not need."""
    return _counts(objective(params, batch)[0])


def _merge_losses(a: Any, b: Any) -> Loss:
    return a.merge(b) if isinstance(a, Mean) else {name: a[name].merge(b[name]) for name in a}


def _counts(loss: Loss) -> Counts | None:
    return None if isinstance(loss, Mean) else {name: _count(part) for name, part in loss.items()}


def _count(part: Mean | Balance) -> Any:
    return part.count if isinstance(part, Mean) else (part.pairs, part.tokens)


def _inverse(count: Any) -> jax.Array:
    """Compute 1 / count; 0 where nothing was counted."""
    return jnp.where(count > 0, 1.0 / jnp.maximum(count, jnp.finfo(jnp.float32).tiny), 0.0)


def _sum_of_means(losses: Mapping[str, Mean | Balance], counts: Counts | None = None) -> jax.Array:
    """Divide each loss by its count, or by that of `counts`, and add them up; differentiable in the sums alone."""
    chosen = jax.tree.map(sum_over_parts, _counts(losses)) if counts is None else counts
    return jnp.stack(
        [_mean(part, jax.lax.stop_gradient(chosen[name])) for name, part in losses.items()]
    ).sum()


def _mean(part: Mean | Balance, count: Any) -> jax.Array:
    """Divide one of several losses by a count; differentiable in its sum."""
    return part.total * _inverse(count) if isinstance(part, Mean) else part.mean(count)


def loss_metrics(loss: Loss) -> dict[str, Mean | Balance]:
    """Name a loss as it is logged: `loss`, or `loss/NAME` for each of several."""
    return {"loss": loss} if isinstance(loss, Mean) else {f"loss/{name}": part for name, part in loss.items()}


def layer_norms(grads: Any, model: Any, fixed: Layers = ()) -> dict[str, jax.Array]:
    """Compute the norm of each layer's gradient, float32 [], by its dotted path, such as "layers.3" or "embed_tokens".

    model: the definition, or several by name. fixed: layers that are left out, since they are not trained.
    """
    squares: dict[str, Any] = {}
    left_out = dict(fixed)
    for path, leaf in paths(grads):
        for layer, _, index in by_layer(model, path, leaf):
            if index in left_out.get(path, ()):
                continue
            squares[layer] = squares.get(layer, 0.0) + jnp.square(leaf[index].astype(jnp.float32)).sum()
    return {name: jnp.sqrt(square) for name, square in squares.items()}


def apply(
    state: TrainState, done: Accumulated, *, by_layer: bool = False, adjust: Adjust | None = None
) -> tuple[TrainState, dict[str, Metric]]:
    """Update the state by the mean gradient, unless a loss or gradient has not been finite.

    state: from `TrainState.trained`, so that all of its parameters are trained but for `fixed_layers`. Returns the next
    state, and the objective's metrics with `loss` and `grad_norm` (before the optimizer), and where `by_layer` with
    each of `layer_norms` as `grad_norm/LAYER`. adjust: changes the parameters after the optimizer.
    """
    if isinstance(done.loss, Mean):
        total = done.loss.total
        scale = _inverse(done.loss.count)
        grads = jax.tree.map(lambda g: g * scale, done.grads)
    else:
        total = _sum_of_means(done.loss)
        grads = done.grads
    # Of a stack, the optimizer sees the layers that are trained, as if there were no others.
    own = partial(without_layers, layers=state.fixed_layers)
    trained = own(grads)
    norm = optax.tree.norm(trained)
    finite = jnp.isfinite(norm) & jnp.isfinite(total)
    good = finite & (state.guard < 0)
    updates, opt_state = state.tx.update(trained, state.opt_state, own(state.params))
    updated = optax.apply_updates(own(state.params), updates)
    params = with_layers(state.params, updated, state.fixed_layers)
    if adjust is not None:
        adjusted = own(adjust(params, done.metrics))
        params = with_layers(state.params, adjusted, state.fixed_layers)
    keep = partial(jax.tree.map, lambda new, old: jnp.where(good, new, old))
    following = replace(
        state,
        step=state.step + good.astype(jnp.int32),
        params=keep(params, state.params),
        opt_state=keep(opt_state, state.opt_state),
        guard=jnp.where((state.guard < 0) & ~finite, state.step, state.guard),
    )
    norms = (
        {
            f"grad_norm/{name}": Mean.of(x)
            for name, x in layer_norms(grads, state.model, state.fixed_layers).items()
        }
        if by_layer
        else {}
    )
    return following, {**done.metrics, **mean_losses(done.loss), "grad_norm": Mean.of(norm), **norms}


def mean_losses(loss: Loss) -> dict[str, Mean | Balance]:
    """Name the losses of an update as they are logged: `loss`; of several, `loss/NAME`, and `loss` for their sum."""
    if isinstance(loss, Mean):  # an update without a trained token has loss 0, not 0/0
        return {"loss": Mean(loss.total, jnp.where(loss.count > 0, loss.count, 1.0))}
    # One value per update, so that over several updates, too, the parts add up to the loss.
    parts = {name: Mean.of(_mean(part, _count(part))) for name, part in loss.items()}
    return {"loss": Mean.of(_sum_of_means(loss)), **loss_metrics(parts)}


class Programs:
    """Compiled `accumulate` and `apply`, which donate the previous sums and the trained part of the state."""

    def __init__(
        self,
        objective: Objective,
        state: TrainState,
        *,
        from_zero: bool = False,
        by_layer: bool = False,
        adjust: Adjust | None = None,
        values: Sequence[str] = (),
    ) -> None:
        """Shard gradients and the next state like `state`.

        by_layer: also report the norm of each layer's gradient; adjust: see `apply`. values: the names of those of the
        objective that `accumulate` returns, with the whole micro-batch on every device.

        from_zero: add the first micro-batch of an update to zeros. This takes one program per shape instead of two and
        an extra pass over the gradient, which pays for updates of several micro-batches.
        """
        self._objective, self._noise, self._by_layer = objective, has_noise(state.params), by_layer
        self._adjust, self._values = adjust, tuple(values)
        mesh: Mesh = state.step.sharding.mesh
        # Parts would all draw the same dropout masks; and adapters have small gradients.
        self._make(state, in_parts=mesh.shape["data"] > 1 and not self._noise)
        self._count = jax.jit(partial(count, objective), out_shardings=replicated_sharding(mesh))
        self._counts: Counts | None = None  # abstract; None also where the objective has a single loss
        self._ahead = BackgroundCompiler()
        self._from_zero = from_zero
        self._zeros: Any = None  # makes the sums over no micro-batch, whose shapes the first update shows
        self._done: Accumulated | None = None

    def _make(self, state: TrainState, *, in_parts: bool) -> None:
        """Jit the programs. in_parts: whether each part of the rows along `data` has separate sums until `apply`."""
        shardings = jax.tree.map(lambda x: x.sharding, state.trained())
        mesh: Mesh = state.step.sharding.mesh
        everywhere: Any = replicated_sharding(mesh)
        gradients = partial(_gradients, self._objective, state.fixed, asked=self._values)
        step: Callable[..., Accumulated] = partial(_accumulate, gradients)
        options: dict[str, Any] = {"by_layer": self._by_layer, "adjust": self._adjust}
        finish: Callable[..., Any] = partial(apply, **options)
        placed = Accumulated(shardings.params, everywhere, everywhere, everywhere)
        if in_parts:
            finish = partial(apply_parts, **options)
            step = partial(accumulate_parts, step, mesh)
            placed = _stacked(placed)._replace(values=everywhere)
        if any(s.memory_kind == HOST for s in jax.tree.leaves(shardings.opt_state)):
            finish = partial(_with_optimizer, finish, jax.tree.map(on_device, shardings.opt_state))
        self._in_parts, self._placed = in_parts, placed
        self._accumulate = jax.jit(step, donate_argnums=2, out_shardings=placed)
        self._apply = jax.jit(finish, donate_argnums=0, out_shardings=(shardings, everywhere))

    def compile(self, state: TrainState, calls: Sequence[tuple[Any, bool]]) -> None:
        """Start to compile the programs of these calls, then `apply`, in the background; a call waits for its program.

        calls: micro-batches, read for shapes and dtypes only, and whether each follows another in its update; see
        `rlhf_core.fit.batches.expected_calls`. Programs that are compiled or being compiled are skipped.
        """
        for batch, follows in calls:
            follows = follows or self._from_zero
            name = _program_name(batch, follows)
            if name in self._ahead:
                continue
            self._ahead.compile(name, self.lower(state, batch, follows))
            counting = _program_name(batch, "count")
            if self._counts is not None and counting not in self._ahead:
                self._ahead.compile(counting, self.lower_count(state, batch))
            if "apply" not in self._ahead:
                self._ahead.compile("apply", self.lower_apply(state))

    def lower(self, state: TrainState, batch: Any, follows: bool) -> jax.stages.Lowered:
        """Lower `accumulate` for a micro-batch, read for shapes and dtypes only.

        state: shapes with shardings will do. follows: whether it follows another micro-batch in its update.
        """
        rows = abstract_rows(state.step.sharding.mesh, batch)
        key = None
        if self._noise:
            key = state.key if isinstance(state.key, jax.ShapeDtypeStruct) else _dropout_key(state, 0)
        if self._done is None or not follows:
            traced = self._trace(state, rows, key)
        if follows:
            traced = self._accumulate.trace(state.params, rows, self._done, key, self._counts)
        return traced.lower()

    def lower_count(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """Lower `count` for a micro-batch of several losses, read for shapes and dtypes only."""
        return self._count.lower(state.params, abstract_rows(state.step.sharding.mesh, batch))

    def lower_apply(self, state: TrainState) -> jax.stages.Lowered:
        """Lower `apply` for the sums of the last `lower`."""
        return self._apply.lower(state.trained(), self._done)

    def wait(self) -> None:
        """Wait until every program that was started is compiled."""
        self._ahead.wait_for_all()

    def _trace(self, state: TrainState, batch: Any, key: Any) -> Any:
        """Trace the first micro-batch of an update, and keep what it returns, without values."""
        try:
            traced = self._accumulate.trace(state.params, batch, None, key, self._counts)
        except NotImplementedError as error:
            if not self._in_parts:
                raise
            # JAX may not be able to map an operation over parts, such as the products of experts.
            log.info("gradients are summed over data in every micro-batch (%s)", error_line(error))
            self._make(state, in_parts=False)
            traced = self._accumulate.trace(state.params, batch, None, key, self._counts)
        counts = _counts(traced.out_info.loss)
        if self._counts is None and counts is not None:
            everywhere = replicated_sharding(state.step.sharding.mesh)
            self._counts = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape[self._in_parts :], x.dtype, sharding=everywhere),
                counts,
            )
            traced = self._accumulate.trace(state.params, batch, None, key, self._counts)
        self._done = traced.out_info._replace(values={})
        return traced

    def count(self, state: TrainState, batches: Sequence[Any]) -> Counts | None:
        """Count what each of several losses is divided by in an update of these batches, on the host; None for one.

        Gradients of micro-batches are then added up in one place, instead of one for each loss.
        """
        mesh, total = state.step.sharding.mesh, None
        if self._done is None and batches:
            self._trace(state, put_rows(mesh, batches[0]), _dropout_key(state, 0) if self._noise else None)
        for batch in batches if self._counts is not None else ():
            self._ahead.wait(_program_name(batch, "count"))
            counts = self._count(state.params, put_rows(mesh, batch))
            total = counts if total is None else jax.tree.map(jnp.add, total, counts)
        return total

    def accumulate(
        self,
        state: TrainState,
        batch: Any,
        before: Accumulated | None,
        number: int = 0,
        counts: Counts | None = None,
    ) -> Accumulated:
        """Add micro-batch `number` of the update. counts: what `count` returned for all of its batches."""
        key = _dropout_key(state, number) if self._noise else None
        if self._done is None:
            self._trace(state, batch, key)
        if before is None and self._from_zero:
            if self._zeros is None:
                leaves, tree = jax.tree.flatten(self._done)
                zeros = partial(_zeros, tree, tuple(leaves))
                self._zeros = jax.jit(zeros, out_shardings=self._placed)
            before = self._zeros()
        if before is not None:
            before = before._replace(values={})
        self._ahead.wait(_program_name(batch, before is not None))
        done: Accumulated = self._accumulate(state.params, batch, before, key, counts)
        return done

    def apply(self, state: TrainState, done: Accumulated) -> tuple[TrainState, dict[str, Metric]]:
        """Apply `apply` to the trained part of the state; fixed parameters stay as they are."""
        self._ahead.wait("apply")
        following, metrics = self._apply(state.trained(), done._replace(values={}))
        return state.with_trained(following), metrics


def accumulate_parts(
    step: Callable[..., Accumulated],
    mesh: Mesh,
    params: Any,
    batch: Any,
    before: Any,
    key: Any = None,
    counts: Any = None,
) -> Accumulated:
    """Give each part of the rows along `data` separate sums, stacked: the parts are micro-batches side by side.

    step: `_accumulate` with its gradients bound.
    """

    def one(batch: Any, before: Any) -> Accumulated:
        return step(params, batch, before, key, counts)

    parts: Accumulated = over_parts(one, mesh)(batch, before)
    return parts._replace(values={name: x.reshape(-1, *x.shape[2:]) for name, x in parts.values.items()})


def _stacked(shardings: Accumulated) -> Accumulated:
    """Return the shardings of what `accumulate_parts` stacks."""
    stacked: Accumulated = jax.tree.map(
        lambda x: NamedSharding(x.mesh, PartitionSpec("data", *x.spec)), shardings
    )
    return stacked


def apply_parts(
    state: TrainState, parts: Accumulated, **options: Any
) -> tuple[TrainState, dict[str, Metric]]:
    """Add up the sums that `accumulate_parts` stacked, and `apply` them."""
    grads = jax.tree.map(lambda x: x.sum(0), parts.grads)
    numbers = (parts.loss, parts.metrics)
    count = jax.tree.leaves(numbers)[0].shape[0]
    each = [jax.tree.map(lambda x, i=i: x[i], numbers) for i in range(count)]
    losses, metrics = zip(*each, strict=True)
    done = Accumulated(grads, reduce(_merge_losses, losses), reduce(merge, metrics))
    return apply(state, done, **options)


def _with_optimizer(
    finish: Callable[..., Any], shardings: Any, state: TrainState, done: Accumulated
) -> tuple[TrainState, dict[str, Metric]]:
    """Bring the optimizer's state from the host's memory, and call `finish`."""
    here = jax.device_put(state.opt_state, shardings)
    result: tuple[TrainState, dict[str, Metric]] = finish(replace(state, opt_state=here), done)
    return result


def _zeros(tree: Any, leaves: Sequence[jax.ShapeDtypeStruct]) -> Accumulated:
    """Make the sums over no micro-batch, in the shapes of `Accumulated` flattened to `leaves`."""
    like = jax.tree.unflatten(tree, leaves)
    nothing = Accumulated(
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like.grads),
        jax.tree.map(lambda x: jnp.zeros(x.shape), like.loss),
        {name: empty_metric(metric) for name, metric in like.metrics.items()},
    )
    return jax.tree.map(lambda x, y: jnp.broadcast_to(x, y.shape), nothing, like)


def _program_name(batch: Any, kind: bool | str) -> tuple[Any, ...]:
    """kind: whether the micro-batch follows another one, or "count"."""
    return kind, *(x.shape for x in jax.tree.leaves(batch))


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
                f"gradient_accumulation_steps={splits} does not divide the {x.shape[0]} rows of the batch"
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
    gradients = partial(_gradients, objective, state.fixed)
    counts: Counts | None = None

    def one(before: Accumulated | None, number: Any, parts: list[jax.Array]) -> Accumulated:
        key = _fold(state.key, state.step, number) if noise else None
        return _accumulate(gradients, state.params, micro(parts), before, key, counts)

    done = one(None, 0, [x[0] for x in stacked])
    if splits > 1:
        if not isinstance(done.loss, Mean):  # the counts of all parts come first
            each = jax.lax.map(lambda parts: _counts(objective(state.params, micro(parts))[0]), stacked)
            counts = jax.tree.map(lambda x: x.sum(0), each)
            done = one(None, 0, [x[0] for x in stacked])
        done, _ = jax.lax.scan(
            lambda before, part: (one(before, *part), None),
            done,
            (jnp.arange(1, splits), [x[1:] for x in stacked]),
        )
    following, metrics = apply(state.trained(), done)
    return state.with_trained(following), metrics
