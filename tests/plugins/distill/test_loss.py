"""Divergences by chunks of tokens: values and gradients against the formulas in float64 NumPy, and their memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray
from rlhf_distill import DIVERGENCE, Head, token_divergences

from rlhf_core import installed_registry
from rlhf_core.plugins import load_file

ROWS, TOKENS, VOCAB = 2, 5, 37
F64 = NDArray[np.float64]


def named(name: str, **options: Any) -> Any:
    return installed_registry().get(DIVERGENCE, name, **options)


def jensen_shannon(beta: float) -> Any:
    return named("jsd", beta=beta)


def problem(dtype: Any = np.float32, padding: int = 3) -> tuple[Any, ...]:
    """hidden and kernel of a student, and of a teacher that is wider and padded to more ids; a cotangent per token."""
    rng = np.random.default_rng(0)
    hidden, teacher = (rng.normal(size=(ROWS, TOKENS, size)) for size in (8, 12))
    kernel, teacher_kernel = rng.normal(size=(8, VOCAB)), rng.normal(size=(12, VOCAB + padding))
    arrays = (jnp.asarray(x, dtype) for x in (hidden, kernel, teacher, teacher_kernel))
    return *arrays, rng.normal(size=(ROWS, TOKENS))


def logits_of(hidden: Any, kernel: Any, softcap: float | None, temperature: float) -> tuple[F64, F64]:
    """Logits over the shared ids, float64 [rows, K, V], and their derivative in hidden · kernel."""
    raw = np.asarray(hidden, np.float64) @ np.asarray(kernel, np.float64)[:, :VOCAB]
    if softcap is None:
        return raw / temperature, np.full_like(raw, 1 / temperature)
    slope = 1 / np.cosh(raw / softcap) ** 2 / temperature
    return softcap * np.tanh(raw / softcap) / temperature, slope


def outcomes(p: F64, teacher: F64, top_k: int | None) -> tuple[F64, NDArray[np.int64]]:
    """Probabilities of the teacher's likeliest ids and of the rest, and the outcome that every id belongs to."""
    if top_k is None or top_k >= VOCAB:
        return p, np.broadcast_to(np.arange(VOCAB), p.shape)
    order = np.argsort(-teacher, axis=-1, kind="stable")
    rank = np.argsort(order, axis=-1, kind="stable")
    outcome = np.minimum(rank, top_k)
    grouped = np.stack([np.where(outcome == i, p, 0.0).sum(-1) for i in range(top_k + 1)], -1)
    return grouped, outcome


def formula(s: F64, t: F64, beta: float) -> tuple[F64, F64]:
    """The divergence, and its derivative in each probability of the student, up to a constant."""
    if beta == 0:
        return (t * np.log(t / s)).sum(-1), -t / s
    if beta == 1:
        return (s * np.log(s / t)).sum(-1), np.log(s / t)
    m = beta * t + (1 - beta) * s
    value = beta * (t * np.log(t / m)).sum(-1) + (1 - beta) * (s * np.log(s / m)).sum(-1)
    return value, (1 - beta) * np.log(s / m)


def reference(
    arrays: Any,
    beta: float,
    *,
    softcaps: Any = (None, None),
    temperature: float = 1.0,
    top_k: int | None = None,
) -> tuple[F64, F64, F64]:
    """The divergences, and the gradients of their sum weighted by the cotangent, in hidden and kernel."""
    hidden, kernel, teacher_hidden, teacher_kernel, cotangent = arrays
    logits, slope = logits_of(hidden, kernel, softcaps[0], temperature)
    teacher, _ = logits_of(teacher_hidden, teacher_kernel, softcaps[1], temperature)
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (logits, teacher))
    (s, outcome), (t, _) = (outcomes(x, teacher, top_k) for x in (p, q))
    values, d_s = formula(s, t, beta)
    d_p = np.take_along_axis(d_s, outcome, -1)
    d_logits = p * (d_p - (p * d_p).sum(-1, keepdims=True)) * slope * cotangent[..., None]
    d_hidden = d_logits @ np.asarray(kernel, np.float64).T
    return values, d_hidden, np.einsum("rkd,rkv->dv", np.asarray(hidden, np.float64), d_logits)


def computed(arrays: Any, divergence: Any, softcaps: Any = (None, None), **options: Any) -> list[F64]:
    hidden, kernel, teacher_hidden, teacher_kernel, cotangent = arrays

    def total(hidden: Any, kernel: Any) -> tuple[Any, Any]:
        student = Head(hidden, kernel, softcaps[0])
        teacher = Head(teacher_hidden, teacher_kernel, softcaps[1])
        values = token_divergences(divergence, student, teacher, **options)
        return jnp.sum(values * cotangent), values

    step = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, values), gradients = step(hidden, kernel)
    return [np.asarray(x, np.float64) for x in (values, *gradients)]


def assert_close(actual: Any, expected: Any, atol: float = 1e-5) -> None:
    for name, a, b in zip(("values", "d_hidden", "d_kernel"), actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=atol, err_msg=name)


KEPT = [(0.0, 5), (0.25, None), (0.25, 5), (1.0, None)]
REST = [(0.0, None), (0.25, VOCAB), (0.5, None), (0.5, 5), (1.0, 5)]


@pytest.mark.parametrize(
    ("beta", "top_k"), [*KEPT, *(pytest.param(*case, marks=pytest.mark.long) for case in REST)]
)
def test_values_and_gradients_equal_the_formula(beta: float, top_k: int | None) -> None:
    """Chunks of 2, 2 and 1 tokens; different widths, kernels, caps and a temperature."""
    arrays, options = problem(), {"temperature": 1.3, "top_k": top_k}
    caps = (2.5, 4.0)
    actual = computed(arrays, jensen_shannon(beta), caps, chunk=2, **options)
    assert_close(actual, reference(arrays, beta, softcaps=caps, **options))


@pytest.mark.parametrize(("name", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0)])
def test_the_ends_have_names(name: str, beta: float) -> None:
    arrays = problem()
    assert_close(computed(arrays, named(name), chunk=2), reference(arrays, beta))


@pytest.mark.parametrize("top_k", [pytest.param(None, marks=pytest.mark.long), 5])
def test_bfloat16_states_keep_their_dtype(top_k: int | None) -> None:
    arrays = problem(jnp.bfloat16)
    actual = computed(arrays, jensen_shannon(0.5), chunk=2, top_k=top_k)
    expected = reference(arrays, 0.5, top_k=top_k)
    np.testing.assert_allclose(actual[0], expected[0], rtol=2e-5, atol=1e-5)
    for a, b in zip(actual[1:], expected[1:], strict=True):
        np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max())


def test_a_tail_is_never_more_than_the_whole() -> None:
    """Coarser outcomes never diverge more, and with all ids chosen there is no rest."""
    hidden, kernel, teacher_hidden, teacher_kernel, _ = problem()
    values_of = jax.jit(token_divergences, static_argnums=0, static_argnames="top_k")

    def computed(top_k: int | None = None) -> F64:
        return np.asarray(
            values_of(
                named("reverse_kl"), Head(hidden, kernel), Head(teacher_hidden, teacher_kernel), top_k=top_k
            )
        )

    whole = computed()
    last = np.zeros_like(whole)
    for top_k in (1, 4, 16, VOCAB - 1, VOCAB, 2 * VOCAB):
        values = computed(top_k)
        assert (values >= last - 1e-5).all()
        last = values
    np.testing.assert_allclose(last, whole, rtol=2e-5, atol=1e-5)


def test_the_teacher_gets_no_gradient() -> None:
    hidden, kernel, teacher_hidden, teacher_kernel, _ = problem()
    for top_k in (None, 4):
        gradients = jax.jit(
            jax.grad(
                lambda h, k, top_k=top_k: token_divergences(
                    named("forward_kl"), Head(hidden, kernel), Head(h, k), top_k=top_k
                ).sum(),
                argnums=(0, 1),
            )
        )(teacher_hidden, teacher_kernel)
        assert not any(np.any(np.asarray(x)) for x in gradients)


@pytest.mark.parametrize("beta", [0.0, pytest.param(0.25, marks=pytest.mark.long), 0.5, 1.0])
def test_probabilities_of_zero_have_their_limits(beta: float) -> None:
    """0 log 0 = 0; where the other distribution excludes an id, KLs are infinite, Jensen-Shannon divergences finite."""
    with np.errstate(divide="ignore"):
        s, t = np.log([0.5, 0.5, 0.0, 0.0]), np.log([0.5, 0.0, 0.5, 0.0])
    terms, pull = jax.vjp(lambda x: jensen_shannon(beta)(x, jnp.float32(t)), jnp.float32(s))
    (slopes,) = pull(jnp.ones(4))
    assert np.isfinite(np.asarray(slopes)[[0, 2, 3]]).all()
    one = np.log(2) / 2
    expected = {0.0: [0, 0, np.inf, 0], 1.0: [0, np.inf, 0, 0], 0.5: [0, one / 2, one / 2, 0]}
    if beta in expected:
        np.testing.assert_allclose(terms, expected[beta], atol=1e-7)
    else:
        assert np.isfinite(terms).all()


@pytest.mark.parametrize(
    ("beta", "top_k"),
    [
        (0.0, None),
        (0.25, 3),
        (1.0, 3),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((0.0, 3), (0.25, None), (0.5, None), (0.5, 3), (1.0, None))
        ),
    ],
)
def test_tiny_probabilities_stay_finite(beta: float, top_k: int | None) -> None:
    """Logits 300 apart, opposite in student and teacher: probabilities that float32 cannot hold."""
    spread = jnp.linspace(-150.0, 150.0, VOCAB)
    student = Head(jnp.ones((1, 1, 1)), spread[None])
    teacher = Head(jnp.ones((1, 1, 1)), spread[None, ::-1])
    value, gradient = jax.jit(
        jax.value_and_grad(
            lambda kernel: token_divergences(
                jensen_shannon(beta), student._replace(kernel=kernel), teacher, top_k=top_k
            ).sum()
        )
    )(student.kernel)
    exact = 300.0 if beta in (0, 1) else -(beta * np.log(beta) + (1 - beta) * np.log1p(-beta))
    if beta == 1 and top_k:  # the student is among the others, of which the teacher has exp(-3 * 300 / 36)
        exact = top_k * 300.0 / (VOCAB - 1)
    np.testing.assert_allclose(value, exact, rtol=1e-3)
    assert np.isfinite(np.asarray(gradient)).all()


def test_no_tokens_no_divergences() -> None:
    hidden, kernel, teacher_hidden, teacher_kernel, _ = problem()
    empty = token_divergences(
        named("forward_kl"), Head(hidden[:, :0], kernel), Head(teacher_hidden[:, :0], teacher_kernel)
    )
    assert empty.shape == (ROWS, 0)


LARGE = (2048, 32_768, (16, 32))
"""Tokens, ids, and the widths of a student and of a teacher."""


@pytest.fixture(scope="module")
def memory(repository: Path) -> Any:
    return load_file(repository / "benchmarks" / "distill" / "memory.py")


@pytest.mark.parametrize("top_k", [None, 16])
def test_chunks_take_a_tenth_of_whole_logits(memory: Any, top_k: int | None) -> None:
    """No array is [tokens, ids]: what the compiler reserves beside arguments and results."""

    def chunks(*heads: Any) -> Any:
        return token_divergences(memory.DIVERGENCE, *heads, top_k=top_k, chunk=64)

    sizes = [memory.temporary_bytes(function, *LARGE) for function in (chunks, memory.dense)]
    assert sizes[1] >= 4 * LARGE[0] * LARGE[1]
    assert sizes[0] <= sizes[1] / 10
    assert sizes[0] < 4 * LARGE[0] * LARGE[1]
