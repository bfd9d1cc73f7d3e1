"""The power of the sampling test, as its page says it, and as simulated evidence has it."""

import math

import numpy as np
import pytest
from rlhf_audit import power_table, tokens_needed
from rlhf_audit.exact import log_at_most

LAMBDAS = (1 / 2, -1 / 2, 1 / 8, -1 / 8, 1 / 32, -1 / 32)
TOLERANCE = 0.02


def test_the_page_has_the_table(repository):
    assert power_table() in (repository / "docs/explanation/trust.md").read_text(encoding="utf-8")


def test_the_evidence_of_normal_surprisals_is_there_after_so_many_tokens():
    """With log p normal, log e_λ per token is |λ| (gap − tolerance) − λ² V / 2 in the mean."""
    gap, variance = 0.2, 1.0
    needed = tokens_needed(gap, variance)
    draws = gap + math.sqrt(variance) * np.random.default_rng(0).normal(size=4 * needed)
    best = 0.0
    for exponent in LAMBDAS:
        bets = -exponent * draws - exponent**2 * variance / 2 - abs(exponent) * TOLERANCE
        reached = np.flatnonzero(np.cumsum(bets) > math.log(1e9) + math.log(12))
        best = max(best, needed / (reached[0] + 1)) if len(reached) else best
    assert 0.5 < best < 2
    assert tokens_needed(0.03, 3.0) is None


@pytest.mark.parametrize(("theirs", "total", "ours", "drawn"), [(0, 9, 5, 7), (2, 9, 5, 7), (3, 4, 0, 8)])
def test_the_shares_of_two_samplers_by_counting(theirs, total, ours, drawn):
    having = theirs + ours
    fewer = sum(
        math.comb(total, k) * math.comb(drawn, having - k) for k in range(theirs + 1) if having - k <= drawn
    )
    np.testing.assert_allclose(
        math.exp(log_at_most(theirs, total, ours, drawn)), fewer / math.comb(total + drawn, having)
    )
