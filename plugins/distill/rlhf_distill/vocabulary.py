"""Divergences over the whole vocabulary, without ever holding the logits of a whole batch.

Two passes over blocks of ids: the first computes the log-normalizers of both distributions, the second the terms and
their slopes. The backward pass computes the blocks again. No array is [tokens, vocabulary].
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from rlhf_distill.blocks import (
    Cap,
    Gradients,
    Normalizer,
    block_size,
    capped,
    cut,
    d_uncapped,
    fold,
    gathered,
    in_parts,
)
from rlhf_distill.divergences import Divergence
from rlhf_distill.top_k import select, teacher_ids

Arrays: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Hidden states [N, D] and kernel [D, parts, ids] of the student, then of the teacher."""


class Head(NamedTuple):
    """What makes a model's logits: softcap · tanh(hidden · kernel / softcap), or hidden · kernel where that is None.

    hidden: float32 or bfloat16 [rows, K, D], each one the state that predicts a token. kernel: float32 or bfloat16
    [D, V], the unembedding.
    """

    hidden: jax.Array
    kernel: jax.Array
    softcap: float | None = None


class Settings(NamedTuple):
    """Static settings of a compiled program. size: ids of a block of each part."""

    divergence: Divergence
    student: Cap
    teacher: Cap
    size: int


def token_divergences(
    divergence: Divergence,
    student: Head,
    teacher: Head,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    block: int | None = None,
) -> jax.Array:
    """Compute the divergence between teacher and student at every token, float32 [rows, K], nats.

    Both distributions are softmax(logits / temperature) over the ids that both models have, the first min(V, V'); what
    a kernel is padded with beyond them is left out. D may differ. Gradients reach the student alone.
    top_k: the teacher's most likely ids; all others count as one outcome, whose probability is what is left, under
        either model (the tail of TA-OPD, arXiv 2608.14728): Σ_{v ∈ top k} f(s_v, t_v) + f(1 − Σ s_v, 1 − Σ t_v). It is
        at most the divergence over the whole vocabulary, and unlike one between renormalised distributions it sees what
        the student gives to other ids. None: the whole vocabulary.
    block: ids whose logits are in memory at once; None: by the number of tokens.
    Raises ValueError for shapes that do not fit, and for a temperature, top_k or block that is not positive.
    """
    for head in (student, teacher):
        if head.hidden.ndim != 3 or head.kernel.ndim != 2 or head.hidden.shape[-1] != head.kernel.shape[0]:
            shapes = f"{head.hidden.shape}, {head.kernel.shape}"
            raise ValueError(f"hidden [rows, K, D] and kernel [D, V] do not fit: {shapes}")
    rows = student.hidden.shape[:2]
    if teacher.hidden.shape[:2] != rows:
        raise ValueError(f"student and teacher differ in rows and tokens: {rows}, {teacher.hidden.shape[:2]}")
    if min(temperature, *(x for x in (top_k, block) if x is not None), 1) <= 0:
        raise ValueError(f"temperature {temperature}, top_k {top_k} and block {block} must be positive")
    ids = min(student.kernel.shape[1], teacher.kernel.shape[1])
    of_student, of_teacher = (Cap(head.softcap, float(temperature)) for head in (student, teacher))
    hidden, teacher_hidden = (head.hidden.reshape(-1, head.hidden.shape[-1]) for head in (student, teacher))
    kernel, teacher_kernel = (in_parts(head.kernel[:, :ids]) for head in (student, teacher))
    teacher_hidden, teacher_kernel = jax.lax.stop_gradient((teacher_hidden, teacher_kernel))
    size = min(block or block_size(len(hidden), kernel), kernel.shape[2])
    if not len(hidden):
        return jnp.zeros(rows)
    if top_k is None:
        settings = Settings(divergence, of_student, of_teacher, size)
        return over_vocabulary(hidden, kernel, teacher_hidden, teacher_kernel, settings).reshape(rows)
    chosen = teacher_ids(teacher_hidden, teacher_kernel, of_teacher, size, min(top_k, ids))
    student_logps = select(hidden, kernel, chosen, of_student, size)
    teacher_logps = select(teacher_hidden, teacher_kernel, chosen, of_teacher, size)
    return divergence(student_logps, teacher_logps).sum(-1).reshape(rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def over_vocabulary(
    hidden: jax.Array,
    kernel: jax.Array,
    teacher_hidden: jax.Array,
    teacher_kernel: jax.Array,
    settings: Settings,
) -> jax.Array:
    """Compute divergences, float32 [N]. hidden: [N, D]; kernel: [D, parts, ids], from `in_parts`."""
    arrays = _ready((hidden, kernel, teacher_hidden, teacher_kernel))
    normalizers = _normalizers(arrays, settings)

    def one(total: jax.Array, first: Any, ids: int) -> jax.Array:
        (student, _), (teacher, _) = _logps(arrays, normalizers, settings, first, ids)
        return total + settings.divergence(student, teacher).sum(2)

    return fold(kernel.shape[2], settings.size, one, jnp.zeros((len(hidden), kernel.shape[1]))).sum(1)


def _forward(*arguments: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    *given, settings = arguments
    arrays = _ready(given)
    normalizers = _normalizers(arrays, settings)

    def one(sums: tuple[jax.Array, jax.Array], first: Any, ids: int) -> tuple[jax.Array, jax.Array]:
        (student, _), (teacher, _) = _logps(arrays, normalizers, settings, first, ids)
        terms, slopes = _slopes(settings.divergence, student, teacher)
        return sums[0] + terms.sum(2), sums[1] + slopes.sum(2)

    nothing = jnp.zeros((len(arrays[0]), arrays[1].shape[1]))
    divergences, slope = fold(arrays[1].shape[2], settings.size, one, (nothing, nothing))
    return divergences.sum(1), (*given, *normalizers, slope.sum(1))


def _backward(settings: Settings, residuals: Any, d_divergences: jax.Array) -> tuple[jax.Array | None, ...]:
    """With g the slopes of the terms in log s, the cotangent of a student's logit is g − s Σ g."""
    *given, student_normalizer, teacher_normalizer, slope = residuals
    arrays, normalizers = _ready(given), (student_normalizer, teacher_normalizer)
    hidden, kernel = arrays[:2]

    def one(gradients: Gradients, first: Any, ids: int) -> Gradients:
        (student, tanh), (teacher, _) = _logps(arrays, normalizers, settings, first, ids)
        _, slopes = _slopes(settings.divergence, student, teacher)
        d_logits = d_divergences[:, None, None] * (slopes - jnp.exp(student) * slope[:, None, None])
        d_product = d_uncapped(d_logits, tanh, settings.student)
        return gradients.add(hidden, cut(kernel, first, ids), d_product, first)

    gradients = fold(kernel.shape[2], settings.size, one, Gradients.empty(hidden, given[1]))
    return *gradients.arrays(hidden), None, None


over_vocabulary.defvjp(_forward, _backward)


def _normalizers(arrays: Arrays, settings: Settings) -> tuple[jax.Array, jax.Array]:
    """Compute log Σ exp(l) of the student and the teacher, float32 [N]."""

    def one(sums: tuple[Normalizer, Normalizer], first: Any, ids: int) -> tuple[Normalizer, Normalizer]:
        (student, _), (teacher, _) = _logits(arrays, settings, first, ids)
        return sums[0].add(student), sums[1].add(teacher)

    empty = Normalizer.empty(len(arrays[0]), arrays[1].shape[1])
    student, teacher = fold(arrays[1].shape[2], settings.size, one, (empty, empty))
    return student.log(), teacher.log()


def _logps(
    arrays: Arrays, normalizers: Sequence[jax.Array], settings: Settings, first: Any, ids: int
) -> tuple[tuple[jax.Array, jax.Array | None], ...]:
    """Compute (log-probabilities, tanh) of a block under the student and under the teacher."""
    blocks = _logits(arrays, settings, first, ids)
    return tuple(
        (logits - normalizer[:, None, None], tanh)
        for (logits, tanh), normalizer in zip(blocks, normalizers, strict=True)
    )


def _logits(
    arrays: Arrays, settings: Settings, first: Any, ids: int
) -> Iterator[tuple[jax.Array, jax.Array | None]]:
    """Yield (logits, tanh) of a block under the student, then under the teacher."""
    pairs = (arrays[:2], settings.student), (arrays[2:], settings.teacher)
    for (hidden, kernel), cap in pairs:
        yield capped(hidden, cut(kernel, first, ids), cap)


def _ready(arrays: Sequence[jax.Array]) -> Arrays:
    hidden, kernel, teacher_hidden, teacher_kernel = arrays
    return (
        hidden,
        gathered(kernel, hidden.dtype),
        teacher_hidden,
        gathered(teacher_kernel, teacher_hidden.dtype),
    )


def _slopes(divergence: Divergence, student: jax.Array, teacher: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute the terms, and the derivative of each in its student's log-probability."""
    terms, pull = jax.vjp(lambda logps: divergence(logps, teacher), student)
    (slopes,) = pull(jnp.ones_like(terms))
    return terms, slopes
