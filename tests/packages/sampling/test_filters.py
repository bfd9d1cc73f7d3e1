"""Filters against a sort in float64 NumPy, and the sampler against the distribution it inverts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core.sampling.filters import (
    min_p_filter,
    repetition_penalty,
    sample_token,
    top_k_filter,
    top_k_rows_filter,
    top_p_filter,
)


def masses(rows: int = 16, vocab: int = 97, spread: float = 3.0) -> np.ndarray:
    logits = np.random.default_rng(0).normal(size=(rows, vocab)) * spread
    return np.exp(logits - logits.max(-1, keepdims=True)).astype(np.float32)


def nucleus(mass: np.ndarray, p: float) -> np.ndarray:
    """Which tokens stay: ascending, those whose cumulative probability is at most 1 - p are removed."""
    probability = mass.astype(np.float64) / mass.astype(np.float64).sum()
    order = np.argsort(probability)
    removed = np.cumsum(probability[order]) <= 1 - p
    removed[-1] = False
    stays = np.empty(len(mass), bool)
    stays[order] = ~removed
    return stays


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.7])
def test_the_penalty_makes_seen_tokens_less_likely_whatever_their_sign(penalty: float) -> None:
    rng = np.random.default_rng(0)
    logits, seen = rng.normal(size=(16, 97)).astype(np.float32), rng.random((16, 97)) < 0.3
    expected = logits.astype(np.float64)
    expected[seen & (logits > 0)] /= penalty
    expected[seen & (logits < 0)] *= penalty
    found = np.asarray(repetition_penalty(jnp.asarray(logits), jnp.asarray(seen), penalty))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert ((found - logits)[seen] * (penalty - 1) <= 0).all()


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.1, 3.0, 20.0])
def test_top_p_keeps_the_nucleus(p: float, spread: float) -> None:
    mass = masses(spread=spread)
    kept = np.asarray(top_p_filter(jnp.asarray(mass), p))
    for row, filtered in zip(mass, kept, strict=True):
        np.testing.assert_array_equal(filtered > 0, nucleus(row, p) & (row > 0))
        np.testing.assert_array_equal(filtered[filtered > 0], row[filtered > 0])


def test_top_p_tells_neighbouring_floats_apart_and_keeps_ties_together() -> None:
    a = np.float32(0.25)
    b = np.nextafter(a, np.float32(0))
    mass = jnp.asarray([[1.0, a, b, 0.0]])
    assert (np.asarray(top_p_filter(mass, 0.8)) > 0).tolist() == [[True, True, False, False]]
    tied = jnp.asarray([[1.0, 0.25, 0.25, 0.1]])
    assert (np.asarray(top_p_filter(tied, 0.7)) > 0).tolist() == [[True, True, True, False]]
    certain = jnp.asarray([[0.0, 1.0, 0.0]])
    assert np.asarray(top_p_filter(certain, 1e-6)).tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("k", [1, 5, 97, 200])
def test_top_k_keeps_the_likeliest(k: int) -> None:
    mass = masses()
    kept = np.asarray(top_k_filter(jnp.asarray(mass), k)) > 0
    np.testing.assert_array_equal(kept, mass >= np.sort(mass, -1)[:, ::-1][:, [min(k, 97) - 1]])
    tied = jnp.asarray([[0.5, 1.0, 0.5, 0.2]])
    assert (np.asarray(top_k_filter(tied, 2)) > 0).tolist() == [[True, True, True, False]]


def test_top_k_of_each_row() -> None:
    mass = np.random.default_rng(0).random((5, 50)).astype(np.float32)
    mass[1, :9] = mass[1, 10]  # equally likely ones stay together
    for i, k in enumerate((1, 3, 17, 49, 50)):
        rows = np.asarray(top_k_rows_filter(jnp.asarray(mass), np.full((5, 1), k, np.int32)))
        np.testing.assert_array_equal(rows, top_k_filter(jnp.asarray(mass), k), err_msg=str(i))


def test_min_p_is_relative_to_the_likeliest() -> None:
    mass = masses()
    np.testing.assert_array_equal(
        np.asarray(min_p_filter(jnp.asarray(mass), 0.1)) > 0, mass >= np.float32(0.1)
    )


@pytest.mark.parametrize("vocab", [1, 50, pytest.param(1000, marks=pytest.mark.long)])
def test_draws_follow_the_distribution(vocab: int) -> None:
    count = 200_000
    mass = masses(1, vocab, spread=1.5)[0]
    mass[::3] *= vocab == 1  # holes
    uniforms = jax.random.uniform(jax.random.key(0), (count, 2))
    tokens = np.asarray(
        jax.jit(jax.vmap(lambda u: sample_token(jnp.asarray(mass)[None], u[None])[0]))(uniforms)
    )
    observed = np.bincount(tokens, minlength=vocab)
    expected = mass / mass.sum() * count
    assert not observed[expected == 0].any()
    likely = expected > 20
    chi2 = ((observed - expected)[likely] ** 2 / expected[likely]).sum() / max(likely.sum() - 1, 1)
    assert chi2 < 2.0


def test_a_token_without_mass_is_never_drawn() -> None:
    rng = np.random.default_rng(0)
    mass = masses(512, 300, spread=10.0) * (rng.random((512, 300)) < 0.05)
    mass[:, 7] = np.float32(1e-30)
    just_below_one = np.nextafter(np.float32(1), np.float32(0))
    for u in ([0.0, 0.0], [just_below_one, just_below_one], [0.0, just_below_one], [0.5, 0.5]):
        uniforms = np.tile(np.array(u, np.float32), (512, 1))
        tokens = np.asarray(jax.jit(sample_token)(mass, uniforms))
        assert (mass[np.arange(512), tokens] > 0).all()
