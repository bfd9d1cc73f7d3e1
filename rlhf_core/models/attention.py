"""Rotary positions, and attention over rows that hold several sequences.

Heads are split as [kv head, query head of that kv head], so that keys and values are never repeated. Axes in
the einsums: b row, k kv head, g query head within it, t query, s key, h head dimension.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.models.config import Rope

MASKED = -1e30
"""Logit of a key that is not seen. Finite: a query that sees no key gets the mean of the values, not NaN."""


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians per position of each pair of dimensions, float32 [head_dim / 2]."""
    frequency = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_length * frequency / (2 * math.pi)  # full turns within the original context
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequency = keep * frequency + (1 - keep) * frequency / rope.factor
    return frequency.astype(np.float32)


def rotation(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of each position's angles, float32 [*positions.shape, head_dim / 2]."""
    angle = positions[..., None].astype(jnp.float32) * frequencies(rope, head_dim)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """RoPE (Su et al. 2021) on [..., head_dim], the halves of a head as the two coordinates; dtype kept."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def query_block(time: int) -> int:
    """How many queries are taken at once: 128, more in long rows, so that a row is at most 16 blocks."""
    return 128 * max(1, math.ceil(time / (16 * 128)))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    visible_until: jax.Array,
    *,
    window: jax.Array | None = None,
) -> jax.Array:
    """Attention of a row with itself; the key at s is seen by the queries s <= t < visible_until[s].

    q: [B, K, G, T, h], already scaled; k, v: [B, K, T, h]; positions, visible_until: int32 [B, T].
    window: int32 scalar; a key at least that many positions before the query is not seen.
    Returns [B, T, K·G·h] in v's dtype. Softmax in float32. A block of queries never touches keys after it.
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
        parts.append(_mix(jnp.where(seen[:, None, None], logits, MASKED), v[:, :, :end], "bkgts,bksh->bkgth"))
    mixed = jnp.concatenate(parts, axis=3) if len(parts) > 1 else parts[0]
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, time, kv_heads * groups * head_dim)


def attend_cached(q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array) -> jax.Array:
    """Attention of one query a row with a cache.

    q: [B, K, G, h], already scaled; keys: [B, K, h, S]; values: [B, K, S, h]; visible: bool [B, S].
    Returns [B, K·G·h] in the values' dtype.
    """
    logits = jnp.einsum("bkgh,bkhs->bkgs", q, keys, preferred_element_type=jnp.float32)
    mixed = _mix(jnp.where(visible[:, None, None], logits, MASKED), values, "bkgs,bksh->bkgh")
    return mixed.reshape(q.shape[0], -1)


def _mix(logits: jax.Array, values: jax.Array, spec: str) -> jax.Array:
    """softmax(logits) · values, divided by the sum at the end: one pass less over the largest array."""
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    total = weights.sum(-1, keepdims=True)
    mixed = jnp.einsum(spec, weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return (mixed / total).astype(values.dtype)
