"""Divergences over the whole vocabulary, without ever holding the logits of a whole batch.

Logits exist for one chunk of the tokens at a time, in the forward and again in the backward pass; no array is
[tokens, vocabulary].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from rlhf_core.mesh import over_pieces
from rlhf_distill.contract import Divergence

CHUNK_BYTES = 32 * 2**20
"""Bytes of one model's float32 logits at a time, per device. On a CPU they should stay in the caches."""
CHUNK_BYTES_ACCELERATOR = 512 * 2**20
"""The same on other platforms."""
CHUNK_TOKENS = 128
"""The fewest tokens of a chunk, per device: each chunk reads and writes the whole kernel's float32 gradient."""


class Head(NamedTuple):
    """What makes a model's logits: softcap · tanh(hidden · kernel / softcap), or hidden · kernel where that is None.

    hidden: float32 or bfloat16 [rows, K, D], each one the state that predicts a token. kernel: float32 or bfloat16
    [D, V], the unembedding.
    """

    hidden: jax.Array
    kernel: jax.Array
    softcap: float | None = None


class ChunkSettings(NamedTuple):
    """Static settings of a compiled program. caps: of student and teacher. size: tokens of each row in a chunk. rows:
    the mesh axes that rows are sharded over.
    """

    divergence: Divergence
    caps: tuple[float | None, float | None]
    temperature: float
    top_k: int | None
    size: int
    rows: tuple[str, ...]


def token_divergences(
    divergence: Divergence,
    student: Head,
    teacher: Head,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    chunk: int | None = None,
) -> jax.Array:
    """Compute the divergence between teacher and student at every token, float32 [rows, K], nats.

    Both distributions are softmax(logits / temperature) over the ids that both models have, the first min(V, V'); what
    a kernel is padded with beyond them is left out. D may differ. Gradients reach the student alone.
    top_k: the teacher's most likely ids; all others count as one outcome, whose probability is what is left, under
        either model (the tail of TA-OPD, arXiv 2608.14728): Σ_{v ∈ top k} f(s_v, t_v) + f(1 − Σ s_v, 1 − Σ t_v). It is
        at most the divergence over the whole vocabulary, and unlike one between renormalised distributions it sees what
        the student gives to other ids. None: the whole vocabulary.
    chunk: tokens of each row whose logits are in memory together; None: by the size of the logits.
    Products are computed in the dtype of `hidden` and summed in float32; everything after is float32.
    Raises ValueError for shapes that do not fit, and for a temperature, top_k or chunk that is not positive.
    """
    for head in (student, teacher):
        if head.hidden.ndim != 3 or head.kernel.ndim != 2 or head.hidden.shape[-1] != head.kernel.shape[0]:
            shapes = f"{head.hidden.shape}, {head.kernel.shape}"
            raise ValueError(f"hidden [rows, K, D] and kernel [D, V] do not fit: {shapes}")
    rows, length = student.hidden.shape[:2]
    if teacher.hidden.shape[:2] != (rows, length):
        shapes = f"{(rows, length)}, {teacher.hidden.shape[:2]}"
        raise ValueError(f"student and teacher differ in rows and tokens: {shapes}")
    if min(temperature, *(x for x in (top_k, chunk) if x is not None), 1) <= 0:
        raise ValueError(
            f"temperature, top_k and chunk must be positive; got {temperature}, {top_k} and {chunk}"
        )
    if not rows * length:
        return jnp.zeros((rows, length))
    ids = min(student.kernel.shape[1], teacher.kernel.shape[1])

    def compute(axes: tuple[str, ...], hidden: jax.Array, teacher_hidden: jax.Array) -> jax.Array:
        settings = ChunkSettings(
            divergence,
            (student.softcap, teacher.softcap),
            float(temperature),
            None if top_k is None or top_k >= ids else top_k,  # without others it is the whole vocabulary
            min(chunk, hidden.shape[1]) if chunk is not None else _chunk_size(hidden, ids, axes),
            axes,
        )
        kernels = (head.kernel[:, :ids] for head in (student, teacher))
        return over_tokens(hidden, next(kernels), teacher_hidden, next(kernels), settings)

    values: jax.Array = over_pieces(compute, student.hidden, teacher.hidden)
    return values


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def over_tokens(
    hidden: jax.Array,
    kernel: jax.Array,
    teacher_hidden: jax.Array,
    teacher_kernel: jax.Array,
    settings: ChunkSettings,
) -> jax.Array:
    """Compute divergences, float32 [rows, K]."""
    return _forward(hidden, kernel, teacher_hidden, teacher_kernel, settings)[0]


def _forward(
    hidden: jax.Array,
    kernel: jax.Array,
    teacher_hidden: jax.Array,
    teacher_kernel: jax.Array,
    settings: ChunkSettings,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    weights, teacher_weights = _gathered(kernel, hidden), _gathered(teacher_kernel, teacher_hidden)

    def one(chunks: tuple[jax.Array, jax.Array]) -> jax.Array:
        chunk, teacher = chunks
        return _values(_product(chunk, weights), _product(teacher, teacher_weights), settings)

    values = lax.map(one, (_chunks(hidden, settings.size), _chunks(teacher_hidden, settings.size)))
    return _joined(values, hidden.shape[1]), (hidden, kernel, teacher_hidden, teacher_kernel)


def _backward(settings: ChunkSettings, residuals: Any, d_values: jax.Array) -> tuple[jax.Array | None, ...]:
    hidden, kernel, teacher_hidden, teacher_kernel = residuals
    weights, teacher_weights = _gathered(kernel, hidden), _gathered(teacher_kernel, teacher_hidden)
    mesh = _mesh(hidden)
    shards = _shards(hidden, settings.rows)

    def one(d_kernels: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        chunk, teacher, d_chunk_values = xs
        teacher_product = _product(teacher, teacher_weights)
        _, pull = jax.vjp(lambda x: _values(x, teacher_product, settings), _product(chunk, weights))
        d_product = pull(d_chunk_values)[0].astype(hidden.dtype)
        d_chunk = jnp.einsum("rkv,dv->rkd", d_product, weights, preferred_element_type=jnp.float32)
        # One gradient per shard of the rows, so that no device needs another's before the last chunk. A shard's tokens
        # are one axis: XLA on CPU cannot run the bfloat16 product over two axes that it makes for a tied kernel.
        flat, d_flat = (x.reshape(shards, -1, x.shape[-1]) for x in (chunk, d_product))
        d_kernels += jnp.einsum("snd,snv->sdv", flat, d_flat, preferred_element_type=jnp.float32)
        d_kernels = _placed(d_kernels, mesh if shards > 1 else None, settings.rows, None)
        return d_kernels, d_chunk.astype(hidden.dtype)

    xs = tuple(_chunks(x, settings.size) for x in (hidden, teacher_hidden, d_values))
    d_kernels, d_hidden = lax.scan(one, jnp.zeros((shards, *kernel.shape), jnp.float32), xs)
    return _joined(d_hidden, hidden.shape[1]), d_kernels.sum(0).astype(kernel.dtype), None, None


over_tokens.defvjp(_forward, _backward)


def _values(product: jax.Array, teacher_product: jax.Array, settings: ChunkSettings) -> jax.Array:
    """Compute divergences, [rows, k], from hidden · kernel, float32 [rows, k, ids] each."""
    logits = []
    for x, softcap in zip((product, teacher_product), settings.caps, strict=True):
        capped = x if softcap is None else softcap * jnp.tanh(x / softcap)
        logits.append(capped / settings.temperature)
    if settings.top_k is not None:
        chosen = lax.top_k(logits[1], settings.top_k)[1]
        logits = [_outcomes(x, chosen) for x in logits]
    student, teacher = (jax.nn.log_softmax(x) for x in logits)
    return settings.divergence(student, teacher).sum(-1)


def _outcomes(logits: jax.Array, chosen: jax.Array) -> jax.Array:
    """Join the logits of the chosen ids and the log Σ exp of all others, float32 [rows, k, count + 1].

    That is summed over the others themselves: 1 less the sum over the chosen would be rounding where these have nearly
    all.
    """
    others = jnp.put_along_axis(logits, chosen, -jnp.inf, axis=-1, inplace=False)
    rest = jax.nn.logsumexp(others, axis=-1, keepdims=True)
    return jnp.concatenate([jnp.take_along_axis(logits, chosen, axis=-1), rest], axis=-1)


def _product(hidden: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.einsum("rkd,dv->rkv", hidden, weights, preferred_element_type=jnp.float32)


def _chunk_size(hidden: jax.Array, ids: int, axes: Sequence[str]) -> int:
    """Choose the tokens of each row in a chunk; chunks of one call have nearly equal sizes."""
    rows, length, _ = hidden.shape
    budget = CHUNK_BYTES if jax.default_backend() == "cpu" else CHUNK_BYTES_ACCELERATOR
    tokens = max(CHUNK_TOKENS, budget // (4 * ids)) * _shards(hidden, axes)
    return math.ceil(length / math.ceil(length / max(1, tokens // rows)))


def _shards(hidden: jax.Array, axes: Sequence[str]) -> int:
    """Count the parts that the rows of hidden states are sharded into over these axes of the mesh."""
    mesh = _mesh(hidden)
    shards = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)
    return 1 if hidden.shape[0] % shards else shards


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


def _gathered(kernel: jax.Array, hidden: jax.Array) -> jax.Array:
    """Cast a kernel to the dtype that it is multiplied in, and gather it along `fsdp` once, before the loop."""
    return _placed(kernel.astype(hidden.dtype), _mesh(hidden), None)


def _mesh(x: jax.Array) -> AbstractMesh | None:
    """Return the mesh that `x` is computed on; None on one device and within `jax.shard_map`."""
    mesh: AbstractMesh = jax.typeof(x).sharding.mesh
    if mesh.size <= 1 or not {"fsdp", "tensor"} <= set(mesh.axis_names):
        return None
    return mesh if set(mesh.axis_types) == {AxisType.Auto} else None


def _placed(x: jax.Array, mesh: AbstractMesh | None, *axes: Any) -> jax.Array:
    """Shard all axes of `x` [..., ids] but the last over these axes of the mesh; do not constrain the ids."""
    if mesh is None:
        return x
    spec = PartitionSpec(*axes, PartitionSpec.UNCONSTRAINED)
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
