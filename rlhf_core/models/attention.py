"""Attention over rows that hold several sequences.

Heads are split as [kv head, query head of that kv head], so that keys and values are never repeated. Axes in
the einsums: b row, k kv head, g query head within it, t query, s key, h head dimension, x = (g, t). Arrays of blocks
lead with the block, so that a block is one piece of memory.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlhf_core.contracts import AttentionOver
from rlhf_core.errors import InputError

MASKED = -1e30
"""Logit of an invisible key. Finite: a query that sees no key gets the mean of the values, not NaN."""


def query_block(time: int) -> int:
    """Choose how many queries are computed together: 128, or more in long rows, so that a row has at most 16 blocks."""
    return 128 * max(1, math.ceil(time / (16 * 128)))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    visible_until: jax.Array,
    *,
    window: jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute self-attention over rows; queries t with s <= t < visible_until[s] see the key at s.

    q: [B, K, G, T, h], already scaled; k, v: [B, K, T, h]; positions, visible_until: int32 [B, T].
    window: int32 scalar; a query does not see keys that many positions back or more. Positions, not indices: a branch
        is as far from its shared prompt as if it followed the prompt directly.
    softcap: logits become softcap · tanh(logits / softcap). sinks: float32 [K, G], one more logit for every query of a
        head, whose value is 0.
    Returns [B, T, K·G·h] in v's dtype; softmax is in float32. A block of queries never touches keys after it.
    """
    time = q.shape[3]
    block = query_block(time)
    parts = []
    for start in range(0, time, block):
        end = min(start + block, time)
        between = positions[:, start:end, None], positions[:, None, :end]
        indices = jnp.arange(start, end)[:, None], jnp.arange(end)
        seen = seen_pairs(*indices, visible_until[:, None, :end], *between, window)
        parts.append(attend_seen(q[:, :, :, start:end], k[:, :, :end], v[:, :, :end], seen, softcap, sinks))
    return jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]


def attend_at(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    at: jax.Array,
    positions: jax.Array,
    visible_until: jax.Array,
    *,
    window: jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute `attend` for the queries at the indices `at` alone.

    at: int32 [B, n]; q: [B, K, G, n, h]. Returns [B, n, K·G·h].
    """
    between = jnp.take_along_axis(positions, at, axis=1)[:, :, None], positions[:, None]
    seen = seen_pairs(at[:, :, None], jnp.arange(k.shape[2]), visible_until[:, None], *between, window)
    return attend_seen(q, k, v, seen, softcap, sinks)


def attend_seen(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    softcap: float | None,
    sinks: jax.Array | None,
    order: str = "bksh",
) -> jax.Array:
    """Compute attention of q, [B, K, G, T, h], over the keys that it sees, bool [B, T, S]: [B, T, K·G·h].

    order: the axes of k.
    """
    logits = jnp.einsum(f"bkgth,{order}->bkgts", q, k, preferred_element_type=jnp.float32)
    logits = jnp.where(seen[:, None, None], capped(logits, softcap), MASKED)
    sinks = None if sinks is None else sinks[..., None, None]
    highest = lax.stop_gradient(with_sinks(logits.max(-1, keepdims=True), sinks))
    weights = jnp.exp(logits - highest)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total += sinks_share(sinks, highest)
    # Dividing by the sum at the end saves a pass over the largest array.
    mixed = (weighted(weights, v, "bkgts,bksh->bkgth") / total).astype(v.dtype)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(q.shape[0], q.shape[3], -1)


def capped(logits: jax.Array, softcap: float | None) -> jax.Array:
    """Compute softcap · tanh(logits / softcap); None: the logits."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def with_sinks(highest: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Return the highest of the logits and of a softmax's sinks, which broadcast to them."""
    return highest if sinks is None else jnp.maximum(highest, sinks)


def sinks_share(sinks: jax.Array | None, highest: jax.Array) -> jax.Array | float:
    """Return what sinks add to the sum of a softmax."""
    return 0.0 if sinks is None else jnp.exp(sinks - highest)


def weighted(weights: jax.Array, values: jax.Array, spec: str) -> jax.Array:
    return jnp.einsum(spec, weights.astype(values.dtype), values, preferred_element_type=jnp.float32)


def attend_cudnn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    visible_until: jax.Array,
    *,
    window: jax.Array | None = None,
    softcap: float | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Compute `attention.attend` in one kernel: bfloat16, no soft cap, head sizes up to 128 that are multiples of 8.

    The kernel takes a mask, bool [B, 1, T, T]: memory grows with the square of the row, though by less per pair than
    logits, a float per head, would take. implementation: "xla" computes the same without the kernel, on any platform.

    Raises InputError for what the kernel cannot do.
    """
    batch, kv_heads, groups, time, size = q.shape
    problems = []
    if softcap is not None:
        problems.append(f"it has no soft cap, which this model has ({softcap:g})")
    if implementation == "cudnn" and q.dtype != jnp.bfloat16:
        problems.append(f"it computes in bfloat16, not {q.dtype}; set dtype to 'bfloat16'")
    if implementation == "cudnn" and (size > 128 or size % 8):
        problems.append(f"head size must be at most 128 and a multiple of 8, not {size}")
    if problems:
        raise InputError(*(f"attention 'cudnn': {line}" for line in problems))
    at = jnp.arange(time)
    between = positions[:, :, None], positions[:, None]
    seen = seen_pairs(at[:, None], at, visible_until[:, None], *between, window)
    queries = q.transpose(0, 3, 1, 2, 4).reshape(batch, time, kv_heads * groups, size)
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    mixed = jax.nn.dot_product_attention(
        queries, keys, values, mask=seen[:, None], scale=1.0, implementation=implementation
    )
    return mixed.reshape(batch, time, kv_heads * groups * size)


LOWEST = 0.1 * MASKED
"""Start of a running maximum: so far above MASKED that the weight of an invisible key is exactly 0."""


class Blocks(NamedTuple):
    """How many queries, and how many keys, are computed together; one divides the other."""

    queries: int
    keys: int

    def fill(self, time: int) -> int:
        """Count the tokens that a row of `time` lacks for whole blocks of both."""
        return -time % max(self)


def visible_blocks(
    positions: Any, visible_until: Any, window: Any | None, blocks: Blocks, at: Any | None = None
) -> Any:
    """Find the blocks of keys that a block of queries has to visit: bool [B, query blocks, key blocks].

    positions, visible_until: int32 [B, time], of NumPy or JAX; whole blocks. window: as in `attention.attend`.
    at: int32 [n], the indices of the queries, whole blocks of the row; None: all.
    No pair that is seen lies outside; blocks in which no pair is seen may be among them.
    """
    rows, time = visible_until.shape
    first_query = np.arange(0, time, blocks.queries)[:, None]
    first_key = np.arange(0, time, blocks.keys)
    last_seen = visible_until.reshape(rows, 1, -1, blocks.keys).max(-1)
    visible = (last_seen > first_query) & (first_key < first_query + blocks.queries)
    if window is not None:
        queries = positions.reshape(rows, -1, 1, blocks.queries).min(-1)
        visible &= queries - positions.reshape(rows, 1, -1, blocks.keys).max(-1) < window
    return visible if at is None else visible[:, at[:: blocks.queries] // blocks.queries]


def visits(visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (int32 [..., n, m], int32 [..., n]): the visible ones of m blocks, in order and before the others; and
    how many are visible.

    visible: bool [..., n, m], from `visible_blocks`, or its transpose for the queries that a block of keys visits.
    """
    order = jnp.argsort(~visible, axis=-1, stable=True).astype(jnp.int32)
    return order, visible.sum(-1, dtype=jnp.int32)


def seen_pairs(
    queries: Any, keys: Any, until: Any, query_positions: Any, key_positions: Any, window: Any
) -> Any:
    """Compute which queries see which keys, for shapes that broadcast to both orders; without a window the last three
    are None.

    queries, keys: indices; until: of the keys; positions and window as in `attention.attend`.
    """
    seen = (keys <= queries) & (queries < until)
    return seen if window is None else seen & (query_positions - key_positions < window)


def filled(x: jax.Array, axis: int, fill: int) -> jax.Array:
    """Append `fill` zeros along an axis."""
    return jnp.pad(x, [(0, fill if i == axis else 0) for i in range(x.ndim)])


def block_size(time: int) -> int:
    """Choose the size of blocks without knowing the rows: 64, or more in long rows, for at most 16 blocks."""
    return 64 * math.ceil(time / (16 * 64))


@functools.cache
def in_blocks(block: int) -> AttentionOver:
    """Return `attend_blocks` with this block size: one object per size, so that programs are shared."""
    return functools.partial(attend_blocks, block=block)


def attend_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    visible_until: jax.Array,
    *,
    window: jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    starts: jax.Array | None = None,
    block: int | None = None,
) -> jax.Array:
    """Compute `attend` up to float32 rounding, except that queries that see no key get 0, without the blocks of keys
    that no query sees.

    FlashAttention's recurrence (Dao et al. 2022) in XLA's loops: no array of time × time exists, forward or backward.
    At run time, `visible_until` decides which blocks of keys a block of queries visits, for all rows of the batch
    together. A group of completions with a shared prompt costs what its completions see, not time².
    starts: int32 [n], see `AttentionOver`. block: queries per block, and keys; None: `block_size`.
    """
    time = k.shape[2]
    block = block or block_size(time)
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    if starts is not None:
        run = q.shape[3] // len(starts)
        block = math.gcd(block, run)
        numbers = block_numbers(starts, run, block)
        return _attend_blocks(q, k, v, (positions, visible_until, window, numbers), sinks, softcap, block)
    fill = -time % block
    if fill:
        q, k, v = (filled(x, x.ndim - 2, fill) for x in (q, k, v))
        positions, visible_until = (filled(x, 1, fill) for x in (positions, visible_until))
    mixed = _attend_blocks(q, k, v, (positions, visible_until, window, None), sinks, softcap, block)
    return mixed[:, :time] if fill else mixed


def block_numbers(starts: jax.Array, run: int, block: int) -> jax.Array:
    """Number the blocks of the queries of runs that begin at `starts`, int32 [n]: int32 [n · run / block]."""
    return (starts[:, None] // block + jnp.arange(run // block, dtype=jnp.int32)).reshape(-1)


def _cut(x: jax.Array, axis: int, block: int) -> jax.Array:
    """[…, time, …] → [blocks, …, block, …]."""
    shape = (*x.shape[:axis], x.shape[axis] // block, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _block_seen(
    i: jax.Array, j: jax.Array, positions: jax.Array, until: jax.Array, window: jax.Array | None
) -> jax.Array:
    """Compute which queries of block i see which keys of block j, bool [B, 1, 1, t, s]."""
    block = until.shape[-1]
    query, key = (n * block + jnp.arange(block) for n in (i, j))
    seen = seen_pairs(
        query[:, None], key, until[j][:, None], positions[i][:, :, None], positions[j][:, None], window
    )
    return seen[:, None, None]


def _block_logits(q: jax.Array, k: jax.Array, softcap: float | None) -> tuple[jax.Array, jax.Array | None]:
    """Compute logits, float32 [B, K, G, t, s], after the cap, and tanh(x / cap) for the backward pass."""
    logits = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32)
    if softcap is None:
        return logits, None
    tanh = jnp.tanh(logits / softcap)
    return softcap * tanh, tanh


def sinks_gradient(sinks: jax.Array | None, normalizers: jax.Array, sums: jax.Array) -> jax.Array | None:
    """Compute the gradient of sinks, float32 [K, G]: minus the weight of the sink times Σ d_mixed · mixed.

    normalizers: logarithms of the softmax sums, sinks included; sums: Σ d_mixed · mixed; both float32 [B, K, G, T].
    """
    if sinks is None:
        return None
    return -(jnp.exp(sinks[..., None] - normalizers) * sums).sum((0, 3))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    of_rows: Any,
    sinks: jax.Array | None,
    softcap: float | None,
    block: int,
) -> jax.Array:
    """of_rows: positions, visible_until, window, and which blocks of the row are those of q, int32 [n]; None: all."""
    return _forward_blocks(q, k, v, of_rows, sinks, softcap, block)[0]


def _forward_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    of_rows: Any,
    sinks: jax.Array | None,
    softcap: float | None,
    block: int,
) -> tuple[jax.Array, Any]:
    rows, kv_heads, groups, time, size = q.shape
    dtype, (positions, until, window, numbers) = v.dtype, of_rows
    q, k, v = _cut(q, 3, block), _cut(k, 2, block), _cut(v, 2, block)
    # A block is visited for all rows, if any of them sees it.
    order, counts = visits(visible_blocks(positions, until, window, Blocks(block, block)).any(0))
    positions, until = _cut(positions, 1, block), _cut(until, 1, block)
    heads = (rows, kv_heads, groups, block)

    def one(_: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, Any]:
        i, queries = xs

        def visit(n: jax.Array, so_far: Any) -> Any:
            top, total, mixed = so_far
            j = order[i, n]
            logits = jnp.where(
                _block_seen(i, j, positions, until, window), _block_logits(queries, k[j], softcap)[0], MASKED
            )
            above = jnp.maximum(top, logits.max(-1))
            weights = jnp.exp(logits - above[..., None])
            shrink = jnp.exp(top - above)
            more = jnp.einsum(
                "bkgts,bksh->bkgth", weights.astype(dtype), v[j], preferred_element_type=jnp.float32
            )
            return above, shrink * total + weights.sum(-1), shrink[..., None] * mixed + more

        first = LOWEST if sinks is None else sinks[..., None]
        start = jnp.broadcast_to(first, heads), jnp.full(heads, float(sinks is not None))
        top, total, mixed = lax.fori_loop(0, counts[i], visit, (*start, jnp.zeros((*heads, size))))
        total = jnp.where(total > 0, total, 1.0)
        return None, ((mixed / total[..., None]).astype(dtype), top + jnp.log(total))

    every = jnp.arange(time // block) if numbers is None else numbers
    _, (mixed, normalizers) = lax.scan(one, None, (every, q))
    of_blocks = positions, until, window, numbers
    residuals = (q, k, v, of_blocks, sinks, mixed, normalizers, order, counts)
    # [blocks, B, K, G, block, h] → [B, time, K·G·h]
    return mixed.transpose(1, 0, 4, 2, 3, 5).reshape(rows, time, kv_heads * groups * size), residuals


def _backward_blocks(softcap: float | None, block: int, residuals: Any, cotangent: jax.Array) -> Any:
    q, k, v, (positions, until, window, numbers), sinks, mixed, normalizers, order, counts = residuals
    count, rows, kv_heads, groups, _, size = q.shape
    d_mixed = cotangent.reshape(rows, count, block, kv_heads, groups, size).transpose(1, 0, 3, 4, 2, 5)
    # Σ_s p dp of a query is Σ_h d_mixed · mixed.
    shared = (d_mixed.astype(jnp.float32) * mixed.astype(jnp.float32)).sum(-1)

    def transposed(x: jax.Array) -> jax.Array:  # [B, K, G, t, h] → [B, K, h, x]
        return x.transpose(0, 1, 4, 2, 3).reshape(rows, kv_heads, size, groups * block)

    def one(d_both: tuple[jax.Array, jax.Array], xs: Any) -> Any:
        i, queries, d_mixed, normalizer, shared = xs
        # Transposed once here, so that no array of queries × keys has to be.
        queries_t, d_mixed_t = transposed(queries), transposed(d_mixed)

        def visit(n: jax.Array, so_far: Any) -> Any:
            d_keys, d_values, d_queries = so_far
            j = order[i, n]
            logits, tanh = _block_logits(queries, k[j], softcap)
            logits = jnp.where(_block_seen(i, j, positions, until, window), logits, MASKED)
            weights = jnp.exp(logits - normalizer[..., None])
            d_weights = jnp.einsum("bkgth,bksh->bkgts", d_mixed, v[j], preferred_element_type=jnp.float32)
            d_logits = weights * (d_weights - shared[..., None])
            if tanh is not None:
                d_logits *= 1.0 - jnp.square(tanh)
            weights, d_logits = weights.astype(v.dtype), d_logits.astype(q.dtype)
            flat = (rows, kv_heads, groups * block, block)
            sums = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
            more_values = sums("bkhx,bkxs->bkhs", d_mixed_t, weights.reshape(flat))
            more_keys = sums("bkhx,bkxs->bkhs", queries_t, d_logits.reshape(flat))
            return (
                d_keys.at[j].add(more_keys),
                d_values.at[j].add(more_values),
                d_queries + sums("bkgts,bksh->bkgth", d_logits, k[j]),
            )

        *d_both, d_queries = lax.fori_loop(0, counts[i], visit, (*d_both, jnp.zeros(queries.shape)))
        return tuple(d_both), d_queries.astype(q.dtype)

    none = jnp.zeros((len(k), rows, kv_heads, size, block))
    every = jnp.arange(count) if numbers is None else numbers
    (d_k, d_v), d_q = lax.scan(one, (none, none), (every, q, d_mixed, normalizers, shared))
    d_q = jnp.moveaxis(d_q, 0, 3).reshape(rows, kv_heads, groups, count * block, size)
    # [blocks, B, K, h, block] → [B, K, time, h]
    d_k, d_v = (
        x.transpose(1, 2, 0, 4, 3).reshape(rows, kv_heads, -1, size).astype(k.dtype) for x in (d_k, d_v)
    )
    normalizers, shared = (jnp.moveaxis(x, 0, 3).reshape(*q.shape[1:4], -1) for x in (normalizers, shared))
    return d_q, d_k, d_v, None, sinks_gradient(sinks, normalizers, shared)


_attend_blocks.defvjp(_forward_blocks, _backward_blocks)
