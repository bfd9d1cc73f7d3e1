"""Log-probabilities and entropies against float64 NumPy: values, gradients and memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core import logprobs
from rlhf_core.logprobs import token_logps, token_moments
from rlhf_core.sampling import SamplingOptions
from rlhf_core.sampling.filters import filtered
from tests.shared import logprob_cases as cases

problem, reference = cases.problem, cases.reference


def computed(
    hidden: Any, kernel: Any, targets: Any, g: Any, h: Any, **options: Any
) -> tuple[Any, Any, Any, Any]:
    def total(hidden: Any, kernel: Any) -> tuple[Any, Any]:
        logps, entropies = token_logps(hidden, kernel, targets, entropy=True, **options)
        return jnp.sum(logps * jnp.asarray(g, jnp.float32) + entropies * jnp.asarray(h, jnp.float32)), (
            logps,
            entropies,
        )

    gradient = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
    (d_hidden, d_kernel), (logps, entropies) = gradient(hidden, kernel)
    return logps, entropies, d_hidden, d_kernel


CUTS = [
    {"at_once": ("tokens", 3)},
    {"at_once": ("words", 10)},  # a last block of one word
    {},
]
MORE_CUTS = [
    {"at_once": ("tokens", 100)},
    {"at_once": ("words", 16)},  # one block in full and a rest
    {"at_once": ("words", 100)},
]


@pytest.mark.parametrize(
    ("cut", "temperature", "softcap"),
    [
        *((cut, 1.3, 2.5) for cut in CUTS),
        *(pytest.param(cut, 1.3, 2.5, marks=pytest.mark.long) for cut in MORE_CUTS),
        *((cut, 1.0, None) for cut in ({"at_once": ("tokens", 3)}, {"at_once": ("words", 10)})),
        ({}, 0.7, None),
    ],
    ids=str,
)
def test_values_and_gradients_equal_float64(
    cut: dict[str, tuple[str, int]], temperature: float, softcap: float | None
) -> None:
    arrays = problem()
    expected = reference(*arrays, temperature, softcap)
    actual = computed(*arrays, temperature=temperature, softcap=softcap, **cut)
    for name, a, b in zip(("logps", "entropies", "d_hidden", "d_kernel"), actual, expected, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("cut", [{"at_once": ("tokens", 3)}, {"at_once": ("words", 5)}], ids=str)
def test_absent_ids_are_left_out_of_the_softmax_and_get_no_gradient(cut: dict[str, tuple[str, int]]) -> None:
    """The first and the last block hold none but such ids, which are by far the likeliest."""
    hidden, kernel, targets, g, h = problem()
    absent, present = ((0, 6), (9, 10), (25, 31)), np.r_[6:9, 10:25]
    targets = np.where(targets < 0, -1, np.abs(targets) % len(present))
    kernel = kernel.at[:, np.setdiff1d(np.arange(31), present)].multiply(20.0)
    *expected, d_kernel = reference(hidden, kernel[:, present], targets, g, h, 1.3, 2.5)
    named = np.where(targets < 0, -1, present[targets])
    *actual, d_whole = computed(
        hidden, kernel, named, g, h, temperature=1.3, softcap=2.5, absent=absent, **cut
    )
    for name, a, b in zip(("logps", "entropies", "d_hidden"), actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5, err_msg=name)
    np.testing.assert_allclose(d_whole[:, present], d_kernel, atol=2e-5, rtol=2e-5)
    assert not np.delete(d_whole, present, axis=1).any()


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0], ids=["uniform", "ordinary", "nearly deterministic"])
@pytest.mark.parametrize("cut", [*CUTS, {"at_once": ("words", 5)}, {"kernel": None}], ids=str)
def test_moments_equal_float64_and_leave_values_and_gradients_as_they_are(
    cut: dict[str, Any], scale: float
) -> None:
    """The first and the last block hold none but ids without a token, which are by far the likeliest."""
    hidden, kernel, targets, g, h = problem()
    absent = np.r_[0:6, 9, 25:31]
    kernel = (kernel * scale).at[:, absent].add(50.0)
    targets = np.where((targets < 0) | np.isin(targets, absent), -1, targets)
    options: Any = {"temperature": 1.3, "absent": ((0, 6), (9, 10), (25, 31))}
    if "kernel" in cut:
        hidden, kernel, cut = hidden @ kernel, None, {}
    factors = jnp.asarray(g, jnp.float32), jnp.asarray(h, jnp.float32)

    def total(hidden: Any, kernel: Any, compute: Any, **entropy: Any) -> Any:
        found = compute(hidden, kernel, targets, **entropy, **options, **cut)
        return sum(jnp.vdot(x, factor) for x, factor in zip(found[:2], factors, strict=True)), found

    gradient = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True), static_argnames=("compute", "entropy"))
    gradients, found = gradient(hidden, kernel, compute=token_moments)
    plain_gradients, plain = gradient(hidden, kernel, compute=token_logps, entropy=True)
    weights = np.eye(31) if kernel is None else kernel
    expected = cases.moments(hidden, weights, targets, 1.3, None, absent)
    for name, values in found.named().items():
        np.testing.assert_allclose(values, expected[name], atol=3e-5, rtol=3e-5, err_msg=name)
    for a, b in zip(
        jax.tree.leaves((found[:2], gradients)), jax.tree.leaves((plain, plain_gradients)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("cut", [{}, {"at_once": ("tokens", 3)}, {"kernel": None}], ids=str)
def test_moments_of_what_filters_leave_equal_float64(cut: dict[str, Any]) -> None:
    """The six likeliest tokens, of these until 90 %, and none with less than a twentieth of the largest."""
    hidden, kernel, targets, _, _ = problem()
    logits = np.asarray(hidden, np.float64) @ np.asarray(kernel, np.float64) / 1.3
    given = (hidden @ kernel, None) if "kernel" in cut else (hidden, kernel)
    found = token_moments(
        *given,
        targets,
        temperature=1.3,
        keep=partial(filtered, options=SamplingOptions(top_k=6, top_p=0.9, min_p=0.05)),
        at_once=cut.get("at_once"),
    )
    outside = 0
    for row, k in zip(*np.nonzero(targets >= 0), strict=True):
        masses = np.exp(logits[row, k])
        six = np.argsort(-masses)[:6]
        before = np.cumsum(masses[six]) - masses[six]
        kept = six[(before < 0.9 * masses[six].sum()) & (masses[six] >= 0.05 * masses.max())]
        p = masses[kept] / masses[kept].sum()
        entropy = -(p * np.log(p)).sum()
        np.testing.assert_allclose(found.entropies[row, k], entropy, atol=1e-5)
        np.testing.assert_allclose(
            found.variances[row, k], (p * np.log(p) ** 2).sum() - entropy**2, atol=2e-5
        )
        if targets[row, k] in kept:
            expected = np.log(p[kept == targets[row, k]])
            np.testing.assert_allclose(found.logps[row, k], expected[0], atol=1e-5)
        else:
            assert found.logps[row, k] < -1e29
            outside += 1
    assert 0 < outside < (targets >= 0).sum()


def test_without_entropy_the_log_probs_and_their_gradient_are_the_same() -> None:
    cut: Any = {"at_once": ("tokens", 3)}
    hidden, kernel, targets, g, _ = problem()

    def total(hidden: Any, kernel: Any, entropy: bool) -> Any:
        logps, _ = token_logps(hidden, kernel, targets, entropy=entropy, **cut)
        return jnp.sum(logps * jnp.asarray(g, jnp.float32))

    gradient = jax.jit(jax.grad(total, argnums=(0, 1)), static_argnums=2)
    gradients = [gradient(hidden, kernel, entropy) for entropy in (False, True)]
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert not np.asarray(token_logps(hidden, kernel, targets, **cut)[1]).any()


@pytest.mark.parametrize("cut", [{"at_once": ("tokens", 1)}, {"at_once": ("words", 1)}], ids=str)
def test_large_logits_stay_finite_and_exact(cut: dict[str, tuple[str, int]]) -> None:
    hidden = jnp.full((1, 1, 1), 1.0)
    for words in ([1000.0, 1000.0, -1000.0], [-1000.0, 1000.0, 1000.0]):
        target = np.asarray([[words.index(1000.0)]])
        logps, entropies = token_logps(hidden, jnp.asarray([words]), target, entropy=True, **cut)
        np.testing.assert_allclose(logps, -np.log(2), rtol=1e-6)
        np.testing.assert_allclose(entropies, np.log(2), rtol=1e-6)


@pytest.mark.parametrize(
    ("kernel_dtype", "cut"),
    [(jnp.bfloat16, {"at_once": ("tokens", 3)}), (jnp.float32, {"at_once": ("words", 10)})],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_bfloat16_states_give_float32_log_probs_and_gradients_of_their_own_type(
    kernel_dtype: Any, cut: dict[str, tuple[str, int]]
) -> None:
    hidden, kernel, *rest = problem(jnp.bfloat16)
    expected = reference(hidden, kernel, *rest, 1.0, None)
    actual = computed(hidden, kernel.astype(kernel_dtype), *rest, **cut)
    types = [jnp.float32, jnp.float32, jnp.bfloat16, kernel_dtype]
    assert [x.dtype for x in actual] == types
    for a, b in zip(actual[:2], expected[:2], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)
    for a, b in zip(actual[2:], expected[2:], strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, atol=0.03 * np.abs(b).max())


@pytest.mark.parametrize(
    ("cut", "share"), [({"at_once": ("tokens", 16)}, 1 / 4), ({"at_once": ("words", 128)}, 1 / 8)], ids=str
)
def test_memory_is_that_of_one_chunk_or_block(cut: dict[str, tuple[str, int]], share: float) -> None:
    rows, length, dim, vocab = 4, 512, 8, 4096
    hidden, kernel = jnp.zeros((rows, length, dim)), jnp.zeros((dim, vocab))
    targets = jnp.zeros((rows, length), jnp.int32)

    def total(hidden: Any, kernel: Any) -> Any:
        logps, entropies = token_logps(hidden, kernel, targets, entropy=True, **cut)
        return logps.sum() + entropies.sum()

    analysis = jax.jit(jax.grad(total, argnums=(0, 1))).lower(hidden, kernel).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < rows * length * vocab * 4 * share


def test_chunks_are_chosen_by_the_size_of_their_logits() -> None:
    tokens = logprobs.CHUNK_BYTES["cpu"] // (4 * 8192) * jax.device_count()
    assert logprobs.chunk_size(16, 10**6, 8192) <= tokens // 16
    assert logprobs.chunk_size(16, 10, 8192) == 10
    assert logprobs.chunk_size(10**6, 10, 8192) == 1
    long = logprobs.chunk_size(16, tokens // 16 + 1, 8192)
    assert 2 * long - (tokens // 16 + 1) <= 1  # two halves, not a whole and a remainder
    assert logprobs.chunk_size(1, 10**6, 10**7) >= logprobs.CHUNK_TOKENS


def test_blocks_are_chosen_by_the_size_of_their_logits() -> None:
    words = logprobs.CHUNK_BYTES["cpu"] // (4 * 4096)
    assert logprobs.block_size(4096, words) == words
    assert logprobs.block_size(4096, words + 1) <= words // 2 + logprobs.BLOCK_WORDS
    assert logprobs.block_size(8, 1000) == 1000
    assert logprobs.block_size(10**7, 10**6) == logprobs.BLOCK_WORDS
    assert logprobs.block_size(4096, 151_936) * 4 * 4096 <= logprobs.CHUNK_BYTES["cpu"]


def test_shapes_and_settings_that_do_not_fit_are_refused() -> None:
    hidden, kernel, targets, _, _ = problem()
    with pytest.raises(ValueError, match="do not fit"):
        token_logps(hidden, kernel.T, targets)
    with pytest.raises(ValueError, match="targets"):
        token_logps(hidden, kernel, targets[:, :-1])
    with pytest.raises(ValueError, match="temperature 0"):
        token_logps(hidden, kernel, targets, temperature=0.0)
    with pytest.raises(ValueError, match="must be positive"):
        token_logps(hidden, kernel, targets, at_once=("words", 0))
