"""The evidence of the sampling test in simulation, and the sums that it comes from, against float64 NumPy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlhf_core.rollouts import SamplingTestOptions
from rlhf_core.rollouts.sampling_plan import plan
from rlhf_core.rollouts.sampling_test import LIMIT, Evidence, sum_moments
from rlhf_core.sampling import SamplingOptions
from rlhf_core.surprisal import LAMBDAS, MOMENTS, log_bets
from tests.shared.sampled_values import bet

TOKENS = 1500
"""Of a rollout."""


def distributions(rng: np.random.Generator) -> np.ndarray:
    """Log-probabilities of a rollout's next tokens, float64 [TOKENS, 200], of a mean variance of about 2.3 nats²."""
    logits = rng.normal(scale=2.2, size=(TOKENS, 200))
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def moments(log_p: np.ndarray, chosen: np.ndarray) -> dict[str, np.ndarray]:
    p = np.exp(log_p)
    entropies = -(p * log_p).sum(1)
    named = {
        "logps": log_p[np.arange(len(chosen)), chosen],
        "entropies": entropies,
        "variances": (p * log_p**2).sum(1) - entropies**2,
    }
    return {f"surprisal/{name}": values.astype(np.float32) for name, values in named.items()}


def honest(log_p: np.ndarray) -> np.ndarray:
    return log_p


def rounded(log_p: np.ndarray) -> np.ndarray:
    """To eight bits, as bfloat16 has them."""
    scale = 2.0 ** (np.floor(np.log2(np.abs(log_p))) - 7)
    return np.round(log_p / scale) * scale


def greedy(log_p: np.ndarray) -> np.ndarray:
    return np.where(log_p == log_p.max(1, keepdims=True), 0.0, -np.inf)


def top_5(log_p: np.ndarray) -> np.ndarray:
    return np.where(log_p >= np.sort(log_p, axis=1)[:, -5:-4], log_p, -np.inf)


def temperature(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda log_p: log_p / value


def rollouts_until_stopped(
    sampler: Callable[[np.ndarray], np.ndarray], most: int, seed: int = 0
) -> tuple[int, float]:
    """How many rollouts it takes, most + 1 where they do not suffice, and the largest log M before."""
    rng, evidence, largest = np.random.default_rng(seed), Evidence(), -math.inf
    engine = np.zeros((TOKENS, 2), np.int64)
    for number in range(most):
        log_p = distributions(rng)
        chosen = (sampler(log_p) + rng.gumbel(size=log_p.shape)).argmax(1)
        evidence.bet(number, sum_moments(engine, moments(log_p, chosen), 0.02))
        if evidence.log_mean() >= LIMIT:
            return number + 1, largest
        largest = max(largest, evidence.log_mean())
    return most + 1, largest


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 4.0, 30.0])
def test_bets_have_a_mean_of_at_most_1(scale: float) -> None:
    """Over each distribution, of two tokens and of 50; from float32 values, as runs have them."""
    rng = np.random.default_rng(3)
    for words in (2, 50):
        logits = rng.normal(scale=scale, size=(300, words))
        log_p = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        every = [log_bets(moments(log_p, np.full(300, word)), 0.0) for word in range(words)]
        means = np.einsum("nv,vnb->nb", np.exp(log_p), np.exp(every))
        assert means.max() < 1 + 1e-6
        # Those that are linear have it exactly, the others nearly where one of two tokens is certain or none is.
        np.testing.assert_allclose(means[:, 1::2], 1.0, atol=1e-6)
        if words == 2:
            assert means.min() > 0.99


@pytest.mark.parametrize("sampler", [honest, rounded])
def test_evidence_against_an_honest_sampler_stays_below_1(
    sampler: Callable[[np.ndarray], np.ndarray],
) -> None:
    for seed in range(3):
        taken, largest = rollouts_until_stopped(sampler, 30, seed)
        assert taken == 31
        assert largest < 0


@pytest.mark.parametrize(
    ("sampler", "most"),
    [(greedy, 1), (top_5, 1), (temperature(0.7), 1), (temperature(0.9), 4), (temperature(1.3), 1)],
    ids=["greedy", "top-k 5", "0.7", "0.9", "1.3"],
)
def test_evidence_against_another_distribution_ends_the_run(
    sampler: Callable[[np.ndarray], np.ndarray], most: int
) -> None:
    assert rollouts_until_stopped(sampler, most)[0] <= most


def test_sums_and_evidence_are_by_engine() -> None:
    rng = np.random.default_rng(1)
    log_p = distributions(rng)
    good = (log_p + rng.gumbel(size=log_p.shape)).argmax(1)
    places = np.stack([np.arange(TOKENS) % 2, np.arange(TOKENS) // 1000], axis=1)
    chosen = np.where(places[:, 0] == 1, log_p.argmax(1), good)
    found = moments(log_p, chosen)
    sums = sum_moments(places, found, 0.02)
    assert sums[:, :3].tolist() == [[0, 0, 500], [0, 1, 250], [1, 0, 500], [1, 1, 250]]
    p, here = np.exp(log_p), (places == [1, 0]).all(1)
    surprisal = -log_p[np.arange(TOKENS), chosen]
    np.testing.assert_allclose(sums[2, 3], (surprisal + (p * log_p).sum(1))[here].sum(), rtol=1e-5)
    np.testing.assert_allclose(sums[2, 4], found[MOMENTS[2]][here].sum(), rtol=1e-5)
    each_token = zip(*(found[name][here].astype(np.float64) for name in MOMENTS), strict=True)
    logs = [[bet(*values, exponent) for exponent in LAMBDAS] for values in each_token]
    np.testing.assert_allclose(sums[2, 5:], np.sum(logs, axis=0), rtol=1e-6)
    evidence = Evidence(2)
    evidence.bet(0, sums)
    # The first rollout: M = e_λ · (0 + 1 / 2).
    bets = sums[2:, 5:].sum(0)
    assert evidence.log_mean(1) == pytest.approx(np.logaddexp.reduce(bets) - math.log(2 * 6))
    assert evidence.log_mean(0) < 0 < LIMIT < evidence.log_mean()


@pytest.mark.parametrize(
    ("options", "sampling", "ahead", "said"),
    [
        ((0.02, "update"), {}, (0, 0), "every sampled token, in the training pass; stops .* 0.02 nats"),
        ((0.0, "update"), {}, (0, 0), "logged alone .limits.surprisal_gap = 0"),
        (
            (0.02, "rollout", "those"),
            {},
            (1, 0),
            "pass before .*; in a further pass .* those; logged .* with$",
        ),
        (
            (0.02, "update"),
            {},
            (1, 64),
            "; logged .*; and 64 tokens that each engine draws .*; stops the run",
        ),
        (
            (0.02, "update"),
            {"top_k": 5, "min_p": 0.1},
            (0, 0),
            "one of 8 .* sampling.top_k and .*min_p; stops",
        ),
        ((0.02, "test"), {}, (0, 0), "one of 8 prompts, in a pass without gradient before .*; stops"),
        ((0.02, "update"), {"repetition_penalty": 1.1}, (0, 0), "not applicable: .* sampling.repetition_pen"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_check_says_what_is_tested(options: Any, sampling: Any, ahead: tuple[int, int], said: str) -> None:
    line = plan(SamplingTestOptions(*options), SamplingOptions(**sampling), ahead=ahead[0], draws=ahead[1])
    assert re.search(said, line), line
