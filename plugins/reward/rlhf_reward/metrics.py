"""What the scores of a whole set of pairs say together, in float64 NumPy on the host.

None of these is an average over micro-batches: they need every score at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 10
"""Of the calibration error, equally wide over probabilities from 0.5 to 1."""
HISTOGRAM_BINS = 40


def measures(
    chosen: NDArray[Any],
    rejected: NDArray[Any],
    lengths: NDArray[Any],
    subsets: Sequence[str | None] = (),
) -> dict[str, float]:
    """The metrics of a set of pairs, beside those that training has too.

    chosen, rejected: [pairs], scores in reward units. lengths: int [pairs, 2], tokens of the chosen and of the
    rejected reply. subsets: the part of the data that each pair belongs to, or None; empty: there are no parts.
    """
    scores = {"chosen": np.asarray(chosen, np.float64), "rejected": np.asarray(rejected, np.float64)}
    found = {f"{side}/{name}": value for side, x in scores.items() for name, value in summary(x).items()}
    longer = lengths[:, 0] - lengths[:, 1]
    found |= {
        "auc": auc(*scores.values()),
        "calibration_error": calibration_error(scores["chosen"] - scores["rejected"]),
        "length_correlation": rank_correlation(np.stack([chosen, rejected], 1).ravel(), lengths.ravel()),
        "longer_wins_accuracy": float(np.mean(longer > 0)),
        "longer_wins_ties": float(np.mean(longer == 0)),
    }
    return found | accuracies(scores["chosen"] > scores["rejected"], subsets)


def accuracies(right: NDArray[np.bool_], subsets: Sequence[str | None]) -> dict[str, float]:
    """{"accuracy/SUBSET": share of its pairs that are right}."""
    named = [i for i, name in enumerate(subsets) if name is not None]
    names, which, counts = np.unique(
        [str(subsets[i]) for i in named], return_inverse=True, return_counts=True
    )
    shares = np.bincount(which, right[named], len(names)) / counts
    return {f"accuracy/{name}": float(share) for name, share in zip(names, shares, strict=True)}


def summary(x: NDArray[Any]) -> dict[str, float]:
    """Mean, standard deviation (n - 1; 0 of a single one), least and largest."""
    std = x.std(ddof=1) if len(x) > 1 else 0.0
    return {"mean": float(x.mean()), "std": float(std), "min": float(x.min()), "max": float(x.max())}


def auc(chosen: NDArray[Any], rejected: NDArray[Any]) -> float:
    """The chance that a chosen reply, of any pair, scores above a rejected one, of any pair; a tie counts one half.

    The area under the ROC curve, by the rank sum of Mann and Whitney (1947).
    """
    n, m = len(chosen), len(rejected)
    rank_sum = float(ranks(np.concatenate([chosen, rejected]))[:n].sum())
    return (rank_sum - n * (n + 1) / 2) / (n * m)


def calibration_error(difference: NDArray[Any]) -> float:
    """Expected calibration error (Guo et al. 2017) of σ(chosen − rejected) as the probability that chosen is better.

    As pairs are written that is true of all of them, so that a probability of 1 would always be calibrated. Hence each
    pair counts in both orders: predicted σ(d), true, and predicted σ(−d), false. The two are mirror images, and one
    of them tells all: p = σ(|d|), the confidence in the reply that scores higher, in bins over [0.5, 1]; and whether
    that reply is the chosen one, a tie counting one half. The error is the sum over bins of
    (pairs in the bin / all pairs) · |share that is right − mean p|.
    """
    p, right, at = _binned(difference)
    return float(np.abs(np.bincount(at, right - p)).sum() / len(p))


def calibration_bins(difference: NDArray[Any]) -> list[dict[str, float]]:
    """What `calibration_error` sums over, of each bin that has pairs: `pairs`, mean `confidence`, share `right`."""
    p, right, at = _binned(difference)
    pairs, confidence, share = (np.bincount(at, weights, BINS) for weights in (None, p, right))
    return [
        {"pairs": int(n), "confidence": float(c / n), "right": float(r / n)}
        for n, c, r in zip(pairs, confidence, share, strict=True)
        if n
    ]


def _binned(difference: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.intp]]:
    """Of each pair: the confidence, whether it is right (a tie one half), and its bin."""
    p = 1.0 / (1.0 + np.exp(-np.abs(difference)))
    right = np.where(difference == 0, 0.5, difference > 0)
    return p, right, np.minimum(((p - 0.5) * 2 * BINS).astype(np.intp), BINS - 1)


def histograms(chosen: NDArray[Any], rejected: NDArray[Any]) -> dict[str, list[float]]:
    """`edges`, reward units, and how many of the `chosen` and `rejected` scores lie between them."""
    edges = np.histogram_bin_edges(np.concatenate([chosen, rejected]), HISTOGRAM_BINS)
    counts = {"chosen": np.histogram(chosen, edges)[0], "rejected": np.histogram(rejected, edges)[0]}
    return {"edges": edges.tolist(), **{side: found.tolist() for side, found in counts.items()}}


def rank_correlation(x: NDArray[Any], y: NDArray[Any]) -> float:
    """Spearman's: the correlation of the ranks of x and y, between −1 and 1; NaN where either is constant."""
    a, b = (each - each.mean() for each in (ranks(x), ranks(y)))
    size = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / size) if size else float("nan")


def ranks(x: NDArray[Any]) -> NDArray[np.float64]:
    """1 for the smallest; equal values share the mean of theirs."""
    _, which, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[which]
