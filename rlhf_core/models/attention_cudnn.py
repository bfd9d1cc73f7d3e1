"""Attention by cuDNN's fused kernel, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from rlhf_core.errors import InputError


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
        problems.append(f"it takes heads of at most 128 dimensions that 8 divides, not {size}")
    if problems:
        raise InputError(*(f"attention 'cudnn': {line}" for line in problems))
    at = jnp.arange(time)
    seen = (at <= at[:, None]) & (at[:, None] < visible_until[:, None, :])  # [B, t, s]
    if window is not None:
        seen &= positions[:, :, None] - positions[:, None, :] < window
    queries = q.transpose(0, 3, 1, 2, 4).reshape(batch, time, kv_heads * groups, size)
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    mixed = jax.nn.dot_product_attention(
        queries, keys, values, mask=seen[:, None], scale=1.0, implementation=implementation
    )
    return mixed.reshape(batch, time, kv_heads * groups * size)
