"""The page of one run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from rlhf_core.report import groups, samples
from rlhf_core.report.charts import Chart, Line, band, bars, histogram, lines, reliability
from rlhf_core.report.flow import pictures
from rlhf_core.report.page import Page, render, slug, stretches
from rlhf_core.report.run import Run, StageRun
from rlhf_core.report.series import Points
from rlhf_core.report.sides import Completions
from rlhf_core.report.timing import Part, parts
from rlhf_core.report.values import table

LEAST = 2
"""Points that make a curve."""


@dataclass(frozen=True)
class Row:
    """One metric of a table."""

    name: str
    first: float
    last: float
    least: float
    largest: float
    points: int


@dataclass(frozen=True)
class KeyRow:
    """One metric of the short table, in training and held out."""

    name: str
    train: Row | None
    held_out: Row | None


@dataclass(frozen=True)
class StageView:
    """One stage as the page shows it. groups: (title, its charts)."""

    run: StageRun
    id: str
    facts: tuple[str, ...]
    way_on: str
    key: tuple[KeyRow, ...]
    rows: tuple[Row, ...]
    groups: tuple[tuple[str, tuple[Chart, ...]], ...]
    completions: Completions | None
    pairs: tuple[samples.ScoredPair, ...]
    parts: tuple[Part, ...]


def page(run: Run) -> str:
    """The page as HTML."""
    made = Page(problems=list(run.problems))
    curves = [c for stage in run.stages for _, names in drawn_charts(stage) for c in names]
    cut = stretches(len(curves))
    views: list[StageView] = []
    for stage in run.stages:
        views.append(_view(stage, run, made, cut, [view.id for view in views]))
    across, down = pictures(run.stages) if run.stages else (None, None)
    began = [stage.sessions[0].began for stage in run.stages if stage.sessions]
    return render(
        "report.html.j2",
        made,
        title=run.name,
        run=run,
        stages=views,
        across=across,
        down=down,
        began=datetime.fromtimestamp(min(began)).astimezone().strftime("%d %B %Y, %H:%M") if began else "",
        machine=machine(run),
        versions=versions(run),
        thinned=cut if any(len(p.steps) > 2 * cut for s in run.stages for p in s.metrics.values()) else 0,
        longest=max((len(p.steps) for s in run.stages for p in s.metrics.values()), default=0),
    )


def machine(run: Run) -> str:
    """`1 × cpu, jax 0.10.2, Python 3.11.7`; empty where no event tells."""
    said = run.machine
    if not said:
        return ""
    device = str(said.get("device", said.get("platform", "")))
    told = [f"{said.get('devices', '?')} × {device}"]
    if said.get("processes", 1) != 1:
        told.append(f"{said['processes']} processes")
    told += [f"{label} {said[key]}" for key, label in (("jax", "jax"), ("python", "Python")) if key in said]
    return ", ".join(told)


def versions(run: Run) -> str:
    """`rlhf-core 0.1.0, …` of the newest stage that has begun."""
    for stage in reversed(run.stages):
        if found := table(stage.record.get("versions")):
            return ", ".join(f"{name} {version}" for name, version in found.items())
    return ""


def drawn_charts(stage: StageRun) -> list[tuple[groups.Kind, list[str]]]:
    """The charts of a stage's metrics, those that have a curve."""
    found = []
    for kind, names in groups.charts(stage.metrics):
        own = [name for name in names if len(stage.metrics[name].steps) >= LEAST]
        if own:
            found.append((kind, own))
    return found


def _view(stage: StageRun, run: Run, made: Page, cut: int, taken: list[str]) -> StageView:
    id = slug(f"stage-{stage.name}", taken)
    completed, spreads = samples.completions(stage, made.problems)
    found: dict[str, list[Chart]] = {}
    for number, (kind, names) in enumerate(drawn_charts(stage)):
        drawn = [
            Line(name, stage.metrics[name], colour, name.startswith(groups.EVAL))
            for colour, name in enumerate(names)
        ]
        chart = lines(f"{id}-{number}", kind.title, drawn, cut, log=kind.log)
        found.setdefault(kind.group, []).append(made.add(chart))
    for chart in _spread(id, spreads):
        found.setdefault(DISTRIBUTIONS, []).append(made.add(chart))
    for group, chart in _evaluated(id, stage, made):
        found.setdefault(group, []).append(made.add(chart))
    rows = {name: _row(name, points) for name, points in stage.metrics.items()}
    return StageView(
        run=stage,
        id=id,
        facts=tuple(_facts(stage)),
        way_on=_way_on(stage, run),
        key=tuple(
            KeyRow(name, rows.get(name), rows.get(groups.EVAL + name)) for name in groups.key_metrics(rows)
        ),
        rows=tuple(rows[name] for name in sorted(rows)),
        groups=tuple((title, tuple(charts)) for title, charts in in_order(found)),
        completions=completed,
        pairs=tuple(samples.scored_pairs(stage, made.problems)),
        parts=tuple(parts(stage, run.seconds)),
    )


DISTRIBUTIONS = "Distributions"
ORDER = ("Reward", DISTRIBUTIONS, "Accuracy and calibration", "Loss and gradient", "Clip and KL", "Lengths")


def in_order(found: dict[str, list[Chart]]) -> list[tuple[str, list[Chart]]]:
    """Groups as they are read: what the stage is for first."""
    rank = {name: i for i, name in enumerate(ORDER)}
    return sorted(found.items(), key=lambda item: rank.get(item[0], len(ORDER)))


def _spread(id: str, spreads: list[samples.Spread]) -> list[Chart]:
    charts = []
    names = {
        "reward": ("Reward of completions", "reward"),
        "length": ("Length of completions, tokens", "tokens"),
    }
    for spread in spreads:
        title, x = names[spread.name]
        if len(spread.updates) >= LEAST:
            charts.append(band(f"{id}-{spread.name}-band", f"{title}: percentiles", spread))
        ends = {f"update {spread.updates[0]:.0f}": spread.first}
        if len(spread.updates) > 1:
            ends[f"update {spread.updates[-1]:.0f}"] = spread.last
        charts.append(histogram(f"{id}-{spread.name}-histogram", f"{title}: before and after", x, ends))
    return charts


def _evaluated(id: str, stage: StageRun, made: Page) -> Iterator[tuple[str, Chart]]:
    """(group, chart): scores of chosen and rejected replies at the last evaluation, calibration at the first too."""
    found = samples.evaluations(stage, made.problems)
    for row in found[-1:]:
        scores = row["scores"]
        counts = {side: np.asarray(scores[side]) for side in ("chosen", "rejected")}
        title = f"Scores of held-out pairs, update {row['step']}"
        yield DISTRIBUTIONS, bars(f"{id}-scores", title, "score", np.asarray(scores["edges"]), counts)
    if found:
        parts = {f"update {row['step']}": row["calibration"] for row in found}
        title = "Calibration: share right over confidence"
        yield "Accuracy and calibration", reliability(f"{id}-calibration", title, parts)


def _row(name: str, points: Points) -> Row:
    values = points.values
    first, last, least, largest = map(float, (values[0], values[-1], values.min(), values.max()))
    return Row(name, first, last, least, largest, len(values))


def _facts(stage: StageRun) -> Any:
    if stage.updates:
        planned = f" of {stage.planned:,}" if stage.planned and stage.planned != stage.updates else ""
        yield f"{stage.updates:,}{planned} updates"
    if stage.seconds:
        yield groups.clock(stage.seconds)
    if "num_tokens" in stage.metrics:
        yield f"{stage.metrics['num_tokens'].values[-1]:,.0f} tokens"
    if "epoch" in stage.metrics:
        epochs = float(stage.metrics["epoch"].values[-1])
        yield f"{epochs:.3g} epoch{'s' * (epochs != 1)}"
    if len(stage.sessions) > 1:
        yield f"in {len(stage.sessions)} sessions"


def _way_on(stage: StageRun, run: Run) -> str:
    """What to type, for a stage that is not done and not running."""
    if stage.state in ("done", "running") or not run.resolved:
        return ""
    return f"rlhf run {run.dir / 'pipeline.resolved.toml'}"
