"""Measure every reward model on its seed's held-out pairs, all with one scorer.

    python benchmarks/reward/heldout.py

Writes results/heldout.jsonl: a row for each judge and seed, and one for the pairs of all seeds together (seed null).
`accuracy` is [mean, low, high]: the share of pairs whose chosen side is strictly preferred, with its 95 % interval.
Problems, not pairs, are the independent draws: 1.96 standard errors of a ratio of sums over problems.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import task
from rlhf_reward.metrics import measures

from rlhf_core import load_model
from rlhf_core.scoring import Scorer, ScoringContract

FILE = task.RESULTS / "heldout.jsonl"
SIDES = ("chosen_ids", "rejected_ids")
HEADS = 20
"""Untrained heads, each from its own seed."""
Z = 1.959964
"""The normal distribution's 97.5 % quantile."""


class Judged(NamedTuple):
    """What a judge, or the mean of several, says of P held-out pairs of N problems."""

    right: np.ndarray
    """float64 [P]: 1 where it prefers the chosen side, 0 where it does not or the two tie."""
    problems: np.ndarray
    """[P], the text of each pair's problem."""
    auc: float
    length_correlation: float
    spread: list[float]
    """Least and largest accuracy of several judges; empty for one."""


def interval(values: np.ndarray, problems: np.ndarray) -> list[float]:
    """[mean, low, high] of values [P] whose draws are problems."""
    _, at = np.unique(problems, return_inverse=True)
    mean = values.mean()
    residuals = np.bincount(at, values - mean)
    error = math.sqrt(len(residuals) / (len(residuals) - 1) * (residuals**2).sum()) / len(values)
    return [round(float(x), 6) for x in (mean, mean - Z * error, mean + Z * error)]


def lengths(pairs: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """int [P, 2], a solution's tokens."""
    return np.array([[len(pair[side]) - pair["prompt_tokens"] for side in SIDES] for pair in pairs])


def judged(scores: Sequence[np.ndarray], pairs: Sequence[Mapping[str, Any]]) -> Judged:
    """scores: [P, 2] of the chosen and the rejected side, by each judge."""
    found = [measures(*each.T, lengths(pairs)) for each in scores]
    right = np.array([each[:, 0] > each[:, 1] for each in scores], np.float64)
    shares = right.mean(1).tolist() if len(scores) > 1 else []
    return Judged(
        right.mean(0),
        np.array([pair["problem"] for pair in pairs]),
        float(np.mean([each["auc"] for each in found])),
        float(np.mean([each["length_correlation"] for each in found])),
        [min(shares), max(shares)] if shares else [],
    )


def scored(path: Path, pairs: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """float32 [P, 2], by a reward model's directory."""
    return _score(Scorer.load(path), pairs)


def untrained(seed: int, pairs: Sequence[Mapping[str, Any]]) -> list[np.ndarray]:
    """The same by random heads on the pretrained weights."""
    model = load_model(task.base(seed), "score")
    contract, found = ScoringContract.of(model.tokenizer, max_length=None), []
    for draw in range(HEADS):
        # The scale does not matter: scores are linear in the head.
        normal = np.random.default_rng([seed, draw]).standard_normal
        head = {name: jnp.asarray(normal(x.shape), x.dtype) for name, x in model.params["score"].items()}
        changed = model.with_params({**model.params, "score": head})
        found.append(_score(Scorer(changed, contract), pairs))
    return found


def _score(scorer: Scorer, pairs: Sequence[Mapping[str, Any]]) -> np.ndarray:
    sequences = [np.array(pair[side]) for pair in pairs for side in SIDES]
    return scorer.score_ids(sequences, group=2).reshape(-1, 2)


def judges(seed: int) -> dict[str, Judged]:
    """Every judge of this seed that there is."""
    pairs = task.pairs(seed, "heldout")
    scores = {"longer": [lengths(pairs).astype(np.float64)], "untrained": untrained(seed, pairs)}
    directories = {
        "ours": task.directory(seed) / "ours" / "artifacts" / "model",
        "trl": task.directory(seed) / "trl",
    }
    scores |= {name: [scored(path, pairs)] for name, path in directories.items() if path.exists()}
    return {name: judged(each, pairs) for name, each in scores.items()}


def row(name: str, seed: int | None, found: Judged) -> dict[str, Any]:
    return {
        "judge": name,
        "seed": seed,
        "pairs": len(found.right),
        "problems": len(set(found.problems)),
        "accuracy": interval(found.right, found.problems),
        "auc": round(found.auc, 6),
        "length_correlation": round(found.length_correlation, 6),
        "spread": found.spread,
    }


def together(found: Sequence[Judged]) -> Judged:
    """Combine seeds that share no held-out problem: all pairs together, and means of the other measures."""
    return Judged(
        np.concatenate([each.right for each in found]),
        np.concatenate([each.problems for each in found]),
        float(np.mean([each.auc for each in found])),
        float(np.mean([each.length_correlation for each in found])),
        [f(each.spread[i] for each in found) for i, f in enumerate((min, max))] if found[0].spread else [],
    )


def main() -> None:
    warnings.filterwarnings("ignore", "sequences|.*reward head is new")
    every = {seed: judges(seed) for seed in task.SEEDS}
    names = [name for name in every[task.SEEDS[0]] if all(name in each for each in every.values())]
    rows = [row(name, seed, every[seed][name]) for name in names for seed in task.SEEDS]
    pooled = {name: together([every[seed][name] for seed in task.SEEDS]) for name in names}
    rows += [row(name, None, found) for name, found in pooled.items()]
    for name, other in (("ours", "longer"), ("ours", "trl")):
        if {name, other} <= set(names):
            a, b = pooled[name], pooled[other]
            gain = interval(a.right - b.right, a.problems)
            rows.append({"judge": f"{name} - {other}", "seed": None, "accuracy": gain})
    FILE.unlink(missing_ok=True)
    task.append(FILE, rows)


if __name__ == "__main__":
    main()
