"""Rotary position embeddings."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlhf_core.models.config import Rope
from rlhf_core.runtime.machine import device_count


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Compute radians per position of each pair of rotated dimensions, float32 [int(share · head_dim) / 2]; where the
    others lie between them, of every pair, [head_dim / 2].
    """
    size = head_dim if rope.kind == "proportional" else int(head_dim * rope.share)
    frequency = rope.theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_length * frequency / (2 * math.pi)  # full turns within the original context
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequency = keep * frequency + (1 - keep) * frequency / rope.factor
    elif rope.kind == "yarn":
        keep = 1 - _yarn_ramp(rope, size)
        frequency = keep * frequency + (1 - keep) * frequency / rope.factor
    elif rope.kind == "longrope":
        frequency = frequency / np.asarray(rope.divisors)
    elif rope.kind == "proportional":
        frequency = frequency / rope.factor
        frequency[int(rope.share * head_dim // 2) :] = 0
    elif rope.kind == "none":
        frequency = np.zeros_like(frequency)
    return frequency.astype(np.float32)


def _yarn_ramp(rope: Rope, size: int) -> np.ndarray:
    """Ramp from 0, for pairs with `beta_fast` turns or more in the original context, to 1, for `beta_slow` or fewer."""

    def pair(turns: float) -> float:  # index of the pair with so many turns
        return size * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low = max(low, 0)
    high = min(high, size - 1)
    width = high - low if high != low else 0.001
    ramp: np.ndarray = np.clip((np.arange(size // 2) - low) / width, 0.0, 1.0)
    return ramp


def rotation(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, ...]:
    """Compute cosine and sine of each position's angles, times the magnitude, float32 [*positions.shape, pairs], and,
    where `rope.growth` is not 0, the factor of the queries, float32 [*positions.shape, 1].
    """
    angle = positions[..., None].astype(jnp.float32) * frequencies(rope, head_dim)
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    if rope.magnitude != 1:
        cosine, sine = cosine * rope.magnitude, sine * rope.magnitude
    if not rope.growth:
        return cosine, sine
    passed = jnp.floor_divide(positions, rope.original_length).astype(jnp.float32)
    return cosine, sine, (1 + rope.growth * jnp.log1p(passed))[..., None]


def shared_rotation(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, ...]:
    """Compute `rotation` once for all layers.

    XLA on CPU fuses the cosines into every pass that rotates queries or keys, and recomputes them in each; it drops
    barriers. A branch that is always taken, but not known to be at compile time, keeps the result.
    """
    compute = functools.partial(rotation, rope, head_dim)
    if device_count() > 1:  # the branch would be decided across devices
        return compute(positions)

    def in_branch(positions: jax.Array) -> tuple[jax.Array, ...]:
        return lax.cond(positions.max() >= 0, compute, lambda x: compute(jnp.zeros_like(x)), positions)

    return lax.platform_dependent(positions, cpu=in_branch, default=compute)


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Apply RoPE (Su et al. 2021) to [..., head_dim]; the halves of the rotated part are the two coordinates."""
    size = 2 * cosine.shape[-1]
    wide = x.astype(jnp.float32)
    first, second = jnp.split(wide[..., :size], 2, axis=-1)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    rest = [wide[..., size:]] if size < x.shape[-1] else []
    return jnp.concatenate([*rotated, *rest], axis=-1).astype(x.dtype)
