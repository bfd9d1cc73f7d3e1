"""The teacher's most likely ids, with their log-probabilities and that of all other ids together."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_distill.blocks import Cap, Gradients, Normalizer, capped, cut, d_uncapped, fold, gathered


def teacher_ids(hidden: jax.Array, kernel: jax.Array, cap: Cap, size: int, count: int) -> jax.Array:
    """Find the `count` ids with the largest logits, int32 [N, count]; the lower of two equals.

    hidden: [N, D]; kernel: [D, parts, ids], from `in_parts`; size: ids of a block of each part.
    """

    kernel = gathered(kernel, hidden.dtype)

    def one(best: tuple[jax.Array, jax.Array], first: Any, ids: int) -> tuple[jax.Array, jax.Array]:
        logits, _ = capped(hidden, cut(kernel, first, ids), cap)
        numbers = jnp.arange(kernel.shape[1])[:, None] * kernel.shape[2] + first + jnp.arange(ids)
        values = jnp.concatenate([best[0], logits.reshape(len(hidden), -1)], axis=1)
        numbers = jnp.broadcast_to(numbers.reshape(-1), (len(hidden), numbers.size))
        numbers = jnp.concatenate([best[1], numbers.astype(jnp.int32)], axis=1)
        values, places = jax.lax.top_k(values, count)
        return values, jnp.take_along_axis(numbers, places, axis=1)

    start = jnp.full((len(hidden), count), -jnp.inf), jnp.full((len(hidden), count), -1, jnp.int32)
    return fold(kernel.shape[2], size, one, start)[1]


def select(hidden: jax.Array, kernel: jax.Array, ids: jax.Array, cap: Cap, size: int) -> jax.Array:
    """Compute log-probabilities of the chosen ids, and of all others together, float32 [N, count + 1].

    The last is −inf where there are no others. It is summed over the others themselves: 1 less the sum over the chosen
    would be rounding where these have nearly all.
    """
    chosen, rest = _chosen_and_rest(hidden, kernel, ids, cap, size)
    logits = jnp.concatenate([chosen, rest[:, None]], axis=1)
    return logits - jax.nn.logsumexp(logits, axis=1, keepdims=True)


class _Placed(NamedTuple):
    """Logits of a block, float32 [N, parts × ids], where the chosen ids lie among them, and `capped`'s tanh."""

    logits: jax.Array
    places: jax.Array
    """int32 [N, count]; beyond the last for ids of other blocks."""
    tanh: jax.Array | None

    def others(self) -> jax.Array:
        """Return the logits with −inf for the chosen ids."""
        return self.put(self.logits, -jnp.inf)

    def put(self, x: jax.Array, values: Any) -> jax.Array:
        """Set the chosen ids of [N, parts × ids] to values, [N, count] or a number."""
        return x.at[jnp.arange(len(x))[:, None], self.places].set(values, mode="drop")


def _block(
    hidden: jax.Array, kernel: jax.Array, chosen: jax.Array, cap: Cap, first: Any, ids: int
) -> _Placed:
    logits, tanh = capped(hidden, cut(kernel, first, ids), cap)
    part, place = jnp.divmod(chosen, kernel.shape[2])
    place = place - first
    here = (chosen >= 0) & (place >= 0) & (place < ids)
    beyond = kernel.shape[1] * ids
    return _Placed(logits.reshape(len(hidden), -1), jnp.where(here, part * ids + place, beyond), tanh)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _chosen_and_rest(
    hidden: jax.Array, kernel: jax.Array, ids: jax.Array, cap: Cap, size: int
) -> tuple[jax.Array, jax.Array]:
    """Compute the logits of the ids, float32 [N, count], and log Σ exp(l) over all others, float32 [N]."""

    kernel = gathered(kernel, hidden.dtype)

    def one(carry: tuple[jax.Array, Normalizer], first: Any, count: int) -> tuple[jax.Array, Normalizer]:
        block = _block(hidden, kernel, ids, cap, first, count)
        here = block.places < block.logits.shape[1]
        values = jnp.take_along_axis(block.logits, jnp.where(here, block.places, 0), axis=1)
        return jnp.where(here, values, carry[0]), carry[1].add(block.others().reshape(len(hidden), -1, count))

    start = jnp.full(ids.shape, -jnp.inf), Normalizer.empty(len(hidden), kernel.shape[1])
    chosen, rest = fold(kernel.shape[2], size, one, start)
    return chosen, rest.log()


def _forward(
    hidden: jax.Array, kernel: jax.Array, ids: jax.Array, cap: Cap, size: int
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    chosen, rest = _chosen_and_rest(hidden, kernel, ids, cap, size)
    return (chosen, rest), (hidden, kernel, ids, rest)


def _backward(cap: Cap, size: int, residuals: Any, cotangents: Any) -> tuple[jax.Array | None, ...]:
    hidden, given, ids, rest = residuals
    kernel, (d_chosen, d_rest) = gathered(given, hidden.dtype), cotangents

    def one(gradients: Gradients, first: Any, count: int) -> Gradients:
        block = _block(hidden, kernel, ids, cap, first, count)
        others = block.others()
        share = jnp.exp(others - jnp.where(jnp.isneginf(rest), 0.0, rest)[:, None])
        d_logits = block.put(d_rest[:, None] * share, d_chosen)
        d_logits = d_logits.reshape(len(hidden), kernel.shape[1], count)
        weights = cut(kernel, first, count)
        return gradients.add(hidden, weights, d_uncapped(d_logits, block.tanh, cap), first)

    gradients = fold(kernel.shape[2], size, one, Gradients.empty(hidden, given))
    return *gradients.arrays(hidden), None


_chosen_and_rest.defvjp(_forward, _backward)
