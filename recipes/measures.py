"""Read the metrics of a recipe from its run: what its stages logged, and what the oracle finds in the saved models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from data import read_rows
from oracle import Oracle, difference
from rewards import grade

Rows = Sequence[dict[str, Any]]
Window = Callable[[Sequence[float]], float]
WINDOWS: dict[str, Window] = {
    "start": lambda values: values[0],
    "middle": lambda values: float(np.mean(values[len(values) // 3 : -(len(values) // 3) or None])),
    "end": lambda values: float(np.mean(values[-max(len(values) // 3, 1) :])),
    "last": lambda values: values[-1],
    "largest": lambda values: max(values),
}


class Measure(NamedTuple):
    """A logged metric over a window of updates, and the scale of its interval; see `intervals.SCALES`."""

    metric: str
    window: str
    scale: str = "value"


EVERY = (
    Measure("loss", "start"),
    Measure("loss", "end"),
    Measure("grad_norm", "start", "positive"),
    Measure("grad_norm", "end", "positive"),
    Measure("learning_rate", "start"),
    Measure("learning_rate", "middle"),
    Measure("learning_rate", "last"),
    Measure("num_tokens", "last"),
)
OF_TRAINER = {
    "sft": (
        *EVERY,
        Measure("entropy", "start"),
        Measure("entropy", "end"),
        Measure("eval_loss", "last"),
        Measure("eval_entropy", "last"),
    ),
    "reward": (
        *EVERY,
        Measure("accuracy", "end", "share"),
        Measure("margin", "end"),
        Measure("mean_reward", "end"),
        Measure("eval_loss", "last"),
        Measure("eval_accuracy", "last", "share"),
        Measure("eval_margin", "last"),
        Measure("eval_mean_reward", "last"),
    ),
    "dpo": (
        *EVERY,
        Measure("rewards/chosen", "end"),
        Measure("rewards/rejected", "end"),
        Measure("rewards/accuracies", "end", "share"),
        Measure("logps/chosen", "start"),
        Measure("logps/chosen", "end"),
        Measure("logps/rejected", "start"),
        Measure("logps/rejected", "end"),
        Measure("eval_loss", "last"),
        Measure("eval_rewards/margins", "last"),
    ),
    "grpo": (
        *EVERY,
        Measure("reward", "start"),
        Measure("reward", "middle"),
        Measure("reward", "end"),
        Measure("reward_std", "start"),
        Measure("reward_std", "end"),
        Measure("entropy", "start"),
        Measure("entropy", "end"),
        Measure("kl", "start", "tiny"),
        Measure("kl", "end"),
        Measure("clip_ratio/region_mean", "start", "tiny"),
        Measure("clip_ratio/low_mean", "middle"),
        Measure("clip_ratio/high_mean", "middle"),
        Measure("completions/mean_length", "start"),
        Measure("completions/mean_length", "end"),
        Measure("completions/clipped_ratio", "end", "share"),
        Measure("sampling/logp_difference_mean", "largest", "tiny"),
        Measure("dynamic_sampling/rounds", "middle"),
        Measure("dynamic_sampling/dropped", "middle"),
        Measure("eval_reward", "last"),
        Measure("eval_completions/mean_length", "last"),
    ),
}
FOUND = {
    "nll": "positive",
    "end_nll": "positive",
    "greedy": "share",
    "accuracy": "share",
    "lead": "value",
    "norms": "value",
    "matrices": "value",
    "grades": "tiny",
    "difference": "tiny",
}
"""The scales of what is found in files; `grades` compares the rewards in samples with those of their texts."""


def scale_of(name: str) -> str:
    """The scale of a metric by the name that `measured` gives it, STAGE/METRIC.WINDOW or STAGE/oracle/METRIC."""
    metric = name.partition("/")[2]
    if metric.startswith("oracle/"):
        return FOUND[metric.removeprefix("oracle/")]
    return next(
        each.scale
        for table in OF_TRAINER.values()
        for each in table
        if f"{each.metric}.{each.window}" == metric
    )


def measured(run: Path, data: Path, stages: Sequence[str]) -> dict[str, float]:
    """Every metric of a finished run, by its name."""
    return {f"{stage}/{name}": value for stage in stages for name, value in of_stage(run / stage, data)}


def of_stage(stage: Path, data: Path) -> Iterator[tuple[str, float]]:
    rows = read_rows(stage / "metrics.jsonl")
    for metric, window, _ in OF_TRAINER[json.loads((stage / "stage.json").read_text())["trainer"]]:
        values = [float("nan") if row[metric] is None else row[metric] for row in rows if metric in row]
        if values:
            yield f"{metric}.{window}", WINDOWS[window](values)
    yield from (("oracle/" + name, value) for name, value in of_model(stage, data))


def of_model(stage: Path, data: Path) -> Iterator[tuple[str, float]]:
    oracle = Oracle(stage / "artifacts" / "model")
    yield from oracle.sizes().items()
    if "score.weight" in oracle.weights:
        yield from oracle.of_pairs(read_rows(data / "pairs.heldout.jsonl")).items()
        return
    yield from oracle.of_replies(read_rows(data / "right.heldout.jsonl")).items()
    asked = {
        row["prompt"]: row
        for file in ("prompts", "prompts.heldout")
        for row in read_rows(data / f"{file}.jsonl")
    }
    samples = [row for file in sorted((stage / "samples").glob("*.jsonl")) for row in read_rows(file)]
    errors = [
        abs(reward - grade(row["completion"], asked[row["prompt"]]["word"], asked[row["prompt"]]["count"]))
        for row in samples
        for name, reward in row.get("rewards", {}).items()
        if name.endswith(":right")
    ]
    if errors:
        yield "grades", float(np.mean(errors))


def differences(one: Path, other: Path, stages: Sequence[str]) -> dict[str, float]:
    """How far the models of two runs of one recipe lie apart."""
    return {
        f"{stage}/oracle/difference": difference(
            one / stage / "artifacts/model", other / stage / "artifacts/model"
        )
        for stage in stages
    }
