"""Metrics that need the scores of all pairs together, in float64 NumPy on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 10
"""Bins of the calibration error, equally wide over probabilities from 0.5 to 1."""
HISTOGRAM_BINS = 40


def measures(
    chosen: NDArray[Any],
    rejected: NDArray[Any],
    lengths: NDArray[Any],
    subsets: Sequence[str | None] = (),
) -> dict[str, float]:
    """Compute the metrics of a set of pairs that training does not have.

    chosen, rejected: [pairs], scores in reward units. lengths: int [pairs, 2], tokens of the chosen and of the
    rejected sequence. subsets: the part of the data that each pair belongs to, or None; empty: there are no parts.
    """
    scores = {"chosen": np.asarray(chosen, np.float64), "rejected": np.asarray(rejected, np.float64)}
    metrics = {f"{side}/{name}": value for side, x in scores.items() for name, value in summary(x).items()}
    longer = lengths[:, 0] - lengths[:, 1]
    metrics |= {
        "auc": auc(*scores.values()),
        "calibration_error": calibration_error(scores["chosen"] - scores["rejected"]),
        "length_correlation": rank_correlation(np.stack([chosen, rejected], 1).ravel(), lengths.ravel()),
        "longer_wins_accuracy": float(np.mean(longer > 0)),
        "longer_wins_ties": float(np.mean(longer == 0)),
    }
    return metrics | accuracies(scores["chosen"] > scores["rejected"], subsets)


def accuracies(right: NDArray[np.bool_], subsets: Sequence[str | None]) -> dict[str, float]:
    """Return {"accuracy/SUBSET": share of its pairs that are right}."""
    named = [i for i, name in enumerate(subsets) if name is not None]
    names, which, counts = np.unique(
        [str(subsets[i]) for i in named], return_inverse=True, return_counts=True
    )
    shares = np.bincount(which, right[named], len(names)) / counts
    return {f"accuracy/{name}": float(share) for name, share in zip(names, shares, strict=True)}


def summary(x: NDArray[Any]) -> dict[str, float]:
    """Compute mean, standard deviation (n - 1; 0 for a single value), minimum and maximum."""
    std = x.std(ddof=1) if len(x) > 1 else 0.0
    return {"mean": float(x.mean()), "std": float(std), "min": float(x.min()), "max": float(x.max())}


def auc(chosen: NDArray[Any], rejected: NDArray[Any]) -> float:
    """Estimate the chance that any chosen sequence scores above any rejected one; a tie counts one half.

    This is the area under the ROC curve, by the rank sum of Mann and Whitney (1947).
    """
    n, m = len(chosen), len(rejected)
    rank_sum = float(ranks(np.concatenate([chosen, rejected]))[:n].sum())
    return (rank_sum - n * (n + 1) / 2) / (n * m)


def calibration_error(difference: NDArray[Any]) -> float:
    """Compute the expected calibration error (Guo et al. 2017) of σ(chosen − rejected) as P(chosen is better).

    Chosen is better in every pair as written, so that a probability of 1 would always be calibrated. Hence each pair
    counts in both orders: predicted σ(d), true, and predicted σ(−d), false. The two are mirror images, so one is
    enough: p = σ(|d|), the confidence in the sequence that scores higher, in bins over [0.5, 1]; it is right where that
    sequence is the chosen one, and a tie counts one half. The error is the sum over bins of
    (pairs in the bin / all pairs) · |share that is right − mean p|.
    """
    p, right, at = _binned(difference)
    return float(np.abs(np.bincount(at, right - p)).sum() / len(p))


def calibration_bins(difference: NDArray[Any]) -> list[dict[str, float]]:
    """Return the non-empty bins of `calibration_error`: `pairs`, mean `confidence`, share `right`."""
    p, right, at = _binned(difference)
    pairs, confidence, share = (np.bincount(at, weights, BINS) for weights in (None, p, right))
    return [
        {"pairs": int(n), "confidence": float(c / n), "right": float(r / n)}
        for n, c, r in zip(pairs, confidence, share, strict=True)
        if n
    ]


def _binned(difference: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.intp]]:
    """Compute for each pair the confidence, whether it is right (one half for a tie), and its bin."""
    p = 1.0 / (1.0 + np.exp(-np.abs(difference)))
    right = np.where(difference == 0, 0.5, difference > 0)
    return p, right, np.minimum(((p - 0.5) * 2 * BINS).astype(np.intp), BINS - 1)


def histograms(chosen: NDArray[Any], rejected: NDArray[Any]) -> dict[str, list[float]]:
    """Return `edges`, in reward units, and the number of `chosen` and `rejected` scores between them."""
    edges = np.histogram_bin_edges(np.concatenate([chosen, rejected]), HISTOGRAM_BINS)
    counts = {"chosen": np.histogram(chosen, edges)[0], "rejected": np.histogram(rejected, edges)[0]}
    return {"edges": edges.tolist(), **{side: count.tolist() for side, count in counts.items()}}


def rank_correlation(x: NDArray[Any], y: NDArray[Any]) -> float:
    """Compute Spearman's correlation of x and y, between −1 and 1; NaN where either is constant."""
    a, b = (rank - rank.mean() for rank in (ranks(x), ranks(y)))
    size = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / size) if size else float("nan")


def ranks(x: NDArray[Any]) -> NDArray[np.float64]:
    """Rank the values from 1 for the smallest; equal values share their mean rank."""
    _, which, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[which]
