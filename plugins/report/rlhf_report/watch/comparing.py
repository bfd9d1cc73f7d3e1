"""Two to six runs beside each other: what differs in their configuration, their metrics, the same prompts' replies."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import rlhf_report.charts as charts
from rlhf_core.hidden import scrub
from rlhf_report.run_reader import ReportedStage
from rlhf_report.samples import text_of
from rlhf_report.watch.listing import important, state_of
from rlhf_report.watch.rollout_view import Sampled, completion, read_sampled
from rlhf_report.watch.run_view import KEY, WatchedRun, rollout_updates, shown_charts

PROMPTS = 20
PLACES = {"dir", "model.tokenizer", "train_data", "eval_data"}
"""Fields with paths, which differ between runs that compute the same."""


def compared(runs: Sequence[WatchedRun]) -> dict[str, Any]:
    """Compare runs, stage by stage of the same name."""
    reported = [run.reported(run.open()) for run in runs]
    names = list(dict.fromkeys(stage.name for run in reported for stage in run.stages))
    labels = short_names([run.path.as_posix() for run in runs])
    return {
        "runs": [
            {
                "id": run.id,
                "name": label,
                "dir": str(run.path),
                "state": state_of(of.files, run.events())[0],
                "seconds": of.seconds,
            }
            for label, run, of in zip(labels, runs, reported, strict=True)
        ],
        "stages": [_stage(name, [run.stage(name) for run in reported]) for name in names],
    }


def _stage(name: str, stages: Sequence[ReportedStage | None]) -> dict[str, Any]:
    there = [stage for stage in stages if stage is not None]
    every = list(dict.fromkeys(metric for stage in there for metric in stage.metrics))
    return {
        "name": name,
        "metrics": every,
        "key": [each for each in important(every) if not each.startswith(charts.EVAL)][:KEY],
        "charts": shown_charts(every),
        "saved": [None if stage is None else stage.saved for stage in stages],
        "last": [{"name": metric, "values": list(values)} for metric, values in last_values(every, stages)],
        "differences": [
            {"name": field, "values": [scrub(value) for value in values]}
            for field, values in differences(stages)
        ],
        "prompts": _prompts(stages),
    }


def _prompts(stages: Sequence[ReportedStage | None]) -> list[dict[str, Any]]:
    """Return the prompts that the newest rollouts of two runs or more have, with a completion of each.

    The completion is the one in the middle by reward.
    """
    by_run = [{} if stage is None else _middle_completions(stage) for stage in stages]
    prompts = list(dict.fromkeys(prompt for found in by_run for prompt in found))
    shared = [prompt for prompt in prompts if sum(prompt in found for found in by_run) > 1]
    rows = []
    for prompt in shared[:PROMPTS]:
        each = [found.get(prompt) for found in by_run]
        row = next(one["row"] for one in each if one is not None)
        shown = [
            None if one is None else {name: one[name] for name in ("text", "reward", "update")}
            for one in each
        ]
        rows.append({"row": row, "prompt": prompt, "completions": shown})
    return rows


NEWEST = 8
"""Rollouts of a run that are searched for prompts which others have, too."""


def _middle_completions(stage: ReportedStage) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for update in reversed(rollout_updates(stage.files)[-NEWEST:]):
        rollout = read_sampled(stage.files, update)
        if rollout is not None:
            found = _of_rollout(rollout) | found
    return found


def _of_rollout(rollout: Sampled) -> dict[str, dict[str, Any]]:
    found = {}
    for place, row in enumerate(rollout.rows):
        start = place * rollout.group
        members = [
            completion(rollout, i) for i in range(start, min(start + rollout.group, len(rollout.samples)))
        ]
        members.sort(key=lambda one: one["reward"] or 0.0)
        prompt = text_of(rollout.samples[start].get("prompt"))
        found[prompt] = members[len(members) // 2] | {"row": row, "update": rollout.update}
    return found


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the shortest path endings that differ; numbered if the same path is given twice."""
    parts = [path.strip("/").split("/") for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        short = ["/".join(part[-count:]) for part in parts]
        if len(set(short)) == len(set(paths)):
            break
    return [name if short.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(short, 1)]


def last_values(
    metrics: Sequence[str], runs: Sequence[ReportedStage | None]
) -> tuple[tuple[str, tuple[float | None, ...]], ...]:
    """Return the most important metrics with their values of each saved model."""
    important = [name for key in charts.key_metrics(metrics) for name in (key, charts.EVAL + key)]
    return tuple(
        (metric, tuple(_last_value(metric, stage) for stage in runs))
        for metric in important
        if metric in metrics
    )


def _last_value(metric: str, stage: ReportedStage | None) -> float | None:
    if stage is None or metric not in stage.metrics:
        return None
    return stage.metrics[metric].value_at(stage.saved)


def differences(runs: Sequence[ReportedStage | None]) -> list[tuple[str, tuple[str, ...]]]:
    """List configuration fields, and the seed, that differ between runs; of paths, only the last part counts."""
    configs = [
        {}
        if s is None
        else {"seed": s.files.spec.get("seed"), "trainer": s.trainer, **charts.flat(_without_seed(s))}
        for s in runs
    ]
    fields = dict.fromkeys(field for config in configs for field in config)
    rows = []
    for field in fields:
        values = [config.get(field) for config in configs]
        compared = [
            os.path.basename(str(v)) if field in PLACES else json.dumps(v, default=str) for v in values
        ]
        if len(set(compared)) > 1:
            rows.append((field, tuple(_written(v) for v in values)))
    return rows


def _written(value: object) -> str:
    if value in (None, [], {}):
        return "–"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _without_seed(stage: ReportedStage) -> dict[str, object]:
    """Drop the stage's `seed`, which is empty if the pipeline's applies; the record has the resolved one."""
    return {key: value for key, value in stage.config.items() if key != "seed"}
