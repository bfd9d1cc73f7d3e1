"""The kernels of `rlhf_kernels.attention` for GPUs, in Pallas for Triton.

Triton has no dynamic grids: a kernel computes one block of queries, or of keys, and loops over its list of visits.
Its arrays are powers of two; heads of other sizes are read and written under a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rlhf_core.models import MASKED, Blocks, seen_pairs, visits
from rlhf_kernels.blocks import LOWEST, kernel_cost, visible_of


def choose_blocks(time: int, size: int, groups: int, dtype: Any) -> tuple[Blocks, Blocks]:
    """Choose the blocks of the forward and of the backward pass: those that fit shared memory and registers."""
    large = size * jnp.dtype(dtype).itemsize > 256
    forward, backward = (Blocks(64, 32), Blocks(32, 32)) if large else (Blocks(128, 64), Blocks(64, 64))
    return (forward, backward) if time > 64 else (Blocks(64, 32), backward)


def _width(size: int) -> int:
    return max(16, pl.next_power_of_2(size))


def _in_width(size: int) -> jax.Array | None:
    """Return which columns of a padded head exist; None: all."""
    return None if _width(size) == size else (jnp.arange(_width(size)) < size)[None]


def _load(ref: Any, columns: jax.Array | None) -> jax.Array:
    return plgpu.load(ref) if columns is None else plgpu.load(ref, mask=columns, other=0.0)


def _store(ref: Any, x: jax.Array, columns: jax.Array | None) -> None:
    plgpu.store(ref, x.astype(ref.dtype), mask=columns)


_dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)


def _logits(q: jax.Array, k: jax.Array, softcap: float | None) -> tuple[jax.Array, jax.Array | None]:
    """Compute the logits of one block after the cap, and tanh(x / cap) for the backward pass."""
    logits = _dot(q, k.T)
    if softcap is None:
        return logits, None
    tanh = jnp.tanh(logits / softcap)
    return softcap * tanh, tanh


def _tokens(rows: Any, first: jax.Array, block: int) -> tuple[jax.Array, Any]:
    """Return the indices of a block that starts at `first`, and its positions if there is a window."""
    _, positions, window, _ = rows
    return first + jnp.arange(block), None if window is None else positions[pl.ds(first, block)]


def _queries(rows: Any, first: jax.Array, block: int) -> tuple[jax.Array, Any]:
    """Return what `_tokens` does, of a block that starts at `first` among the queries, which may be some of a row's."""
    if rows[3] is None:
        return _tokens(rows, first, block)
    at, positions = rows[3]
    here = pl.ds(first, block)
    return at[here], None if positions is None else positions[here]


def _seen(rows: Any, queries: Any, first_key: jax.Array, blocks: Blocks) -> jax.Array:
    """Compute which queries see which keys, [queries, keys]. queries: from `_queries`."""
    until, _, window, _ = rows
    keys, key_positions = _tokens(rows, first_key, blocks.keys)
    until = until[pl.ds(first_key, blocks.keys)]
    if window is None:
        return seen_pairs(queries[0][:, None], keys[None], until[None], None, None, None)
    near = queries[1][:, None], key_positions[None], window[0]
    return seen_pairs(queries[0][:, None], keys[None], until[None], *near)


def _forward(
    order: Any, counts: Any, rows: Any, q: Any, k: Any, v: Any, sink: Any, mixed: Any, normalizers: Any, *,
    size: int, softcap: float | None, blocks: Blocks,
) -> None:  # fmt: skip
    i = pl.program_id(0)
    columns = _in_width(size)
    queries = _queries(rows, i * blocks.queries, blocks.queries)
    query = _load(q, columns)

    def visit(n: jax.Array, so_far: Any) -> Any:
        top, total, out = so_far
        first = order[n] * blocks.keys
        keys = pl.ds(first, blocks.keys)
        logits, _ = _logits(query, _load(k.at[keys, :], columns), softcap)
        logits = jnp.where(_seen(rows, queries, first, blocks), logits, MASKED)
        above = jnp.maximum(top, logits.max(-1))
        weights = jnp.exp(logits - above[:, None])
        shrink = jnp.exp(top - above)
        values = _load(v.at[keys, :], columns)
        out = shrink[:, None] * out + _dot(weights.astype(values.dtype), values)
        return above, shrink * total + weights.sum(-1), out

    tops = jnp.full(blocks.queries, LOWEST if sink is None else sink[0])
    totals = jnp.full(blocks.queries, float(sink is not None))
    start = tops, totals, jnp.zeros(query.shape, jnp.float32)
    top, total, out = lax.fori_loop(0, counts[i], visit, start)
    total = jnp.where(total > 0, total, 1.0)
    _store(mixed, out / total[:, None], columns)
    normalizers[...] = top + jnp.log(total)


def _d_logits(
    q: jax.Array, k: jax.Array, v: jax.Array, d_mixed: jax.Array, normalizers: jax.Array, sums: jax.Array,
    seen: jax.Array, softcap: float | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Compute the weights of one block and the gradient of its logits before the cap, float32 [queries, keys]."""
    logits, tanh = _logits(q, k, softcap)
    weights = jnp.exp(jnp.where(seen, logits, MASKED) - normalizers[:, None])
    d_logits = weights * (_dot(d_mixed, v.T) - sums[:, None])
    return weights, d_logits if tanh is None else d_logits * (1.0 - tanh * tanh)


def _backward_queries(
    order: Any, counts: Any, rows: Any, q: Any, k: Any, v: Any, d_mixed: Any, normalizers: Any, sums: Any, d_q: Any,
    *, size: int, softcap: float | None, blocks: Blocks,
) -> None:  # fmt: skip
    i = pl.program_id(0)
    columns = _in_width(size)
    queries = _queries(rows, i * blocks.queries, blocks.queries)
    query = _load(q, columns)
    d_out = _load(d_mixed, columns)
    normalizer = normalizers[...]
    total = sums[...]

    def visit(n: jax.Array, so_far: jax.Array) -> jax.Array:
        first = order[n] * blocks.keys
        key, value = (_load(x.at[pl.ds(first, blocks.keys), :], columns) for x in (k, v))
        seen = _seen(rows, queries, first, blocks)
        _, d_logits = _d_logits(query, key, value, d_out, normalizer, total, seen, softcap)
        return so_far + _dot(d_logits.astype(key.dtype), key)

    _store(d_q, lax.fori_loop(0, counts[i], visit, jnp.zeros(query.shape, jnp.float32)), columns)


def _backward_keys(
    order: Any, counts: Any, rows: Any, q: Any, k: Any, v: Any, d_mixed: Any, normalizers: Any, sums: Any, d_k: Any,
    d_v: Any, *, size: int, softcap: float | None, blocks: Blocks, groups: int,
) -> None:  # fmt: skip
    j = pl.program_id(0)
    columns = _in_width(size)
    key, value = _load(k, columns), _load(v, columns)

    def visit(n: jax.Array, so_far: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        d_key, d_value = so_far
        group = lax.rem(n, groups)
        first = order[lax.div(n, groups)] * blocks.queries
        at = pl.ds(first, blocks.queries)
        query, d_out = _load(q.at[group, at, :], columns), _load(d_mixed.at[at, group, :], columns)
        seen = _seen(rows, _queries(rows, first, blocks.queries), j * blocks.keys, blocks)
        normalizer, total = normalizers[group, at], sums[group, at]
        weights, d_logits = _d_logits(query, key, value, d_out, normalizer, total, seen, softcap)
        d_value += _dot(weights.astype(d_out.dtype).T, d_out)
        return d_key + _dot(d_logits.astype(query.dtype).T, query), d_value

    none = jnp.zeros(key.shape, jnp.float32)
    d_key, d_value = lax.fori_loop(0, counts[j] * groups, visit, (none, none))
    _store(d_k, d_key, columns)
    _store(d_v, d_value, columns)


def _call(
    kernel: Callable[..., None], name: str, products: int, grid: tuple[int, ...], arrays: Any, specs: Any, outs: Any,
    shapes: Any, interpret: bool,
) -> Any:  # fmt: skip
    """Run a kernel. products: of queries × keys, two per pair in the forward pass. arrays: lists, `rows`, and the
    others, q first.
    """
    queries = arrays[3]
    # The compiler drops cost estimates on GPUs; metadata is kept in the program's text.
    cost = kernel_cost(products, queries, arrays[4], (arrays[3:], shapes))
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=specs,
        out_specs=outs,
        out_shape=shapes,
        # More warps than four hold the accumulators of wide heads in their registers.
        compiler_params=plgpu.CompilerParams(num_warps=4 if queries.shape[-1] <= 64 else 8, num_stages=2),
        interpret=interpret,
        name=name,
        metadata={key: str(number) for key, number in cost.items()},
    )(*arrays)


def _row_specs(rows: Any, time: int, at: Callable[..., Any]) -> Any:
    """Return the specs of `rows`: visible_until, with a window positions and window, and the same of queries."""

    def whole(length: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, length), lambda *ids: (at(*ids), 0))

    window = pl.BlockSpec((1,), lambda *ids: (0,))
    of_queries = None
    if rows[3] is not None:
        (length,) = rows[3][0].shape
        indices = pl.BlockSpec((length,), lambda *ids: (0,))
        of_queries = indices, None if rows[2] is None else whole(length)
    return (whole(time), *((None, None) if rows[2] is None else (whole(time), window)), of_queries)


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Any,
    sinks: jax.Array | None,
    *,
    softcap: float | None,
    blocks: Blocks,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Compute (the mixed values [B, T, K, G, h] in v's dtype, logarithms of the softmax sums float32 [B, K, G, T]).

    rows: (visible_until, positions, window as int32 [1], the indices and positions of the queries), the second and
    third None without a window, the last None where q holds all of a row. sinks: float32 [K, G].
    """
    batch, kv_heads, groups, time, size = q.shape
    order, counts = visits(visible_of(rows, blocks))
    width = _width(size)
    per_row = time // blocks.queries

    def of_head(head: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.div(head, groups), lax.rem(head, groups)

    keys = pl.BlockSpec((None, None, k.shape[2], width), lambda i, head, row: (row, of_head(head)[0], 0, 0))
    return _call(
        functools.partial(_forward, size=size, softcap=softcap, blocks=blocks),
        "attention_forward",
        2,
        (per_row, kv_heads * groups, batch),
        (order, counts, rows, q, k, v, None if sinks is None else sinks.reshape(-1)),
        [
            pl.BlockSpec((None, None, order.shape[-1]), lambda i, head, row: (row, i, 0)),
            pl.BlockSpec((None, per_row), lambda i, head, row: (row, 0)),
            _row_specs(rows, k.shape[2], lambda i, head, row: row),
            pl.BlockSpec(
                (None, None, None, blocks.queries, width), lambda i, head, row: (row, *of_head(head), i, 0)
            ),
            keys,
            keys,
            None if sinks is None else pl.BlockSpec((1,), lambda i, head, row: (head,)),
        ],
        [
            pl.BlockSpec(
                (None, blocks.queries, None, None, width), lambda i, head, row: (row, i, *of_head(head), 0)
            ),
            pl.BlockSpec((None, None, None, blocks.queries), lambda i, head, row: (row, *of_head(head), i)),
        ],
        [
            jax.ShapeDtypeStruct((batch, time, kv_heads, groups, size), v.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, groups, time), jnp.float32),
        ],
        interpret,
    )


def backward(
    q: jax.Array, k: jax.Array, v: jax.Array, rows: Any, d_mixed: jax.Array, normalizers: jax.Array, sums: jax.Array,
    *, softcap: float | None, blocks: Blocks, interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Compute the gradients of q, k and v. d_mixed, normalizers: as `forward` returns values and logarithms, which have
    the sinks in them; sums: Σ d_mixed · mixed per query and head, float32 [B, K, G, T].
    """
    batch, kv_heads, groups, time, size = q.shape
    visible = visible_of(rows, blocks)
    width = _width(size)
    per_queries = time // blocks.queries
    per_keys = k.shape[2] // blocks.keys

    def of_head(head: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.div(head, groups), lax.rem(head, groups)

    order, counts = visits(visible)
    queries = pl.BlockSpec(
        (None, None, None, blocks.queries, width), lambda i, head, row: (row, *of_head(head), i, 0)
    )
    keys = pl.BlockSpec((None, None, k.shape[2], width), lambda i, head, row: (row, of_head(head)[0], 0, 0))
    per_query = pl.BlockSpec(
        (None, None, None, blocks.queries), lambda i, head, row: (row, *of_head(head), i)
    )
    d_q = _call(
        functools.partial(_backward_queries, size=size, softcap=softcap, blocks=blocks),
        "attention_backward_queries",
        3,
        (per_queries, kv_heads * groups, batch),
        (order, counts, rows, q, k, v, d_mixed, normalizers, sums),
        [
            pl.BlockSpec((None, None, per_keys), lambda i, head, row: (row, i, 0)),
            pl.BlockSpec((None, per_queries), lambda i, head, row: (row, 0)),
            _row_specs(rows, k.shape[2], lambda i, head, row: row),
            queries,
            keys,
            keys,
            pl.BlockSpec(
                (None, blocks.queries, None, None, width), lambda i, head, row: (row, i, *of_head(head), 0)
            ),
            per_query,
            per_query,
        ],
        queries,
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        interpret,
    )
    order, counts = visits(visible.swapaxes(1, 2))
    keys = pl.BlockSpec((None, None, blocks.keys, width), lambda j, head, row: (row, head, j, 0))
    per_query = pl.BlockSpec((None, None, groups, time), lambda j, head, row: (row, head, 0, 0))
    d_k, d_v = _call(
        functools.partial(_backward_keys, size=size, softcap=softcap, blocks=blocks, groups=groups),
        "attention_backward_keys",
        4,
        (per_keys, kv_heads, batch),
        (order, counts, rows, q, k, v, d_mixed, normalizers, sums),
        [
            pl.BlockSpec((None, None, per_queries), lambda j, head, row: (row, j, 0)),
            pl.BlockSpec((None, per_keys), lambda j, head, row: (row, 0)),
            _row_specs(rows, k.shape[2], lambda j, head, row: row),
            pl.BlockSpec((None, None, groups, time, width), lambda j, head, row: (row, head, 0, 0, 0)),
            keys,
            keys,
            pl.BlockSpec((None, time, None, groups, width), lambda j, head, row: (row, 0, head, 0, 0)),
            per_query,
            per_query,
        ],
        [keys, keys],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        interpret,
    )
    return d_q, d_k, d_v
