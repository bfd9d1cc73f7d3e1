"""Logits of some tokens over part of the vocabulary, shared by both ways to compute log-probabilities."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Settings(NamedTuple):
    """Static settings of a compiled program, from the options of `rlhf_core.logprobs.token_logps`."""

    temperature: float
    softcap: float | None
    size: int
    """Tokens of a chunk, or words of a block."""
    entropy: bool
    absent: tuple[tuple[int, int], ...] = ()


NEVER = -1e30
"""The logit of an id without a token: finite, because it is multiplied by zeros, which must stay 0."""


def without(logits: jax.Array, absent: tuple[tuple[int, int], ...], words: int, first: Any = 0) -> jax.Array:
    """Give ids without a token no probability: set their logits, float32 [..., n], to NEVER.

    absent: ranges (first, one after the last) of these ids. words: the whole vocabulary. first: the first logit's id.
    """
    if not absent:
        return logits
    absent_ids = np.zeros(words, np.bool_)
    for start, stop in absent:
        absent_ids[start:stop] = True
    here = jnp.asarray(absent_ids)
    if logits.shape[-1] < words:
        here = lax.dynamic_slice_in_dim(here, first, logits.shape[-1])
    return jnp.where(here, NEVER, logits)


def unembed(hidden: jax.Array, kernel: jax.Array | None, softcap: float | None = None) -> jax.Array:
    """Compute logits, float32 [..., V], of hidden states [..., D], as `token_logps` does at temperature 1.

    kernel: None where `hidden` are logits.
    """
    if kernel is None:
        return hidden.astype(jnp.float32)
    kernel = kernel.astype(hidden.dtype)
    logits = jnp.einsum("...d,dv->...v", hidden, kernel, preferred_element_type=jnp.float32)
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def capped(
    hidden: jax.Array, kernel: jax.Array, settings: Settings, words: int, first: Any = 0
) -> tuple[jax.Array, jax.Array | None]:
    """Compute logits, float32 [..., V], after cap and temperature, and tanh(x / softcap) for the backward pass.

    words, first: the size of the whole vocabulary, and the first id of the kernel's.
    """
    logits, tanh = unembed(hidden, kernel), None
    if settings.softcap is None:
        logits = logits / settings.temperature
    else:
        tanh = jnp.tanh(logits / settings.softcap)
        logits = tanh * (settings.softcap / settings.temperature)
    return without(logits, settings.absent, words, first), tanh


def d_uncapped(
    logits: jax.Array,
    tanh: jax.Array | None,
    is_target: jax.Array,
    normalizers: jax.Array,
    entropies: jax.Array,
    d_logps: jax.Array,
    d_entropies: jax.Array,
    settings: Settings,
) -> jax.Array:
    """Compute the cotangent of hidden · kernel, float32 in the logits' shape, from the results' cotangents.

    logits, tanh: from `capped`. All others broadcast to them: normalizers are log Σ exp logits over the whole
    vocabulary; entropies come from the forward pass.
    """
    log_p = logits - normalizers
    p = jnp.exp(log_p)
    d_logits = jnp.where(is_target, d_logps, 0.0) - d_logps * p
    if settings.entropy:
        d_logits -= d_entropies * p * (log_p + entropies)
    if tanh is not None:
        d_logits *= 1.0 - jnp.square(tanh)
    return d_logits / settings.temperature
