"""Log-probabilities and entropies of tokens, without ever holding the logits of a whole batch.

`token_logps` goes from hidden states through the unembedding to one number a token. The logits exist for one
chunk of tokens at a time, in the forward and again in the backward pass; none is [rows, tokens, vocabulary].
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

CHUNK_BYTES = {"cpu": 16 * 2**20}
"""Float32 logits of one chunk, bytes a device. On a CPU a chunk is best read while in the caches."""
CHUNK_BYTES_ACCELERATOR = 512 * 2**20
"""The same where there is no entry above."""
CHUNK_TOKENS = 128
"""The fewest tokens of a chunk, a device: each chunk reads and writes the whole kernel's float32 gradient."""


class _Settings(NamedTuple):
    """What is fixed when the program is compiled."""

    temperature: float
    softcap: float | None
    chunk: int
    entropy: bool


def token_logps(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array | np.ndarray,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    entropy: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """log p(target) and the entropy of p, where p = softmax(cap(hidden · kernel) / temperature), in nats.

    hidden: float32 or bfloat16 [rows, K, D], each the state that predicts its target.
    kernel: float32 or bfloat16 [D, V], the unembedding.
    targets: int32 [rows, K] in [0, V), or -1: that token's results are 0 and pass no gradient.
    temperature: positive. softcap: cap(x) = softcap · tanh(x / softcap); None: cap(x) = x.
    chunk: tokens of each row in memory at once; None chooses by the size of their logits.
    entropy: compute H = -Σ p log p as well.

    Returns (log-probs float32 [rows, K], entropies float32 [rows, K], zeros without `entropy`). Products are
    taken in hidden's dtype and summed in float32, and all that follows is float32. Gradients of both results
    reach hidden and kernel: with l the logits after cap and temperature and g, h the cotangents,
    dl = g (onehot - p) - h p (log p + H).

    Chunks run along K and never across rows: rows spread over a mesh stay where they are.
    Raises ValueError for shapes that do not fit and a temperature, softcap or chunk that is not positive.
    """
    if hidden.ndim != 3 or kernel.ndim != 2 or hidden.shape[-1] != kernel.shape[0]:
        raise ValueError(f"hidden [rows, K, D] and kernel [D, V] do not fit: {hidden.shape}, {kernel.shape}")
    if tuple(targets.shape) != hidden.shape[:2]:
        raise ValueError(f"targets [rows, K] do not fit hidden {hidden.shape}: {tuple(targets.shape)}")
    if temperature <= 0 or (softcap is not None and softcap <= 0) or (chunk is not None and chunk < 1):
        raise ValueError(f"temperature {temperature}, softcap {softcap} and chunk {chunk} must be positive")
    rows, length, _ = hidden.shape
    size = chunk_size(rows, length, kernel.shape[1]) if chunk is None else min(chunk, max(length, 1))
    settings = _Settings(float(temperature), None if softcap is None else float(softcap), size, entropy)
    return _token_logps(hidden, kernel, jnp.asarray(targets, jnp.int32), settings)


def chunk_size(rows: int, length: int, vocab: int) -> int:
    """Tokens of each row in one chunk: CHUNK_BYTES of logits a device, but CHUNK_TOKENS at least.

    rows, length, vocab: global sizes. The mesh is taken to span all devices. The chunks of one call are of
    nearly equal size, so that filling up the last one costs little.
    """
    budget = CHUNK_BYTES.get(jax.default_backend(), CHUNK_BYTES_ACCELERATOR)
    tokens = max(CHUNK_TOKENS, budget // (4 * vocab)) * jax.device_count()
    largest = max(1, tokens // max(rows, 1))
    return max(1, math.ceil(length / math.ceil(max(length, 1) / largest)))


def unembed(hidden: jax.Array, kernel: jax.Array, softcap: float | None = None) -> jax.Array:
    """Logits float32 [..., V] of hidden states [..., D], as `token_logps` computes them, at temperature 1."""
    kernel = kernel.astype(hidden.dtype)
    logits = jnp.einsum("...d,dv->...v", hidden, kernel, preferred_element_type=jnp.float32)
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def logps_from_logits(logits: jax.Array, targets: jax.Array | np.ndarray) -> jax.Array:
    """log softmax(logits)[target] in nats, float32 [...].

    logits: float [..., V], taken to float32 first. targets: int32 [...], or -1: the result is 0, no gradient.
    """
    targets = jnp.asarray(targets, jnp.int32)
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(targets >= 0, chosen - jax.nn.logsumexp(logits, axis=-1), 0.0)


def entropy_from_logits(logits: jax.Array) -> jax.Array:
    """-Σ p log p of p = softmax(logits), nats, float32 [...]. logits: float [..., V], -inf where p is 0."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.sum(jnp.exp(log_p) * jnp.where(jnp.isneginf(log_p), 0.0, log_p), axis=-1)


def _logits(hidden: jax.Array, kernel: jax.Array, settings: _Settings) -> tuple[jax.Array, jax.Array | None]:
    """Float32 [rows, chunk, V] after cap and temperature, and tanh(x / softcap) for the backward pass."""
    logits = unembed(hidden, kernel)
    if settings.softcap is None:
        return logits / settings.temperature, None
    tanh = jnp.tanh(logits / settings.softcap)
    return tanh * (settings.softcap / settings.temperature), tanh


def _chunks(x: jax.Array, size: int) -> jax.Array:
    """[rows, K, ...] → [chunks, rows, size, ...], filled up with zeros."""
    rows, length = x.shape[:2]
    count = -(-length // size)
    x = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(rows, count, size, *x.shape[2:]), 1, 0)


def _joined(x: jax.Array, length: int) -> jax.Array:
    """The inverse of `_chunks`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _token_logps(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, settings: _Settings
) -> tuple[jax.Array, jax.Array]:
    results, _ = _forward(hidden, kernel, targets, settings)
    return results


def _forward(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, settings: _Settings
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    weights = kernel.astype(hidden.dtype)

    def one(xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        chunk, target = xs
        logits, _ = _logits(chunk, weights, settings)
        # Everything is relative to the largest logit, so that large logits do not cancel.
        top = logits.max(-1, keepdims=True)
        exp = jnp.exp(logits - top)
        total = exp.sum(-1)
        used = target >= 0
        chosen = jnp.take_along_axis(logits - top, jnp.maximum(target, 0)[..., None], axis=-1)[..., 0]
        logps = jnp.where(used, chosen - jnp.log(total), 0.0)
        entropies = jnp.zeros_like(total)
        if settings.entropy:
            mean = (exp * (logits - top)).sum(-1) / total
            entropies = jnp.where(used, jnp.log(total) - mean, 0.0)
        return logps, entropies, top[..., 0] + jnp.log(total)

    length = hidden.shape[1]
    chunks = lax.map(one, (_chunks(hidden, settings.chunk), _chunks(targets, settings.chunk)))
    logps, entropies, normalizers = (_joined(x, length) for x in chunks)
    return (logps, entropies), (hidden, kernel, targets, normalizers, entropies)


def _backward(settings: _Settings, residuals: Any, cotangents: Any) -> tuple[jax.Array, jax.Array, Any]:
    hidden, kernel, targets, normalizers, entropies = residuals
    used = targets >= 0
    d_logps, d_entropies = (jnp.where(used, d, 0.0) for d in cotangents)
    weights = kernel.astype(hidden.dtype)
    vocabulary = jnp.arange(kernel.shape[1], dtype=jnp.int32)

    def one(d_kernel: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        chunk, target = xs[:2]
        normalizer, entropy, d_logp, d_entropy = (x[..., None] for x in xs[2:])
        logits, tanh = _logits(chunk, weights, settings)
        log_p = logits - normalizer
        p = jnp.exp(log_p)
        d_logits = jnp.where(vocabulary == target[..., None], d_logp, 0.0) - d_logp * p
        if settings.entropy:
            d_logits -= d_entropy * p * (log_p + entropy)
        if tanh is not None:
            d_logits *= 1.0 - jnp.square(tanh)
        d_logits = (d_logits / settings.temperature).astype(hidden.dtype)
        d_chunk = jnp.einsum("rkv,dv->rkd", d_logits, weights, preferred_element_type=jnp.float32)
        # Tokens as one axis: XLA on CPU cannot run the bfloat16 product over two that it makes of a tied kernel's.
        flat, d_flat = (x.reshape(-1, x.shape[-1]) for x in (chunk, d_logits))
        d_kernel += jnp.einsum("nd,nv->dv", flat, d_flat, preferred_element_type=jnp.float32)
        return d_kernel, d_chunk.astype(hidden.dtype)

    arrays = (hidden, targets, normalizers, entropies, d_logps, d_entropies)
    xs = tuple(_chunks(x, settings.chunk) for x in arrays)
    d_kernel, d_hidden = lax.scan(one, jnp.zeros(kernel.shape, jnp.float32), xs)
    no_gradient = np.zeros(targets.shape, jax.dtypes.float0)
    return _joined(d_hidden, hidden.shape[1]), d_kernel.astype(kernel.dtype), no_gradient


_token_logps.defvjp(_forward, _backward)
