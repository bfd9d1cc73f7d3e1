"""Two to six runs beside each other: what differs in their configuration, their metrics, the same prompts' replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import rlhf_report.charts as charts
from rlhf_core.hidden import scrub
from rlhf_report.comparison import differences, last_values
from rlhf_report.run_reader import ReportedStage
from rlhf_report.watch.listing import important, state_of
from rlhf_report.watch.rollout_view import Sampled, completion, read_sampled, text_of
from rlhf_report.watch.run_view import KEY, WatchedRun, rollout_updates, shown_charts

PROMPTS = 20


def compared(runs: Sequence[WatchedRun]) -> dict[str, Any]:
    """Compare runs, stage by stage of the same name."""
    reported = [run.reported(run.open()) for run in runs]
    names = list(dict.fromkeys(stage.name for run in reported for stage in run.stages))
    return {
        "runs": [
            {
                "id": run.id,
                "name": run.path.name,
                "dir": str(run.path),
                "state": state_of(of.files, run.events())[0],
            }
            for run, of in zip(runs, reported, strict=True)
        ],
        "stages": [_stage(name, [run.stage(name) for run in reported]) for name in names],
    }


def _stage(name: str, stages: Sequence[ReportedStage | None]) -> dict[str, Any]:
    there = [stage for stage in stages if stage is not None]
    metrics = [metric for metric in there[0].metrics if all(metric in stage.metrics for stage in there)]
    every = list(dict.fromkeys(metric for stage in there for metric in stage.metrics))
    return {
        "name": name,
        "metrics": metrics,
        "key": [each for each in important(metrics) if not each.startswith(charts.EVAL)][:KEY],
        "charts": shown_charts(metrics),
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
