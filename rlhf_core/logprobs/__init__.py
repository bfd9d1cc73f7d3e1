"""Log-probabilities and entropies of tokens, without ever holding the logits of a whole batch.

`token_logps` computes one number per token from hidden states and the unembedding. Logits exist for one block of the
vocabulary, or one chunk of the tokens, at a time, in the forward and again in the backward pass; no array is
[rows, tokens, vocabulary].
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.logprobs.by_tokens import over_tokens
from rlhf_core.logprobs.by_vocabulary import over_vocabulary
from rlhf_core.logprobs.logits import Settings, without
from rlhf_core.logprobs.logits import unembed as unembed
from rlhf_core.mesh import row_parts
from rlhf_core.runtime.devices import device_count, platform

__all__ = ["token_logps"]


CHUNK_BYTES = {"cpu": 16 * 2**20}
"""Bytes of float32 logits at a time, per device. On a CPU they should stay in the caches."""
CHUNK_BYTES_ACCELERATOR = 512 * 2**20
"""The same on other platforms."""
CHUNK_TOKENS = 128
"""The fewest tokens of a chunk, per device: each chunk reads and writes the whole kernel's float32 gradient."""
BLOCK_WORDS = 128
"""The size of a block of the vocabulary is a multiple of this."""


def token_logps(
    hidden: jax.Array,
    kernel: jax.Array | None,
    targets: jax.Array | np.ndarray,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    at_once: tuple[Literal["tokens", "words"], int] | None = None,
    entropy: bool = False,
    absent: tuple[tuple[int, int], ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """Compute log p(target) and the entropy of p, where p = softmax(cap(hidden · kernel) / temperature), in nats.

    hidden: float32 or bfloat16 [rows, K, D], each one the state that predicts its target.
    kernel: float32 or bfloat16 [D, V], the unembedding; None where `hidden` are the logits, before the temperature.
    targets: int32 [rows, K] in [0, V), or -1: results are 0, without gradient.
    temperature: positive. softcap: cap(x) = softcap · tanh(x / softcap); None: cap(x) = x.
    at_once: which logits are in memory together: of so many tokens of each row over the whole vocabulary, or of all
        tokens over so many words. None chooses the number by the size of the logits: of words on one device, and of
        tokens on several, over which the vocabulary may be sharded.
    entropy: compute H = -Σ p log p as well.
    absent: ranges (first, one after the last) of ids that have probability 0, see `Definition.absent`.

    Returns (log-probs float32 [rows, K], entropies float32 [rows, K], zeros without `entropy`). Products are
    computed in hidden's dtype and summed in float32; everything after is float32. Gradients of both results
    reach hidden and kernel: with l the logits after cap and temperature and g, h the cotangents,
    dl = g (onehot - p) - h p (log p + H).

    Chunks run along K and never across rows: rows that are sharded over a mesh stay where they are.
    Raises ValueError for shapes that do not fit and a temperature, softcap or number at once that is not positive.
    """
    if kernel is None:
        return _of_logits(hidden, jnp.asarray(targets, jnp.int32), temperature, entropy, absent)
    if hidden.ndim != 3 or kernel.ndim != 2 or hidden.shape[-1] != kernel.shape[0]:
        raise ValueError(f"hidden [rows, K, D] and kernel [D, V] do not fit: {hidden.shape}, {kernel.shape}")
    if tuple(targets.shape) != hidden.shape[:2]:
        raise ValueError(f"targets [rows, K] do not fit hidden {hidden.shape}: {tuple(targets.shape)}")
    unit, number = at_once or ("words" if device_count() == 1 else "tokens", None)
    if min(temperature, *(x for x in (softcap, number) if x is not None), 1) <= 0:
        raise ValueError(
            f"temperature {temperature}, softcap {softcap} and at_once {at_once} must be positive"
        )
    (rows, length, _), words = hidden.shape, kernel.shape[1]
    if unit == "words":
        size = block_size(rows * length, words) if number is None else min(number, words)
    else:
        size = (
            chunk_size(rows * row_parts(), length, words) if number is None else min(number, max(length, 1))
        )
    settings = Settings(
        float(temperature), None if softcap is None else float(softcap), size, entropy, absent
    )
    return (over_vocabulary if unit == "words" else over_tokens)(
        hidden, kernel, jnp.asarray(targets, jnp.int32), settings
    )


def _of_logits(
    logits: jax.Array,
    targets: jax.Array,
    temperature: float,
    entropy: bool,
    absent: tuple[tuple[int, int], ...],
) -> tuple[jax.Array, jax.Array]:
    scaled = without(logits.astype(jnp.float32) / temperature, absent, logits.shape[-1])
    log_p = jax.nn.log_softmax(scaled)
    used = targets >= 0
    chosen = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    mean = -(jnp.exp(log_p) * log_p).sum(-1) if entropy else jnp.zeros_like(chosen)
    return jnp.where(used, chosen, 0.0), jnp.where(used, mean, 0.0)


def block_size(tokens: int, vocab: int) -> int:
    """Choose the words per block: CHUNK_BYTES of logits, but at least BLOCK_WORDS, in blocks of similar sizes."""
    largest = max(BLOCK_WORDS, _budget() // (4 * max(tokens, 1)))
    words = math.ceil(vocab / math.ceil(vocab / largest))
    return min(vocab, math.ceil(words / BLOCK_WORDS) * BLOCK_WORDS)


def chunk_size(rows: int, length: int, vocab: int) -> int:
    """Choose the tokens of each row in one chunk: CHUNK_BYTES of logits per device, but at least CHUNK_TOKENS.

    rows, length, vocab: global sizes, on a mesh of all devices. Chunks of one call have nearly equal sizes, so that
    padding the last one costs little.
    """
    tokens = max(CHUNK_TOKENS, _budget() // (4 * vocab)) * device_count()
    largest = max(1, tokens // max(rows, 1))
    return max(1, math.ceil(length / math.ceil(max(length, 1) / largest)))


def _budget() -> int:
    return CHUNK_BYTES.get(platform(), CHUNK_BYTES_ACCELERATOR)
