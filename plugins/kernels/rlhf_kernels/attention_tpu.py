"""The kernels of `rlhf_kernels.attention` for TPUs, in Pallas for Mosaic.

The grid's last axis goes through the list of visits of a block of queries, or of keys; lists lie in scalar memory, so
that the blocks to read are known ahead. Steps beyond a list name its last block again, which is not fetched twice.
Logits are [keys, queries]: softmax sums are then rows, as they are stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rlhf_core.models import MASKED, Blocks, seen_pairs, visits
from rlhf_kernels.blocks import LOWEST, kernel_cost, visible_of

WIDEST = 1024
"""Values of all query heads of a key head per query, up to which 512 queries fit vector memory."""


def choose_blocks(time: int, size: int, groups: int, dtype: Any) -> tuple[Blocks, Blocks]:
    """Choose the blocks of the forward and of the backward pass: large ones, for few steps."""
    values = groups * max(size, 128) * jnp.dtype(dtype).itemsize // 2
    if values <= WIDEST:
        largest = 512
    elif values <= 2 * WIDEST:
        largest = 256
    else:
        largest = 128
    block = 128
    while block < largest and 8 * block < time:
        block *= 2
    return (Blocks(block, block),) * 2


def _product(left: jax.Array, right: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Multiply two matrices over one axis of each, in float32 sums."""
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)


def _logits(q: jax.Array, k: jax.Array, softcap: float | None) -> tuple[jax.Array, jax.Array | None]:
    """Compute the logits of one block after the cap, [keys, queries], and tanh(x / cap) for the backward pass."""
    logits = _product(k, q, (1, 1))
    if softcap is None:
        return logits, None
    tanh = jnp.tanh(logits / softcap)
    return softcap * tanh, tanh


def _seen(
    of_queries: Any, of_keys: Any, window: Any, i: jax.Array, j: jax.Array, blocks: Blocks
) -> jax.Array:
    """Compute which keys of block j the queries of block i see, [keys, queries].

    of_queries: indices, None where q holds all of a row, and positions, int32 [1, queries], None without a window.
    of_keys: visible_until and positions, the same of keys.
    """
    shape, (at, near) = (blocks.keys, blocks.queries), of_queries
    all_queries = i * blocks.queries + lax.broadcasted_iota(jnp.int32, shape, 1)
    queries = all_queries if at is None else at[...]
    keys = j * blocks.keys + lax.broadcasted_iota(jnp.int32, shape, 0)
    until, positions = (None if ref is None else _column(ref[...]) for ref in of_keys)
    if window is None:
        return seen_pairs(queries, keys, until, None, None, None)
    return seen_pairs(queries, keys, until, near[...], positions, window[0])


def _column(row: jax.Array) -> jax.Array:
    """[1, n] → [n, 1]."""
    return row.reshape(row.shape[1], 1)


def _forward(
    order: Any, counts: Any, window: Any, of_queries: Any, of_keys: Any, q: Any, k: Any, v: Any, sinks: Any,
    mixed: Any, normalizers: Any, tops: Any, totals: Any, sums: Any, *, softcap: float | None, blocks: Blocks,
    at: Callable[..., Any],
) -> None:  # fmt: skip
    head, i, n = (pl.program_id(axis) for axis in (1, 2, 3))
    last, j = at(order, counts)

    @pl.when(n == 0)
    def _() -> None:
        for group in range(q.shape[0]):
            top, total = (LOWEST, 0.0) if sinks is None else (sinks[head, group], 1.0)
            tops[pl.ds(group, 1), :] = jnp.full((1, blocks.queries), top, jnp.float32)
            totals[pl.ds(group, 1), :] = jnp.full((1, blocks.queries), total, jnp.float32)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    @pl.when(n < last)
    def _() -> None:
        seen = _seen(of_queries, of_keys, window, i, j, blocks)
        for group in range(q.shape[0]):
            logits = jnp.where(seen, _logits(q[group], k[...], softcap)[0], MASKED)
            here = pl.ds(group, 1)
            top = tops[here, :]
            above = jnp.maximum(top, logits.max(0, keepdims=True))
            weights, shrink = jnp.exp(logits - above), jnp.exp(top - above)
            tops[here, :] = above
            totals[here, :] = shrink * totals[here, :] + weights.sum(0, keepdims=True)
            sums[group] = shrink * sums[group] + _product(v[...], weights.astype(v.dtype), (0, 0))

    @pl.when(n == pl.num_programs(3) - 1)
    def _() -> None:
        for group in range(q.shape[0]):
            here = pl.ds(group, 1)
            total = jnp.where(totals[here, :] > 0, totals[here, :], 1.0)
            mixed[group] = (sums[group] / total).T.astype(mixed.dtype)
            normalizers[here, :] = tops[here, :] + jnp.log(total)


def _d_logits(
    q: jax.Array, k: jax.Array, v: jax.Array, d_mixed: jax.Array, normalizers: jax.Array, sums: jax.Array,
    seen: jax.Array, softcap: float | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Compute the weights of one block and the gradient of its logits before the cap, float32 [keys, queries]."""
    logits, tanh = _logits(q, k, softcap)
    weights = jnp.exp(jnp.where(seen, logits, MASKED) - normalizers)
    d_logits = weights * (_product(v, d_mixed, (1, 1)) - sums)
    return weights, d_logits if tanh is None else d_logits * (1.0 - tanh * tanh)


def _backward_queries(
    order: Any, counts: Any, window: Any, of_queries: Any, of_keys: Any, q: Any, k: Any, v: Any, d_mixed: Any,
    normalizers: Any, sums: Any, d_q: Any, gathered: Any, *, softcap: float | None, blocks: Blocks,
    at: Callable[..., Any],
) -> None:  # fmt: skip
    i, n = pl.program_id(2), pl.program_id(3)
    last, j = at(order, counts)

    @pl.when(n == 0)
    def _() -> None:
        gathered[...] = jnp.zeros(gathered.shape, jnp.float32)

    @pl.when(n < last)
    def _() -> None:
        seen = _seen(of_queries, of_keys, window, i, j, blocks)
        for group in range(q.shape[0]):
            here = pl.ds(group, 1)
            _, d_logits = _d_logits(
                q[group], k[...], v[...], d_mixed[group], normalizers[here, :], sums[here, :], seen, softcap
            )
            gathered[group] += _product(k[...], d_logits.astype(k.dtype), (0, 0))

    @pl.when(n == pl.num_programs(3) - 1)
    def _() -> None:
        for group in range(q.shape[0]):
            d_q[group] = gathered[group].T.astype(d_q.dtype)


def _backward_keys(
    order: Any, counts: Any, window: Any, of_queries: Any, of_keys: Any, q: Any, k: Any, v: Any, d_mixed: Any,
    normalizers: Any, sums: Any, d_k: Any, d_v: Any, keys: Any, values: Any, *, softcap: float | None, blocks: Blocks,
    at: Callable[..., Any],
) -> None:  # fmt: skip
    j, n = pl.program_id(2), pl.program_id(3)
    last, i = at(order, counts)

    @pl.when(n == 0)
    def _() -> None:
        keys[...], values[...] = (jnp.zeros(x.shape, jnp.float32) for x in (keys, values))

    @pl.when(n < last)
    def _() -> None:
        seen = _seen(of_queries, of_keys, window, i, j, blocks)
        for group in range(q.shape[0]):
            here = pl.ds(group, 1)
            weights, d_logits = _d_logits(
                q[group], k[...], v[...], d_mixed[group], normalizers[here, :], sums[here, :], seen, softcap
            )
            values[...] += _product(weights.astype(v.dtype), d_mixed[group], (1, 0))
            keys[...] += _product(d_logits.astype(q.dtype), q[group], (1, 0))

    @pl.when(n == pl.num_programs(3) - 1)
    def _() -> None:
        d_k[...], d_v[...] = keys[...].astype(d_k.dtype), values[...].astype(d_v.dtype)


class _Grid:
    """Where the blocks of each step lie: axes row, kv head, block, and number of its visit."""

    def __init__(
        self, visible: jax.Array, batch: int, kv_heads: int, blocks: Blocks, *, by_keys: bool
    ) -> None:
        """visible: from `visible_blocks`. by_keys: blocks of keys visit blocks of queries."""
        order, counts = visits(visible.swapaxes(1, 2) if by_keys else visible)
        self.lists = order.reshape(-1), counts.reshape(-1)
        self.per_row, self.longest = order.shape[1:]
        self.shape = batch, kv_heads, self.per_row, self.longest
        self.blocks, self.by_keys = blocks, by_keys

    def visit(self, row: Any, block: Any, n: Any, order: Any, counts: Any) -> tuple[Any, Any]:
        """Return how many visits a block makes, and the block that visit n goes to, the last one beyond its list."""
        flat = row * self.per_row + block
        last = counts[flat]
        return last, order[flat * self.longest + jnp.clip(n, 0, jnp.maximum(last - 1, 0))]

    def at(self, order: Any, counts: Any) -> tuple[Any, Any]:
        """Return `visit` of the step that runs; for use in kernels."""
        return self.visit(pl.program_id(0), pl.program_id(2), pl.program_id(3), order, counts)

    def _spec(self, shape: tuple[int | None, ...], at: Callable[..., Any], *, keys: bool) -> pl.BlockSpec:
        """at: (row, head, block) → index."""

        def index(row: Any, head: Any, block: Any, n: Any, order: Any, counts: Any, *_: Any) -> Any:
            visited = block if keys == self.by_keys else self.visit(row, block, n, order, counts)[1]
            return at(row, head, visited)

        return pl.BlockSpec(shape, index)

    def keys(self, size: int) -> pl.BlockSpec:
        return self._spec((None, None, self.blocks.keys, size), lambda b, h, i: (b, h, i, 0), keys=True)

    def queries(self, groups: int, size: int) -> pl.BlockSpec:
        shape = (None, None, groups, self.blocks.queries, size)
        return self._spec(shape, lambda b, h, i: (b, h, 0, i, 0), keys=False)

    def per_query(self, groups: int) -> pl.BlockSpec:
        return self._spec((None, None, groups, self.blocks.queries), lambda b, h, i: (b, h, 0, i), keys=False)

    def tokens(self, *, keys: bool) -> pl.BlockSpec:
        """Return the spec of int32 [B, 1, T]."""
        block = self.blocks.keys if keys else self.blocks.queries
        return self._spec((None, 1, block), lambda b, h, i: (b, 0, i), keys=keys)


def _call(
    kernel: Callable[..., None], name: str, grid: _Grid, products: int, rows: Any, arrays: Any, specs: Any, outs: Any,
    shapes: Any, scratch: Any, softcap: float | None, interpret: bool,
) -> Any:  # fmt: skip
    """Run a kernel. products: of queries × keys, two per pair in the forward pass. arrays: the first is q."""
    until, positions, window, of_queries = rows
    at, of_queries = (None, positions) if of_queries is None else of_queries
    if at is not None:
        at = jnp.broadcast_to(at, (len(until), len(at)))
    tokens = [grid.tokens(keys=keys) for keys in (False, True)]
    near = positions is not None
    whole = pl.BlockSpec(memory_space=pltpu.SMEM)
    return pl.pallas_call(
        functools.partial(kernel, softcap=softcap, blocks=grid.blocks, at=grid.at),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid.shape,
            in_specs=[
                whole if near else None,
                (None if at is None else tokens[0], tokens[0] if near else None),
                (tokens[1], tokens[1] if near else None),
                *specs,
            ],
            out_specs=outs,
            scratch_shapes=scratch,
        ),
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(**kernel_cost(products, arrays[0], arrays[1], (arrays, shapes))),
        interpret=interpret,
        name=name,
    )(
        *grid.lists,
        window,
        (_rows(at), _rows(of_queries)),
        (_rows(until), _rows(positions)),
        *arrays,
    )


def _rows(x: jax.Array | None) -> jax.Array | None:
    """[B, T] → [B, 1, T]: a block of one row is then all of its second-last axis."""
    return None if x is None else x[:, None]


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Any,
    sinks: jax.Array | None,
    *,
    softcap: float | None,
    blocks: Blocks,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Compute what `attention_pallas_gpu.forward` computes."""
    batch, kv_heads, groups, _, size = q.shape
    visible = visible_of(rows, blocks)
    grid = _Grid(visible, batch, kv_heads, blocks, by_keys=False)
    queries = grid.queries(groups, size)
    keys = grid.keys(size)
    per_query = grid.per_query(groups)
    sums = pltpu.VMEM((groups, blocks.queries), jnp.float32)
    mixed, normalizers = _call(
        _forward,
        "attention_forward",
        grid,
        2,
        rows,
        (q, k, v, sinks),
        (queries, keys, keys, None if sinks is None else pl.BlockSpec(memory_space=pltpu.SMEM)),
        [queries, per_query],
        [jax.ShapeDtypeStruct(q.shape, v.dtype), jax.ShapeDtypeStruct(q.shape[:4], jnp.float32)],
        [sums, sums, pltpu.VMEM((groups, size, blocks.queries), jnp.float32)],
        softcap,
        interpret,
    )
    return mixed.transpose(0, 3, 1, 2, 4), normalizers


def backward(
    q: jax.Array, k: jax.Array, v: jax.Array, rows: Any, d_mixed: jax.Array, normalizers: jax.Array, sums: jax.Array,
    *, softcap: float | None, blocks: Blocks, interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Compute what `attention_pallas_gpu.backward` computes."""
    batch, kv_heads, groups, _, size = q.shape
    visible = visible_of(rows, blocks)
    arrays = (q, k, v, d_mixed.transpose(0, 2, 3, 1, 4), normalizers, sums)

    def call(kernel: Callable[..., None], name: str, products: int, by_keys: bool) -> Any:
        grid = _Grid(visible, batch, kv_heads, blocks, by_keys=by_keys)
        queries = grid.queries(groups, size)
        keys = grid.keys(size)
        per_query = grid.per_query(groups)
        specs = (queries, keys, keys, queries, per_query, per_query)
        gradients = (k, v) if by_keys else (q,)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in gradients]
        sizes = [(blocks.keys, size)] * 2 if by_keys else [(groups, size, blocks.queries)]
        scratch = [pltpu.VMEM(each, jnp.float32) for each in sizes]
        outs = [keys, keys] if by_keys else [queries]
        return _call(
            kernel, name, grid, products, rows, arrays, specs, outs, shapes, scratch, softcap, interpret
        )

    (d_q,) = call(_backward_queries, "attention_backward_queries", 3, by_keys=False)
    return d_q, *call(_backward_keys, "attention_backward_keys", 4, by_keys=True)
