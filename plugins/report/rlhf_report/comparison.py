"""The page of several runs: one chart per metric of a stage, one colour per run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

import rlhf_report.charts as charts
from rlhf_report.charts import Chart, Line, lines
from rlhf_report.pages import LEAST, Page, in_order, machine, render, slug, stretches
from rlhf_report.run_reader import ReportedRun, ReportedStage

PLACES = {"dir", "model.tokenizer", "train_data", "eval_data"}
"""Fields with paths, which differ between runs that compute the same."""


@dataclass(frozen=True)
class Compared:
    """A stage in all runs. last: (metric, [each run's value at the saved model's update, None without one]).

    differences: (field, [its value in each run]).
    """

    name: str
    id: str
    runs: tuple[ReportedStage | None, ...]
    last: tuple[tuple[str, tuple[float | None, ...]], ...]
    differences: tuple[tuple[str, tuple[str, ...]], ...]
    groups: tuple[tuple[str, tuple[Chart, ...]], ...]


def page(runs: Sequence[ReportedRun]) -> str:
    """Return the page as HTML. Runs are named by the ends of their paths."""
    made = Page(problems=[f"{run.name}: {problem}" for run in runs for problem in run.problems])
    labels = names([run.dir.as_posix() for run in runs])
    stages = list(dict.fromkeys(stage.name for run in runs for stage in run.stages))
    lengths = [len(points.steps) for run in runs for s in run.stages for points in s.metrics.values()]
    cut = stretches(sum(length >= LEAST for length in lengths))
    compared: list[Compared] = []
    for name in stages:
        stage_runs = [run.stage(name) for run in runs]
        compared.append(_compare_stage(name, stage_runs, labels, made, cut, [stage.id for stage in compared]))
    longest = max(lengths, default=0)
    return render(
        "compare.html.j2",
        made,
        title=" · ".join(labels),
        runs=list(zip(labels, runs, map(machine, runs), strict=True)),
        stages=compared,
        thinned=cut if longest > 2 * cut else 0,
        longest=longest,
    )


def names(paths: Sequence[str]) -> list[str]:
    """Return the shortest path endings that differ; numbered if the same path is given twice."""
    parts = [path.strip("/").split("/") for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        short = ["/".join(part[-count:]) for part in parts]
        if len(set(short)) == len(set(paths)):
            break
    return [name if short.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(short, 1)]


def _compare_stage(
    name: str, runs: list[ReportedStage | None], labels: list[str], made: Page, cut: int, taken: list[str]
) -> Compared:
    id = slug(f"stage-{name}", taken)
    existing = [stage for stage in runs if stage is not None]
    metrics = list(dict.fromkeys(metric for stage in existing for metric in stage.metrics))
    groups: dict[str, list[Chart]] = {}
    count = 0
    for kind, together in charts.charts(metrics):
        for metric in together:
            drawn = _curves(metric, runs, labels, kind.unit)
            if drawn:
                title = kind.title if together == [metric] else f"{metric}{', GB' * (kind.unit > 1)}"
                chart = lines(f"{id}-{count}", title, drawn, cut, log=kind.log)
                groups.setdefault(kind.group, []).append(made.add(chart))
                count += 1
    last = last_values(metrics, runs)
    ordered = tuple((title, tuple(charts)) for title, charts in in_order(groups))
    return Compared(name, id, tuple(runs), last, tuple(differences(runs)), ordered)


def _curves(
    metric: str, runs: Sequence[ReportedStage | None], labels: Sequence[str], unit: float
) -> list[Line]:
    """Return a metric's curve of each run that logged enough of it, in the run's colour."""
    logged = [None if stage is None else stage.metrics.get(metric) for stage in runs]
    return [
        Line(label, points.scaled(unit), colour)
        for colour, (label, points) in enumerate(zip(labels, logged, strict=True))
        if points is not None and len(points.steps) >= LEAST
    ]


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
