"""Filters of the next token's distribution, and a sample from it.

All but the repetition penalty work on masses, float32 [B, V]: probabilities up to a factor per row. A token with mass 0
is never sampled. Masses need not sum to 1, so that a filter is one comparison and nothing is normalised twice.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from rlhf_core.sampling import SamplingOptions


def filtered(mass: jax.Array, options: SamplingOptions) -> jax.Array:
    """Set the masses [..., V] of tokens to 0 that the filters of the options do not allow, in the sampler's order."""
    if options.top_k is not None:
        mass = top_k_filter(mass, options.top_k)
    if options.top_p < 1:
        mass = top_p_filter(mass, options.top_p)
    if options.min_p:
        mass = min_p_filter(mass, options.min_p)
    return mass


def repetition_penalty(logits: jax.Array, seen: jax.Array, penalty: float) -> jax.Array:
    """Divide the logits [B, V] of tokens in `seen`, bool [B, V], by `penalty` where positive; else multiply them by it
    (Keskar et al. 2019).
    """
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def top_k_filter(mass: jax.Array, k: int) -> jax.Array:
    """Keep the `k` likeliest tokens, and those exactly as likely as the last of them."""
    largest, _ = lax.top_k(mass, min(k, mass.shape[-1]))
    # `min` and not the last column: XLA on a CPU turns a slice of top_k into a sort of the whole vocabulary.
    return jnp.where(mass >= largest.min(-1, keepdims=True), mass, 0.0)


def top_p_filter(mass: jax.Array, p: float | jax.Array) -> jax.Array:
    """Keep the likeliest tokens until their share of the mass reaches `p` in (0, 1), a number or float32 [B, 1]
    (Holtzman et al. 2020).

    A token stays if the tokens strictly likelier than it hold less than `p`.
    """
    return _keep_likeliest(mass, mass, p * mass.sum(-1, keepdims=True))


def top_k_rows_filter(mass: jax.Array, k: jax.Array) -> jax.Array:
    """Do what `top_k_filter` does with a `k` for each row, int32 [B, 1]."""
    return _keep_likeliest(mass, jnp.ones_like(mass), k.astype(mass.dtype))


def _keep_likeliest(mass: jax.Array, weight: jax.Array, limit: jax.Array) -> jax.Array:
    """Keep the tokens of which the strictly likelier ones have together less than `limit`, [B, 1], of `weight`, [B, V].

    Nothing is sorted: non-negative floats have the order of their bits, so 31 halvings find the exact threshold.
    """
    bits = lax.bitcast_convert_type(mass, jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        cut, stays = bounds
        middle = cut + (stays - cut) // 2
        likelier = jnp.where(bits > middle, weight, 0.0).sum(-1, keepdims=True)
        return jnp.where(likelier < limit, cut, middle), jnp.where(likelier < limit, middle, stays)

    none = jnp.full(limit.shape, -1, jnp.int32)
    cut, _ = lax.fori_loop(0, 31, halve, (none, bits.max(-1, keepdims=True)))
    return jnp.where(bits > cut, mass, 0.0)


def min_p_filter(mass: jax.Array, p: float | jax.Array) -> jax.Array:
    """Keep the tokens at least `p` times as likely as the likeliest (Nguyen et al. 2024)."""
    return jnp.where(mass >= p * mass.max(-1, keepdims=True), mass, 0.0)


def sample_token(mass: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Sample one token per row by inverting the cumulative distribution, int32 [B].

    uniforms: float32 [B, 2] in [0, 1). The first chooses a block of about sqrt(V) neighbours, the second a token within
    it: two short cumulative sums instead of V random numbers, at full resolution.
    """
    rows, vocab = mass.shape
    size = math.isqrt(vocab - 1) + 1
    blocks = -(-vocab // size)
    grid = jnp.pad(mass, ((0, 0), (0, blocks * size - vocab))).reshape(rows, blocks, size)
    block = _invert(grid.sum(-1), uniforms[:, 0])
    inside = jnp.take_along_axis(grid, block[:, None, None], axis=1)[:, 0]
    return block * size + _invert(inside, uniforms[:, 1])


def _invert(mass: jax.Array, uniform: jax.Array) -> jax.Array:
    """Find the first index where the cumulative sum of mass [B, n] exceeds the share `uniform` [B] of its total."""
    cumulative = jnp.cumsum(mass, axis=-1)
    index = jnp.arange(mass.shape[-1], dtype=jnp.int32)
    possible = mass > 0  # a rounded sum may exceed the threshold at an index without mass
    passed = possible & (cumulative > (uniform * cumulative[:, -1])[:, None])
    first = jnp.where(passed, index, mass.shape[-1]).min(-1)
    # Or no sum exceeds it: then take the last index with mass.
    return jnp.minimum(first, jnp.where(possible, index, 0).max(-1))
