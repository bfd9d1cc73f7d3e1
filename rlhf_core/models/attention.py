"""Attention over rows that hold several sequences, and of one query over a KV cache.

Heads are split as [kv head, query head of that kv head], so that keys and values are never repeated. Axes in
the einsums: b row, k kv head, g query head within it, t query, s key, h head dimension.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from rlhf_core.models.attention_decode import MASKED as MASKED
from rlhf_core.models.attention_decode import attend_visible, reads_visible


def query_block(time: int) -> int:
    """Choose how many queries are computed at once: 128, or more in long rows, so that a row has at most 16 blocks."""
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
) -> jax.Array:
    """Compute self-attention over rows; queries t with s <= t < visible_until[s] see the key at s.

    q: [B, K, G, T, h], already scaled; k, v: [B, K, T, h]; positions, visible_until: int32 [B, T].
    window: int32 scalar; a query does not see keys that many positions back or more. Positions, not indices: a branch
        is as far from its shared prompt as if it followed the prompt directly.
    softcap: logits become softcap · tanh(logits / softcap).
    Returns [B, T, K·G·h] in v's dtype; softmax is in float32. A block of queries never touches keys after it.
    """
    batch, kv_heads, groups, time, head_dim = q.shape
    block, parts = query_block(time), []
    for start in range(0, time, block):
        end = min(start + block, time)
        query, key = jnp.arange(start, end)[:, None], jnp.arange(end)[None, :]
        seen = (key <= query) & (query < visible_until[:, None, :end])  # [B, t, s]
        if window is not None:
            seen &= positions[:, start:end, None] - positions[:, None, :end] < window
        logits = jnp.einsum(
            "bkgth,bksh->bkgts", q[:, :, :, start:end], k[:, :, :end], preferred_element_type=jnp.float32
        )
        logits = capped(logits, softcap)
        parts.append(_mix(jnp.where(seen[:, None, None], logits, MASKED), v[:, :, :end], "bkgts,bksh->bkgth"))
    mixed = jnp.concatenate(parts, axis=3) if len(parts) > 1 else parts[0]
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, time, kv_heads * groups * head_dim)


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
) -> jax.Array:
    """Compute `attend` for the queries at the indices `at` alone.

    at: int32 [B, n]; q: [B, K, G, n, h]. Returns [B, n, K·G·h].
    """
    batch, kv_heads, groups, count, head_dim = q.shape
    query, key = at[:, :, None], jnp.arange(k.shape[2])
    seen = (key <= query) & (query < visible_until[:, None])  # [B, n, s]
    if window is not None:
        seen &= jnp.take_along_axis(positions, at, axis=1)[:, :, None] - positions[:, None] < window
    logits = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32)
    logits = jnp.where(seen[:, None, None], capped(logits, softcap), MASKED)
    mixed = _mix(logits, v, "bkgts,bksh->bkgth")
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, count, kv_heads * groups * head_dim)


def attend_cached(
    q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, softcap: float | None = None
) -> jax.Array:
    """Compute attention of one query per row over a cache.

    q: [B, K, G, h], already scaled; keys: [B, K, h, S]; values: [B, K, S, h]; visible: bool [B, S]; softcap as in
    `attend`. Returns [B, K·G·h] in the values' dtype.
    """
    logits = jnp.einsum("bkgh,bkhs->bkgs", q, keys, preferred_element_type=jnp.float32)
    logits = capped(logits, softcap)
    mixed = _mix(jnp.where(visible[:, None, None], logits, MASKED), values, "bkgs,bksh->bkgh")
    return mixed.reshape(q.shape[0], -1)


def attend_continued(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Compute attention of the last few tokens of each row over a cache whose entry p is the token at position p.

    q: [B, K, G, T, h], already scaled; keys: [B, K, h, S]; values: [B, K, S, h], the tokens' own included; positions:
    int32 [B, T]; window, softcap as in `attend`. Returns [B, T, K·G·h] in the values' dtype.
    """
    batch, kv_heads, groups, time, head_dim = q.shape
    age = positions[:, :, None] - jnp.arange(keys.shape[3])  # [B, T, S]
    seen = age >= 0 if window is None else (age >= 0) & (age < window)
    logits = jnp.einsum("bkgth,bkhs->bkgts", q, keys, preferred_element_type=jnp.float32)
    mixed = _mix(jnp.where(seen[:, None, None], capped(logits, softcap), MASKED), values, "bkgts,bksh->bkgth")
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, time, kv_heads * groups * head_dim)


def attend_groups(
    q: jax.Array,
    prompts: tuple[jax.Array, jax.Array, jax.Array],
    own: tuple[jax.Array, jax.Array, jax.Array],
    softcap: float | None = None,
) -> jax.Array:
    """Compute `attend_cached` for B = P · G rows, of which G in a row share a cache beside their own.

    q: [B, K, R, h], already scaled. prompts: keys [P, K, h, S], values [P, K, S, h], visible, bool [P, 1 or G, S]; own:
    the same of the B rows, [B, K, h, T], [B, K, T, h] and bool [T], one run of entries that all rows see alike. One
    softmax covers both. A shared cache is read once per group, whose queries are the rows of one product; of the rows'
    own, a kernel reads what is visible, where `reads_visible`.
    """
    (read_keys, read_values, read), (keys, values, visible) = prompts, own
    rows, kv_heads, repeats, _ = q.shape
    grouped = (len(read_keys), -1, kv_heads, repeats)

    def by_prompt(x: jax.Array) -> jax.Array:
        """[B, K, R, …] → [P, K, G, R, …]."""
        return x.reshape(*grouped, *x.shape[3:]).swapaxes(1, 2)

    def by_row(x: jax.Array) -> jax.Array:
        return x.swapaxes(1, 2).reshape(rows, kv_heads, repeats, *x.shape[4:])

    shared = jnp.einsum("pkgrh,pkhs->pkgrs", by_prompt(q), read_keys, preferred_element_type=jnp.float32)
    shared = jnp.where(read[:, None, :, None], capped(shared, softcap), MASKED)
    if reads_visible(keys):
        first = visible.argmax()
        written = attend_visible(q, keys, values, first, first + visible.sum(), softcap)
        highest = jnp.maximum(by_row(shared.max(-1)), written.highest)
        shared, scale = jnp.exp(shared - by_prompt(highest)[..., None]), jnp.exp(written.highest - highest)
        total = by_row(shared.sum(-1)) + written.total * scale
        mixed = by_row(_weighted(shared, read_values, "pkgrs,pksh->pkgrh"))
        mixed += written.mixed * scale[..., None]
        return (mixed / total[..., None]).astype(values.dtype).reshape(rows, -1)
    alone = jnp.einsum("bkrh,bkht->bkrt", q, keys, preferred_element_type=jnp.float32)
    alone = jnp.where(visible, capped(alone, softcap), MASKED)
    highest = jnp.maximum(by_row(shared.max(-1)), alone.max(-1))
    shared = jnp.exp(shared - by_prompt(highest)[..., None])
    alone = jnp.exp(alone - highest[..., None])
    total = by_row(shared.sum(-1)) + alone.sum(-1)
    mixed = by_row(_weighted(shared, read_values, "pkgrs,pksh->pkgrh"))
    mixed += _weighted(alone, values, "bkrt,bkth->bkrh")
    return (mixed / total[..., None]).astype(values.dtype).reshape(rows, -1)


def capped(logits: jax.Array, softcap: float | None) -> jax.Array:
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _mix(logits: jax.Array, values: jax.Array, spec: str) -> jax.Array:
    """Compute softmax(logits) · values; dividing by the sum at the end saves a pass over the largest array."""
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    total = weights.sum(-1, keepdims=True)
    return (_weighted(weights, values, spec) / total).astype(values.dtype)


def _weighted(weights: jax.Array, values: jax.Array, spec: str) -> jax.Array:
    return jnp.einsum(spec, weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
