"""Log-probabilities by blocks of the vocabulary, each for all tokens, on a device that has the whole kernel.

A pass reads the kernel once and writes every part of its gradient once, while chunks of tokens would read and write the
whole gradient once per chunk. Blocks carry a few numbers per token to the next one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlhf_core.logprobs.logits import Settings, capped, d_uncapped


class _Seen(NamedTuple):
    """Sums over the blocks so far, float32 [N]; logits l are relative to the largest one, m."""

    top: jax.Array
    """m."""
    total: jax.Array
    """Σ exp(l - m)."""
    mixed: jax.Array
    """Σ exp(l - m) (l - m); zeros without entropy."""
    chosen: jax.Array
    """The target's logit, from its block on."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def over_vocabulary(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, settings: Settings
) -> tuple[jax.Array, jax.Array]:
    results, _ = _forward(hidden, kernel, targets, settings)
    return results


def _blocks(words: int, size: int, one: Callable[[Any, Any, int], Any], start: Any) -> Any:
    """Fold `one(carry, first word, words)` over the blocks; the last one may be smaller."""
    whole = words // size
    done = start
    if whole == 1:
        done = one(done, 0, size)
    elif whole:
        done = lax.fori_loop(0, whole, lambda i, carry: one(carry, i * size, size), done)
    return one(done, whole * size, words % size) if words % size else done


def _forward(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, settings: Settings
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    states, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)

    def one(seen: _Seen, first: Any, words: int) -> _Seen:
        weights = lax.dynamic_slice_in_dim(kernel, first, words, axis=1)
        logits, _ = capped(states, weights, settings, kernel.shape[1], first)
        top = jnp.maximum(seen.top, logits.max(-1))
        less = jnp.exp(seen.top - top)
        relative = logits - top[:, None]
        exp = jnp.exp(relative)
        mixed = seen.mixed
        if settings.entropy:
            mixed = (seen.mixed + seen.total * (seen.top - top)) * less + (exp * relative).sum(-1)
        at = wanted - first
        here = jnp.take_along_axis(logits, jnp.clip(at, 0, words - 1)[:, None], axis=1)[:, 0]
        chosen = jnp.where((at >= 0) & (at < words), here, seen.chosen)
        return _Seen(top, seen.total * less + exp.sum(-1), mixed, chosen)

    nothing = jnp.zeros(wanted.shape, jnp.float32)
    # Far below every logit, but finite: it is multiplied by zeros, which must stay 0.
    lowest = jnp.full(wanted.shape, jnp.finfo(jnp.float32).min / 4, jnp.float32)
    seen = _blocks(kernel.shape[1], settings.size, one, _Seen(lowest, nothing, nothing, nothing))
    used, log_total = wanted >= 0, jnp.log(seen.total)
    # Relative to the largest logit, so that large logits do not cancel.
    logps = jnp.where(used, seen.chosen - seen.top - log_total, 0.0)
    entropies = jnp.where(used, log_total - seen.mixed / seen.total, 0.0) if settings.entropy else nothing
    logps, entropies, normalizers = (
        x.reshape(targets.shape) for x in (logps, entropies, seen.top + log_total)
    )
    return (logps, entropies), (hidden, kernel, targets, normalizers, entropies)


def _backward(settings: Settings, residuals: Any, cotangents: Any) -> tuple[jax.Array, jax.Array, Any]:
    hidden, kernel, targets, normalizers, entropies = residuals
    states, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1, 1)
    normalizer, entropy = (x.reshape(-1, 1) for x in (normalizers, entropies))
    d_logp, d_entropy = (jnp.where(wanted >= 0, d.reshape(-1, 1), 0.0) for d in cotangents)

    def one(carry: tuple[jax.Array, jax.Array], first: Any, words: int) -> tuple[jax.Array, jax.Array]:
        d_states, d_kernel = carry
        weights = lax.dynamic_slice_in_dim(kernel, first, words, axis=1).astype(hidden.dtype)
        logits, tanh = capped(states, weights, settings, kernel.shape[1], first)
        is_target = first + jnp.arange(words, dtype=jnp.int32) == wanted
        d_logits = d_uncapped(
            logits, tanh, is_target, normalizer, entropy, d_logp, d_entropy, settings
        ).astype(hidden.dtype)
        d_states += jnp.einsum("nv,dv->nd", d_logits, weights, preferred_element_type=jnp.float32)
        d_block = jnp.einsum("nd,nv->dv", states, d_logits, preferred_element_type=jnp.float32)
        return d_states, lax.dynamic_update_slice_in_dim(
            d_kernel, d_block.astype(kernel.dtype), first, axis=1
        )

    start = jnp.zeros(states.shape, jnp.float32), jnp.zeros(kernel.shape, kernel.dtype)
    d_states, d_kernel = _blocks(kernel.shape[1], settings.size, one, start)
    no_gradient = np.zeros(targets.shape, jax.dtypes.float0)
    return d_states.reshape(hidden.shape).astype(hidden.dtype), d_kernel, no_gradient


over_vocabulary.defvjp(_forward, _backward)
