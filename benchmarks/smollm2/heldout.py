"""Measure the final models of both suites on held-out prompts and pairs, with one sampler and one scorer.

    python benchmarks/smollm2/heldout.py [--work grpo reward]

Appends to results/heldout.jsonl; what is there already is not measured again. `value` is a share with its 95 %
interval: of right completions (Wilson's), and of pairs whose right solution scores higher (1.96 standard errors of a
ratio of sums over problems).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import task
from measure import complete, describe, read_rows

from rlhf_core import load_model
from rlhf_core.scoring import Scorer

FILE = task.RESULTS / "heldout.jsonl"
Z = 1.959964
"""The normal distribution's 97.5 % quantile."""


def finals(work: str) -> dict[str, Path]:
    """Return the models to measure; the ones that both began with are called "before"."""
    runs = {name: task.RUNS / f"{work}-{name}" for name in ("ours", "trl")}
    return {"before": task.base(work), "ours": runs["ours"] / "artifacts" / "model", "trl": runs["trl"]}


def sentences() -> Iterator[dict[str, Any]]:
    """Sample a completion of each held-out prompt, with the same random numbers, and judge it."""
    rows = read_rows(task.RUNS / "data" / "words.heldout.jsonl")
    for name, path in finals("grpo").items():
        texts = complete(
            load_model(path),
            [row["prompt"] for row in rows],
            task.SEED,
            temperature=task.TEMPERATURE,
            max_completion_length=task.LONGEST_COMPLETION,
        )
        figures = describe(rows, texts)
        yield {
            "work": "grpo",
            "model": name,
            "count": len(rows),
            **figures["success"],
            "words": figures["words"],
        }


def solutions() -> Iterator[dict[str, Any]]:
    """Score both sides of every held-out pair."""
    pairs = task.pairs("heldout")
    problems = np.unique([pair["problem"] for pair in pairs], return_inverse=True)[1]
    for name, path in finals("reward").items():
        if name == "before":  # a head drawn at random says nothing
            continue
        sequences = [np.array(pair[side]) for pair in pairs for side in ("chosen_ids", "rejected_ids")]
        scores = Scorer.load(path).score_ids(sequences, group=2).reshape(-1, 2)
        right = (scores[:, 0] > scores[:, 1]).astype(np.float64)
        sums = np.bincount(problems, right - right.mean())
        half = Z * math.sqrt(len(sums) / (len(sums) - 1) * (sums**2).sum()) / len(right)
        share = float(right.mean())
        estimate = {"value": share, "low": share - half, "high": share + half}
        yield {"work": "reward", "model": name, "count": len(pairs), **estimate, "scores": scores.tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the final models of both.")
    parser.add_argument("--work", nargs="+", choices=task.WORKS, default=task.WORKS)
    arguments = parser.parse_args()
    measured = {row["work"] for row in task.read(FILE)}
    for work in arguments.work:
        if work not in measured:
            task.append(FILE, {"grpo": sentences, "reward": solutions}[work]())


if __name__ == "__main__":
    main()
