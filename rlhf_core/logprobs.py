"""Log-probabilities and entropies of tokens, without ever holding the logits of a whole batch.

`token_logps` computes one number per token from hidden states and the unembedding. Logits exist for one block of the
vocabulary, or one chunk of the tokens, at a time, in the forward and again in the backward pass; no array is
[rows, tokens, vocabulary].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from rlhf_core.mesh import mesh_of_rows, over_pieces, row_parts
from rlhf_core.runtime.machine import device_count, platform
from rlhf_core.surprisal import Moments

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

    Chunks run along K and never across rows: rows that are sharded over a mesh stay where they are. Where `context`
    cuts rows, each device has its part of K.
    Raises ValueError for shapes that do not fit and a temperature, softcap or number of tokens that is not positive.
    """
    found = _compute(hidden, kernel, targets, temperature, softcap, at_once, absent, entropy=entropy)
    return found.logps, found.entropies


def token_moments(
    hidden: jax.Array,
    kernel: jax.Array | None,
    targets: jax.Array | np.ndarray,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    at_once: tuple[Literal["tokens", "words"], int] | None = None,
    absent: tuple[tuple[int, int], ...] = (),
    keep: Callable[[jax.Array], jax.Array] | None = None,
) -> Moments:
    """Compute what `token_logps` does and, in the same pass, the variance of log p.

    Arguments are those of `token_logps`. Gradients come through log-probabilities and entropies alone.
    keep: sets masses, probabilities up to a factor, float32 [..., V], to 0 for tokens that are not sampled; p is what
        remains, and the log-probability of other targets is about NEVER. Then there is no gradient, and `at_once` is of
        tokens.
    """
    found = _compute(
        hidden, kernel, targets, temperature, softcap, at_once, absent, entropy=True, moments=True, keep=keep
    )
    return Moments(*found)


class _Found(NamedTuple):
    """Results of a pass, float32 of the targets' shape; without moments the last is ()."""

    logps: jax.Array
    entropies: jax.Array
    variances: Any = ()


def _compute(
    hidden: jax.Array,
    kernel: jax.Array | None,
    targets: jax.Array | np.ndarray,
    temperature: float,
    softcap: float | None,
    at_once: tuple[Literal["tokens", "words"], int] | None,
    absent: tuple[tuple[int, int], ...],
    *,
    entropy: bool,
    moments: bool = False,
    keep: Callable[[jax.Array], jax.Array] | None = None,
) -> _Found:
    """Compute `token_logps`, or `token_moments`, in blocks or chunks."""
    if kernel is None:
        found = jnp.asarray(targets, jnp.int32)
        scaled = without(hidden.astype(jnp.float32) / temperature, absent, hidden.shape[-1])
        return _of_logits(_kept(scaled, keep), found, entropy=entropy, moments=moments)
    if hidden.ndim != 3 or kernel.ndim != 2 or hidden.shape[-1] != kernel.shape[0]:
        raise ValueError(f"hidden [rows, K, D] and kernel [D, V] do not fit: {hidden.shape}, {kernel.shape}")
    if tuple(targets.shape) != hidden.shape[:2]:
        raise ValueError(f"targets [rows, K] do not fit hidden {hidden.shape}: {tuple(targets.shape)}")
    in_blocks = device_count() == 1 and keep is None
    unit, number = at_once or ("words" if in_blocks else "tokens", None)
    given = [x for x in (softcap, number) if x is not None]
    if min([temperature, *given]) <= 0:
        raise ValueError(
            f"temperature {temperature}, softcap {softcap} and at_once {at_once} must be positive"
        )
    words = kernel.shape[1]

    def compute(axes: Any, hidden: jax.Array, targets: jax.Array) -> _Found:
        rows, length, _ = hidden.shape
        if unit == "words":
            size = block_size(rows * length, words) if number is None else min(number, words)
        elif number is None:
            size = chunk_size(rows * row_parts(), length, words)
        else:
            size = min(number, max(length, 1))
        cap = None if softcap is None else float(softcap)
        settings = LogprobSettings(float(temperature), cap, size, entropy, absent, axes, moments, keep)
        if unit == "words":
            return over_vocabulary(hidden, kernel, targets, settings)
        return over_tokens(hidden, kernel, targets, settings)

    results: _Found = over_pieces(compute, hidden, jnp.asarray(targets, jnp.int32))
    return results


def _of_logits(scaled: jax.Array, targets: jax.Array, *, entropy: bool, moments: bool) -> _Found:
    """scaled: logits after the temperature, without ids that have no token, float32 [..., V]."""
    log_p = jax.nn.log_softmax(scaled)
    used = targets >= 0
    chosen = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    mean = -(jnp.exp(log_p) * log_p).sum(-1) if entropy else jnp.zeros_like(chosen)
    found = _Found(jnp.where(used, chosen, 0.0), jnp.where(used, mean, 0.0))
    if not moments:
        return found
    relative = jax.lax.stop_gradient(scaled - scaled.max(-1, keepdims=True))
    exp = jnp.exp(relative)
    variance = _variance(exp.sum(-1), (exp * relative).sum(-1), _squared(exp, relative))
    return found._replace(variances=jnp.where(used, variance, 0.0))


def _squared(exp: jax.Array, relative: jax.Array) -> jax.Array:
    """Sum exp(l - m) (l - m)² over words. relative: logits less the largest, float32 [..., words]; exp: of it."""
    # The factor of an id without a token is very large: its square would be infinite, and 0 times it NaN.
    return (exp * relative * relative).sum(-1)


def _variance(total: jax.Array, mixed: jax.Array, squared: jax.Array) -> jax.Array:
    """Compute the variance of log p from sums of exp(l - m) times 1, l - m and (l - m)²."""
    return jnp.maximum(squared / total - jnp.square(mixed / total), 0.0)


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


class LogprobSettings(NamedTuple):
    """Static settings of a compiled program, from the options of `token_logps`."""

    temperature: float
    softcap: float | None
    size: int
    """Tokens of a chunk, or words of a block."""
    entropy: bool
    absent: tuple[tuple[int, int], ...] = ()
    rows: tuple[str, ...] = ()
    """The mesh axes that rows are sharded over."""
    moments: bool = False
    keep: Callable[[jax.Array], jax.Array] | None = None
    """See `token_moments`."""


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


def _kept(logits: jax.Array, keep: Callable[[jax.Array], jax.Array] | None) -> jax.Array:
    """Set the logits, float32 [..., V], of tokens that are not sampled to NEVER."""
    if keep is None:
        return logits
    return jnp.where(keep(jnp.exp(logits - logits.max(-1, keepdims=True))) > 0, logits, NEVER)


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
    hidden: jax.Array, kernel: jax.Array, settings: LogprobSettings, words: int, first: Any = 0
) -> tuple[jax.Array, jax.Array | None]:
    """Compute logits, float32 [..., V], after cap and temperature, and tanh(x / softcap) for the backward pass.

    words, first: the size of the whole vocabulary, and the first id of the kernel's.
    """
    logits = unembed(hidden, kernel)
    tanh = None
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
    settings: LogprobSettings,
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
    squared: Any = ()
    """Σ exp(l - m) (l - m)²; () without moments."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def over_vocabulary(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, settings: LogprobSettings
) -> _Found:
    """Compute `token_logps` by blocks of the vocabulary, each for all tokens, on a device that has the whole kernel.

    A pass reads the kernel once and writes every part of its gradient once, while chunks of tokens would read and write
    the whole gradient once per chunk. Blocks carry a few numbers per token to the next one.
    """
    results, _ = _forward_blocks(hidden, kernel, targets, settings)
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


def _forward_blocks(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, settings: LogprobSettings
) -> tuple[_Found, tuple[jax.Array, ...]]:
    states = hidden.reshape(-1, hidden.shape[-1])
    wanted = targets.reshape(-1)

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
        squared: Any = ()
        if settings.moments:
            # exp of it is 0 long before its square, of a block without a token before this one, would be infinite.
            down = jnp.maximum(seen.top - top, -1e3)
            squared = (seen.squared + down * (2.0 * seen.mixed + down * seen.total)) * less
            squared += _squared(exp, relative)
        return _Seen(top, seen.total * less + exp.sum(-1), mixed, chosen, squared)

    nothing = jnp.zeros(wanted.shape, jnp.float32)
    # Far below every logit, but finite: it is multiplied by zeros, which must stay 0.
    lowest = jnp.full(wanted.shape, jnp.finfo(jnp.float32).min / 4, jnp.float32)
    start = _Seen(lowest, nothing, nothing, nothing, nothing if settings.moments else ())
    seen = _blocks(kernel.shape[1], settings.size, one, start)
    used = wanted >= 0
    log_total = jnp.log(seen.total)
    # Relative to the largest logit, so that large logits do not cancel.
    logps = jnp.where(used, seen.chosen - seen.top - log_total, 0.0)
    entropies = jnp.where(used, log_total - seen.mixed / seen.total, 0.0) if settings.entropy else nothing
    found = _Found(logps, entropies)
    if settings.moments:
        variance = _variance(seen.total, seen.mixed, seen.squared)
        found = found._replace(variances=jnp.where(used, variance, 0.0))
    found = jax.tree.map(lambda x: x.reshape(targets.shape), found)
    normalizers = (seen.top + log_total).reshape(targets.shape)
    return found, (hidden, kernel, targets, normalizers, found.entropies)


def _backward_blocks(
    settings: LogprobSettings, residuals: Any, cotangents: Any
) -> tuple[jax.Array, jax.Array, Any]:
    hidden, kernel, targets, normalizers, entropies = residuals
    states = hidden.reshape(-1, hidden.shape[-1])
    wanted = targets.reshape(-1, 1)
    normalizer, entropy = (x.reshape(-1, 1) for x in (normalizers, entropies))
    d_logp, d_entropy = (jnp.where(wanted >= 0, d.reshape(-1, 1), 0.0) for d in cotangents[:2])

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


over_vocabulary.defvjp(_forward_blocks, _backward_blocks)


def _chunks(x: jax.Array, size: int) -> jax.Array:
    """[rows, K, ...] → [chunks, rows, size, ...], padded with zeros."""
    rows, length = x.shape[:2]
    count = -(-length // size)
    x = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(rows, count, size, *x.shape[2:]), 1, 0)


def _joined(x: jax.Array, length: int) -> jax.Array:
    """Invert `_chunks`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _placed(x: jax.Array, mesh: AbstractMesh | None, *axes: Any) -> jax.Array:
    """Shard all axes of `x` [..., V] but the last over these axes of the mesh; do not constrain the vocabulary."""
    if mesh is None:
        return x
    spec = PartitionSpec(*axes, PartitionSpec.UNCONSTRAINED)
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def over_tokens(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, settings: LogprobSettings
) -> _Found:
    """Compute `token_logps` by chunks of tokens, each over the whole vocabulary, which may be sharded over devices.

    The loop over chunks sends nothing of the kernel's size between devices: a kernel that `fsdp` shards is gathered
    before the loop, and the gradient that each device sums over its own rows is summed over devices after it.
    """
    results, _ = _forward_chunks(hidden, kernel, targets, settings)
    return results


def _forward_chunks(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, settings: LogprobSettings
) -> tuple[_Found, tuple[jax.Array, ...]]:
    weights = _placed(kernel.astype(hidden.dtype), mesh_of_rows(hidden), None)

    def one(xs: tuple[jax.Array, jax.Array]) -> tuple[_Found, jax.Array]:
        chunk, target = xs
        logits, _ = capped(chunk, weights, settings, kernel.shape[1])
        logits = _kept(logits, settings.keep)
        # All relative to the largest logit, so that large logits do not cancel.
        top = logits.max(-1, keepdims=True)
        relative = logits - top
        exp = jnp.exp(relative)
        total = exp.sum(-1)
        mixed = (exp * relative).sum(-1)
        used = target >= 0
        chosen = jnp.take_along_axis(relative, jnp.maximum(target, 0)[..., None], axis=-1)[..., 0]
        logps = jnp.where(used, chosen - jnp.log(total), 0.0)
        entropies = jnp.zeros_like(total)
        if settings.entropy:
            entropies = jnp.where(used, jnp.log(total) - mixed / total, 0.0)
        found = _Found(logps, entropies)
        if settings.moments:
            variance = _variance(total, mixed, _squared(exp, relative))
            found = found._replace(variances=jnp.where(used, variance, 0.0))
        return found, top[..., 0] + jnp.log(total)

    length = hidden.shape[1]
    chunks = lax.map(one, (_chunks(hidden, settings.size), _chunks(targets, settings.size)))
    found, normalizers = jax.tree.map(lambda x: _joined(x, length), chunks)
    return found, (hidden, kernel, targets, normalizers, found.entropies)


def _backward_chunks(
    settings: LogprobSettings, residuals: Any, cotangents: Any
) -> tuple[jax.Array, jax.Array, Any]:
    hidden, kernel, targets, normalizers, entropies = residuals
    used = targets >= 0
    d_logps, d_entropies = (jnp.where(used, d, 0.0) for d in cotangents[:2])
    mesh = mesh_of_rows(hidden)
    weights = _placed(kernel.astype(hidden.dtype), mesh, None)
    shards = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in settings.rows)
    vocabulary = jnp.arange(kernel.shape[1], dtype=jnp.int32)

    def one(d_kernels: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        chunk, target = xs[:2]
        normalizer, entropy, d_logp, d_entropy = (x[..., None] for x in xs[2:])
        logits, tanh = capped(chunk, weights, settings, kernel.shape[1])
        is_target = vocabulary == target[..., None]
        d_logits = d_uncapped(
            logits, tanh, is_target, normalizer, entropy, d_logp, d_entropy, settings
        ).astype(hidden.dtype)
        d_chunk = jnp.einsum("rkv,dv->rkd", d_logits, weights, preferred_element_type=jnp.float32)
        # One gradient per shard of the rows, so that no device needs another's before the last chunk. A shard's tokens
        # are one axis: XLA on CPU cannot run the bfloat16 product over two axes that it makes for a tied kernel.
        flat, d_flat = (x.reshape(shards, -1, x.shape[-1]) for x in (chunk, d_logits))
        d_kernels += jnp.einsum("snd,snv->sdv", flat, d_flat, preferred_element_type=jnp.float32)
        return _placed(d_kernels, mesh, settings.rows, None), d_chunk.astype(hidden.dtype)

    arrays = (hidden, targets, normalizers, entropies, d_logps, d_entropies)
    xs = tuple(_chunks(x, settings.size) for x in arrays)
    d_kernels, d_hidden = lax.scan(one, jnp.zeros((shards, *kernel.shape), jnp.float32), xs)
    no_gradient = np.zeros(targets.shape, jax.dtypes.float0)
    return _joined(d_hidden, hidden.shape[1]), d_kernels.sum(0).astype(kernel.dtype), no_gradient


over_tokens.defvjp(_forward_chunks, _backward_chunks)
