"""What the scores of all pairs say together: each against a count of everything, one by one."""

import math

import numpy as np
import pytest
from rlhf_reward.metrics import accuracies, auc, calibration_error, measures, rank_correlation, ranks


def draw_pairs(seed, size, *, coarse):
    """Scores with many ties where `coarse`, lengths with many ties always."""
    draw = np.random.default_rng(seed)
    scores = draw.normal(size=(2, size)) * 2 + [[0.7], [0.0]]
    if coarse:
        scores = np.round(scores * 2) / 2
    return *scores.astype(np.float32), draw.integers(1, 6, (size, 2))


CASES = pytest.mark.parametrize(
    ("seed", "size", "coarse"), [(0, 60, False), (1, 60, True), (2, 3, True), (3, 1, False)]
)


@CASES
def test_auc_counts_every_chosen_against_every_rejected(seed, size, coarse):
    chosen, rejected, _ = draw_pairs(seed, size, coarse=coarse)
    wins = [(c > r) + 0.5 * (c == r) for c in chosen.tolist() for r in rejected.tolist()]
    assert auc(chosen, rejected) == pytest.approx(sum(wins) / size**2, abs=1e-12)


def test_auc_of_what_is_known():
    assert auc(np.array([2.0, 3.0]), np.array([0.0, 1.0])) == 1
    assert auc(np.array([0.0, 1.0]), np.array([2.0, 3.0])) == 0
    assert auc(np.ones(4), np.ones(4)) == 0.5
    # Every pair is right, and yet the scores of one prompt say nothing about another's.
    assert auc(np.array([1.0, 11.0]), np.array([0.0, 10.0])) == 0.75


def sigmoid(d):
    return 1 / (1 + math.exp(-d))


def both_orders(difference):
    """Every pair twice, as (predicted probability, label), in twenty bins over [0, 1]."""
    said = [(sigmoid(s * d), s == 1) for d in difference.tolist() for s in (1, -1)]
    bins = [[(p, label) for p, label in said if min(int(p * 20), 19) == b] for b in range(20)]
    each = [abs(np.mean([q for _, q in b]) - np.mean([p for p, _ in b])) * len(b) for b in bins if b]
    return sum(each) / len(said)


@CASES
def test_calibration_is_that_of_pairs_in_both_orders(seed, size, coarse):
    chosen, rejected, _ = draw_pairs(seed, size, coarse=coarse)
    difference = chosen.astype(np.float64) - rejected
    assert calibration_error(difference) == pytest.approx(both_orders(difference), abs=1e-12)


def test_calibration_of_what_is_known():
    # Right in three of four where it says three quarters; and where it says a half it is never wrong.
    assert calibration_error(np.array([1, 1, 1, -1]) * math.log(3)) == pytest.approx(0, abs=1e-12)
    assert calibration_error(np.zeros(5)) == 0
    assert calibration_error(np.full(5, math.log(3))) == pytest.approx(0.25)
    assert calibration_error(np.full(5, -1000.0)) == pytest.approx(1)
    # Right as often as it says on average, but not where it says it.
    odd = np.array([math.log(9), -math.log(9), math.log(1.5), math.log(1.5)])
    assert calibration_error(odd) == pytest.approx((0.4 + 0.4) / 2)
    draw = np.random.default_rng(0)
    d = np.abs(draw.normal(size=200_000)) * 2
    honest = np.where(draw.random(len(d)) < 1 / (1 + np.exp(-d)), d, -d)
    assert calibration_error(honest) < 0.005
    assert calibration_error(3 * honest) > 0.1


@pytest.mark.parametrize(("seed", "coarse"), [(0, False), (1, True)])
def test_ranks_and_their_correlation(seed, coarse):
    x, y, _ = draw_pairs(seed, 40, coarse=coarse)
    expected = [1 + sum(b < a for b in x) + (sum(b == a for b in x) - 1) / 2 for a in x]
    np.testing.assert_array_equal(ranks(x), expected)
    assert rank_correlation(x, y) == pytest.approx(np.corrcoef(ranks(x), ranks(y))[0, 1], abs=1e-12)
    assert rank_correlation(x, np.exp(3 * x)) == pytest.approx(1)
    assert rank_correlation(x, -x) == pytest.approx(-1)
    assert math.isnan(rank_correlation(x, np.ones(40)))


@CASES
def test_all_metrics_together(seed, size, coarse):
    chosen, rejected, lengths = draw_pairs(seed, size, coarse=coarse)
    subsets = [("maths", "chat", None)[i % 3] for i in range(size)]
    found = measures(chosen, rejected, lengths, subsets)
    expected = {}
    for side, x in (("chosen", chosen), ("rejected", rejected)):
        x = x.astype(np.float64)
        deviation = math.sqrt(((x - x.mean()) ** 2).sum() / (size - 1)) if size > 1 else 0.0
        values = {"mean": sum(x) / size, "std": deviation, "min": min(x), "max": max(x)}
        expected |= {f"{side}/{name}": value for name, value in values.items()}
    expected["auc"] = auc(chosen, rejected)
    expected["calibration_error"] = calibration_error(chosen.astype(np.float64) - rejected)
    every = [(s, n) for i in range(size) for s, n in zip((chosen[i], rejected[i]), lengths[i], strict=True)]
    expected["length_correlation"] = rank_correlation(*map(np.array, zip(*every, strict=True)))
    expected["longer_wins_accuracy"] = sum(a > b for a, b in lengths) / size
    expected["longer_wins_ties"] = sum(a == b for a, b in lengths) / size
    for name in {"maths", "chat"} & set(subsets):
        own = [i for i in range(size) if subsets[i] == name]
        expected[f"accuracy/{name}"] = sum(chosen[i] > rejected[i] for i in own) / len(own)
    assert found == pytest.approx(expected, abs=1e-6, nan_ok=True)
    assert all(type(value) is float for value in found.values())
    assert not any(name.startswith("accuracy/") for name in measures(chosen, rejected, lengths))
    assert accuracies(np.array([True]), [None]) == {}
