"""Attention over rows in blocks of queries and keys, without the blocks of keys that no query sees.

FlashAttention's recurrence (Dao et al. 2022) in XLA's loops: no array of time × time exists, forward or backward. At
run time, `visible_until` decides which blocks of keys a block of queries visits, for all rows of the batch together. A
group of completions with a shared prompt costs what its completions see, not time².

Axes in the einsums: b row, k kv head, g query head within it, t query, s key, h head dimension, x = (g, t). Arrays of
blocks lead with the block, so that a block is one piece of memory.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlhf_core.contracts import AttentionOver
from rlhf_core.models.attention import LOWEST, MASKED, Blocks, filled, seen_pairs, visible_blocks, visits


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
    block: int | None = None,
) -> jax.Array:
    """Compute `attention.attend` up to float32 rounding, except that queries that see no key get 0.

    block: queries per block, and keys; None: `block_size`.
    """
    time = q.shape[3]
    block = block or block_size(time)
    fill = -time % block
    if fill:
        q, k, v = (filled(x, x.ndim - 2, fill) for x in (q, k, v))
        positions, visible_until = (filled(x, 1, fill) for x in (positions, visible_until))
    mixed = _attend(q, k, v, positions, visible_until, window, softcap, block)
    return mixed[:, :time] if fill else mixed


def _blocks(x: jax.Array, axis: int, block: int) -> jax.Array:
    """[…, time, …] → [blocks, …, block, …]."""
    shape = (*x.shape[:axis], x.shape[axis] // block, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _seen(
    i: jax.Array, j: jax.Array, positions: jax.Array, until: jax.Array, window: jax.Array | None
) -> jax.Array:
    """Compute which queries of block i see which keys of block j, bool [B, 1, 1, t, s]."""
    block = until.shape[-1]
    query, key = (n * block + jnp.arange(block) for n in (i, j))
    seen = seen_pairs(
        query[:, None], key, until[j][:, None], positions[i][:, :, None], positions[j][:, None], window
    )
    return seen[:, None, None]


def _logits(q: jax.Array, k: jax.Array, softcap: float | None) -> tuple[jax.Array, jax.Array | None]:
    """Compute logits, float32 [B, K, G, t, s], after the cap, and tanh(x / cap) for the backward pass."""
    logits = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32)
    if softcap is None:
        return logits, None
    tanh = jnp.tanh(logits / softcap)
    return softcap * tanh, tanh


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    until: jax.Array,
    window: jax.Array | None,
    softcap: float | None,
    block: int,
) -> jax.Array:
    return _forward(q, k, v, positions, until, window, softcap, block)[0]


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    until: jax.Array,
    window: jax.Array | None,
    softcap: float | None,
    block: int,
) -> tuple[jax.Array, Any]:
    rows, kv_heads, groups, time, size = q.shape
    dtype = v.dtype
    q, k, v = _blocks(q, 3, block), _blocks(k, 2, block), _blocks(v, 2, block)
    # A block is visited for all rows, if any of them sees it.
    order, counts = visits(visible_blocks(positions, until, window, Blocks(block, block)).any(0))
    positions, until = _blocks(positions, 1, block), _blocks(until, 1, block)
    heads = (rows, kv_heads, groups, block)

    def one(_: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, Any]:
        i, queries = xs

        def visit(n: jax.Array, so_far: Any) -> Any:
            top, total, mixed = so_far
            j = order[i, n]
            logits = jnp.where(
                _seen(i, j, positions, until, window), _logits(queries, k[j], softcap)[0], MASKED
            )
            above = jnp.maximum(top, logits.max(-1))
            weights, shrink = jnp.exp(logits - above[..., None]), jnp.exp(top - above)
            more = jnp.einsum(
                "bkgts,bksh->bkgth", weights.astype(dtype), v[j], preferred_element_type=jnp.float32
            )
            return above, shrink * total + weights.sum(-1), shrink[..., None] * mixed + more

        start = jnp.full(heads, LOWEST), jnp.zeros(heads), jnp.zeros((*heads, size))
        top, total, mixed = lax.fori_loop(0, counts[i], visit, start)
        total = jnp.where(total > 0, total, 1.0)
        return None, ((mixed / total[..., None]).astype(dtype), top + jnp.log(total))

    _, (mixed, normalizers) = lax.scan(one, None, (jnp.arange(time // block), q))
    residuals = (q, k, v, positions, until, window, mixed, normalizers, order, counts)
    # [blocks, B, K, G, block, h] → [B, time, K·G·h]
    return mixed.transpose(1, 0, 4, 2, 3, 5).reshape(rows, time, kv_heads * groups * size), residuals


def _backward(softcap: float | None, block: int, residuals: Any, cotangent: jax.Array) -> Any:
    q, k, v, positions, until, window, mixed, normalizers, order, counts = residuals
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
            logits, tanh = _logits(queries, k[j], softcap)
            logits = jnp.where(_seen(i, j, positions, until, window), logits, MASKED)
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

    none = jnp.zeros((count, rows, kv_heads, size, block))
    (d_k, d_v), d_q = lax.scan(one, (none, none), (jnp.arange(count), q, d_mixed, normalizers, shared))
    d_q = jnp.moveaxis(d_q, 0, 3).reshape(rows, kv_heads, groups, count * block, size)
    # [blocks, B, K, h, block] → [B, K, time, h]
    d_k, d_v = (
        x.transpose(1, 2, 0, 4, 3).reshape(rows, kv_heads, -1, size).astype(k.dtype) for x in (d_k, d_v)
    )
    return d_q, d_k, d_v, None, None, None


_attend.defvjp(_forward, _backward)
