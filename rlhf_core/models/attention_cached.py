"""Attention of the newest tokens of each row over a KV cache. Axes as in `rlhf_core.models.attention`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlhf_core.contracts import ATTENTION, AttentionPart
from rlhf_core.models.attention import MASKED, attend_seen, capped, sinks_share, weighted, with_sinks
from rlhf_core.models.kernels import find_kernels
from rlhf_core.runtime.machine import device_count, platform


def attend_cached(
    q: jax.Array,
    keys: Any,
    values: Any,
    seen: jax.Array,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    *,
    in_order: bool = False,
) -> jax.Array:
    """Compute attention of the newest tokens of each row over a cache that holds them.

    q: [B, K, G, T, h], already scaled; keys: [B, K, h, S]; values: [B, K, S, h], or tuples of the `cache_parts` of
    both; seen: bool [B, T, S], the entries that each token sees; softcap and sinks as in `attend`. in_order: whether
    tokens are in the entries of their positions, so that the last ones may be empty. Returns [B, T, K·G·h] in the
    values' dtype.
    """
    if isinstance(keys, tuple):
        return _attend_parts(q, keys, values, seen, softcap, sinks)
    sizes = cache_parts(seen.shape[2]) if in_order else ()
    if len(sizes) < 2:
        return attend_seen(q, keys, values, seen, softcap, sinks, order="bkhs")
    return _attend_parts(q, cut(keys, sizes, 3), cut(values, sizes, 2), seen, softcap, sinks)


CACHE_PART = 128
"""Entries of the first part of a cache, and of the blocks in which a long part is read."""
WHOLE_PART = 256
"""The most entries of a part that is read whole."""


def cache_parts(length: int) -> tuple[int, ...]:
    """Choose how a cache is cut along time whose tokens are in the entries of their positions.

    On a CPU attention reads whole arrays, and copies what it reads of one: the first parts are short, the next is read
    in blocks of `CACHE_PART`, and what is left of a block is the last.
    """
    if platform() != "cpu":
        return (length,)
    sizes = [min(CACHE_PART, length)]
    while (done := sum(sizes)) < length and done <= WHOLE_PART:
        sizes.append(min(done, length - done))
    long = length - sum(sizes)
    tail = long % CACHE_PART
    return (*sizes, *(size for size in (long - tail, tail) if size))


def cut(x: jax.Array, sizes: Sequence[int], axis: int) -> tuple[jax.Array, ...]:
    """Cut an array into parts along an axis."""
    ends = itertools.accumulate(sizes)
    return tuple(
        lax.slice_in_dim(x, end - size, end, axis=axis) for end, size in zip(ends, sizes, strict=True)
    )


def _attend_parts(
    q: jax.Array,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    seen: jax.Array,
    softcap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """Do what `attend_cached` does, but read no part of which no token sees anything: a token has the same bits with
    and without such a part.
    """

    def add(
        k: jax.Array, v: jax.Array, visible: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> Any:
        mixed, highest, total = carry
        logits = jnp.einsum("bkgth,bkhs->bkgts", q, k, preferred_element_type=jnp.float32)
        visible = visible[:, None, None]
        logits = jnp.where(visible, capped(logits, softcap), MASKED)
        new = jnp.maximum(highest, logits.max(-1, keepdims=True))
        weights = jnp.where(visible, jnp.exp(logits - new), 0.0)
        scale = jnp.exp(highest - new)
        mixed = mixed * scale + weighted(weights, v, "bkgts,bksh->bkgth")
        return mixed, new, total * scale + weights.sum(-1, keepdims=True)

    def add_block(k: jax.Array, v: jax.Array, visible: jax.Array, number: jax.Array, carry: Any) -> Any:
        def block(x: jax.Array, axis: int) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, number * CACHE_PART, CACHE_PART, axis)

        return add(block(k, 3), block(v, 2), block(visible, 2), carry)

    shape = (*q.shape[:4], 1)
    highest = (
        jnp.full(shape, MASKED, jnp.float32)
        if sinks is None
        else jnp.broadcast_to(sinks[..., None, None], shape).astype(jnp.float32)
    )
    carry = (
        jnp.zeros(q.shape, jnp.float32),
        highest,
        jnp.full(shape, 0.0 if sinks is None else 1.0, jnp.float32),
    )
    sizes = [each.shape[3] for each in keys]
    for k, v, part in zip(keys, values, cut(seen, sizes, 2), strict=True):
        if part.shape[2] > WHOLE_PART:
            carry = lax.fori_loop(0, _blocks(part), functools.partial(add_block, k, v, part), carry)
        else:
            some = functools.partial(add, k, v, part)
            carry = lax.cond(part.any(), some, lambda carry: carry, carry)
    mixed, _, total = carry
    mixed = (mixed / jnp.where(total > 0, total, 1.0)).astype(values[0].dtype)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(q.shape[0], q.shape[3], -1)


def _blocks(seen: jax.Array) -> jax.Array:
    """Count the blocks of a long part, bool [B, T, S], up to the last of which any token sees something."""
    used = seen.reshape(-1, seen.shape[2] // CACHE_PART, CACHE_PART).any((0, 2))
    return jnp.where(used, jnp.arange(1, len(used) + 1, dtype=jnp.int32), 0).max()


def visible_kernel() -> Callable[..., AttentionPart | None] | None:
    """Find the kernel that reads only the visible entries of a cache, `over_cache` of `AttentionOver`; None where there
    is none, and where arrays do not lie on one device each: under a mesh they do within `jax.shard_map` over all axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    is_local = bool(mesh.manual_axes) and set(mesh.manual_axes) == set(mesh.axis_names)
    if not is_local and device_count() > 1:
        return None
    return getattr(find_kernels(ATTENTION), "over_cache", None)


def attend_groups(
    q: jax.Array,
    prompts: tuple[jax.Array, jax.Array, jax.Array],
    own: tuple[jax.Array, jax.Array, jax.Array],
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute `attend_cached` for a token of each of B = P · G rows; G in a row share a cache besides their own.

    q: [B, K, R, h], already scaled. prompts: keys [P, K, h, S], values [P, K, S, h], visible, bool [P, 1 or G, S]; own:
    the same of the B rows, [B, K, h, T], [B, K, T, h] and bool [T], one run of entries that all rows see alike. One
    softmax covers both. A shared cache is read once per group, whose queries are the rows of one product; of the rows'
    own, a kernel reads what is visible, where `visible_kernel` finds one and it suits them.
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
    written = None
    reader = visible_kernel()
    if reader is not None:
        first = visible.argmax()
        written = reader(q, keys, values, first, first + visible.sum(), softcap)
    if written is not None:
        highest = with_sinks(jnp.maximum(by_row(shared.max(-1)), written.highest), sinks)
        shared = jnp.exp(shared - by_prompt(highest)[..., None])
        scale = jnp.exp(written.highest - highest)
        total = by_row(shared.sum(-1)) + written.total * scale + sinks_share(sinks, highest)
        mixed = by_row(weighted(shared, read_values, "pkgrs,pksh->pkgrh"))
        mixed += written.mixed * scale[..., None]
        return (mixed / total[..., None]).astype(values.dtype).reshape(rows, -1)
    alone = jnp.einsum("bkrh,bkht->bkrt", q, keys, preferred_element_type=jnp.float32)
    alone = jnp.where(visible, capped(alone, softcap), MASKED)
    highest = with_sinks(jnp.maximum(by_row(shared.max(-1)), alone.max(-1)), sinks)
    shared = jnp.exp(shared - by_prompt(highest)[..., None])
    alone = jnp.exp(alone - highest[..., None])
    total = by_row(shared.sum(-1)) + alone.sum(-1) + sinks_share(sinks, highest)
    mixed = by_row(weighted(shared, read_values, "pkgrs,pksh->pkgrh"))
    mixed += weighted(alone, values, "bkrt,bkth->bkrh")
    return (mixed / total[..., None]).astype(values.dtype).reshape(rows, -1)
