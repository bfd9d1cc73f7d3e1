"""Read the metrics of a recipe from its run: what its stages logged, and what the oracle finds in the saved models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    "early": lambda values: float(np.mean(values[1:4] or values)),
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
    Measure("loss", "early"),
    Measure("loss", "end"),
    Measure("grad_norm", "start", "positive"),
    Measure("grad_norm", "early", "positive"),
    Measure("grad_norm", "end", "positive"),
    Measure("learning_rate", "start"),
    Measure("learning_rate", "middle"),
    Measure("learning_rate", "last"),
    Measure("num_tokens", "start"),
    Measure("num_tokens", "last"),
)
OF_PAIRS = (
    Measure("rewards/chosen", "end"),
    Measure("rewards/rejected", "end"),
    Measure("rewards/accuracies", "end", "share"),
    Measure("logps/chosen", "start"),
    Measure("logps/chosen", "end"),
    Measure("logps/rejected", "start"),
    Measure("logps/rejected", "end"),
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
        *OF_PAIRS,
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
        Measure("kl", "early"),
        Measure("kl", "end"),
        Measure("clip_ratio/region_mean", "start", "tiny"),
        Measure("clip_ratio/low_mean", "early"),
        Measure("clip_ratio/high_mean", "early"),
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
    "kto": (
        *EVERY,
        *OF_PAIRS,
        Measure("kl", "start", "tiny"),
        Measure("kl", "early"),
        Measure("kl", "end"),
        Measure("eval_loss", "last"),
        Measure("eval_kl", "last"),
        Measure("eval_rewards/margins", "last"),
    ),
    "online_dpo": (
        *EVERY,
        *OF_PAIRS,
        Measure("reward", "start"),
        Measure("reward", "middle"),
        Measure("reward", "end"),
        Measure("rewards/margins", "middle"),
        Measure("rewards/margins", "end"),
        Measure("frac_tied", "start"),
        Measure("frac_tied", "end"),
        Measure("completions/mean_length", "start"),
        Measure("completions/mean_length", "end"),
        Measure("sampling/logp_difference_mean", "largest", "tiny"),
        Measure("eval_reward", "last"),
    ),
}
SAMPLING = ("grpo", "online_dpo")
"""The trainers whose policies sample what they learn from."""
FOUND = {
    "nll": "positive",
    "end_nll": "positive",
    "greedy": "share",
    "accuracy": "share",
    "lead": "value",
    "norms": "value",
    "matrices": "value",
    "lengths": "tiny",
    "rewards": "tiny",
    "advantages": "tiny",
    "difference": "tiny",
}
"""The scales of what is found in saved models and samples."""
NAME = "rewards.py:right"
SCORED = 64
"""Samples that the oracle scores as a reward model, one by one."""


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


def repeats(name: str, trainers: Mapping[str, str]) -> bool:
    """Whether a metric differs by rounding alone each time a seed is run: nothing before it was sampled from a policy
    that had moved. `trainers` names each stage's trainer.
    """
    stage, _, metric = name.partition("/")
    early = metric.endswith((".start", ".early"))
    return (trainers[stage] not in SAMPLING or early) and scale_of(name) != "tiny"


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
    if samples := [
        row for file in sorted((stage / "samples").glob("update-*.jsonl")) for row in read_rows(file)
    ]:
        yield from of_samples(samples, stage, data)


def of_samples(samples: Rows, stage: Path, data: Path) -> Iterator[tuple[str, float]]:
    """Mean errors of what a rollout's samples say: rewards, advantages and lengths, computed again from their texts."""
    config = json.loads((stage / "stage.json").read_text())["config"]
    yield (
        "lengths",
        float(np.mean([abs(s["length"] - len(s["completion"].split()) - s["finished"]) for s in samples])),
    )
    for reward in config["rewards"]:
        if reward["name"] == "model":
            oracle = Oracle(stage.parent / reward["model"].replace(".", "/artifacts/"))
            ended = [row for row in samples if row["finished"]][:SCORED]
            scores = [oracle.score(row["prompt"] + row["completion"]) for row in ended]
            yield "rewards", float(np.mean(np.abs([s["rewards"]["model"] for s in ended] - np.array(scores))))
        else:
            asked = {row["prompt"]: row for row in read_rows(data / "prompts.jsonl")}
            grades = [
                grade(s["completion"], *(asked[s["prompt"]][key] for key in ("word", "count")))
                for s in samples
            ]
            yield "rewards", float(np.mean(np.abs([s["rewards"][NAME] for s in samples] - np.array(grades))))
    if "advantage" in config and config["advantage"]["name"] == "group" and config["kl"]["place"] == "loss":
        grouped = np.array([row["reward"] for row in samples]).reshape(-1, config["num_generations"])
        deviations = grouped - grouped.mean(-1, keepdims=True)
        expected = deviations / (grouped.std(-1, ddof=1, keepdims=True) + 1e-4)
        yield "advantages", float(np.mean(np.abs([row["advantage"] for row in samples] - expected.ravel())))


def differences(one: Path, other: Path, stages: Sequence[str]) -> dict[str, float]:
    """How far the models of two runs of one recipe lie apart."""
    return {
        f"{stage}/oracle/difference": difference(
            one / stage / "artifacts/model", other / stage / "artifacts/model"
        )
        for stage in stages
    }
