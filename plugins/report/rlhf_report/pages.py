"""The page of one run."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from bokeh.resources import Resources
from markupsafe import Markup, escape

import rlhf_report.charts as charts
import rlhf_report.samples as samples
from rlhf_report.charts import Chart, Line, band, bars, clock, histogram, lines, number, reliability
from rlhf_report.diagram import picture
from rlhf_report.run_reader import Points, ReportedRun, ReportedStage, TimeShare, parts
from rlhf_report.samples import Completions, RolloutGroups
from rlhf_report.summary import summary
from rlhf_report.weights import weight_charts

HERE = Path(__file__).parent / "templates"
BUDGET = 700_000
"""Bytes of the page for curves; see `stretches`."""
BYTES = 32
"""Bytes per stretch of a curve: two points of the line and a mean, float32, in base 64."""


@dataclass
class Page:
    """Collect charts and problems in the order of the page."""

    charts: dict[str, Chart] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, chart: Chart) -> Chart:
        self.charts[chart.id] = chart
        return chart


def stretches(curves: int) -> int:
    """Return the number of stretches per curve with which all curves fit the budget: 40 to 300."""
    return int(min(300, max(40, BUDGET / BYTES / max(curves, 1))))


def render(template: str, page: Page, **context: Any) -> str:
    """Render a self-contained HTML page."""
    data = {
        chart.id: {
            "item": chart.item,
            "x": chart.x,
            "colours": [line.colour for line in chart.legend],
            "smooths": chart.smooths,
            "percent": chart.percent,
        }
        for chart in page.charts.values()
    }
    page_template = templates().get_template(template)
    return page_template.render(
        **context,
        problems=page.problems,
        style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        library=library(),
        data=packed(json.dumps(shown(data), separators=(",", ":"), allow_nan=False)),
        version=version("rlhf-core"),
    )


@cache
def templates() -> jinja2.Environment:
    """Return the pages' templates, and the filters that they use."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=shown,
    )
    environment.filters |= {
        "number": number,
        "quantity": charts.quantity,
        "clock": clock,
        "breaks": breaks,
    }
    return environment


@cache
def library() -> str:
    """Return Bokeh's script, compressed, see `packed`; the same for every page."""
    return packed("\n".join(Resources(mode="inline", components=["bokeh"]).js_raw))


CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, marks that reorder text, and surrogates, which cannot be encoded."""


def shown(value: Any) -> Any:
    """Show control characters and marks that reorder text as their escapes, in texts and what holds texts."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, str):
        return CONTROL.sub(lambda match: ascii(match[0])[1:-1], value)
    if isinstance(value, Mapping):
        return {shown(key): shown(each) for key, each in value.items()}
    return [shown(each) for each in value] if isinstance(value, list | tuple) else value


def breaks(name: str) -> Markup:
    """Return a metric's name with optional line breaks after slashes and underscores."""
    return Markup(str(escape(shown(name))).replace("/", "/<wbr>").replace("_", "_<wbr>"))


def packed(text: str) -> str:
    """Compress a text with gzip, in base 64, for the page's script: a third of the size, without any `<`."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode("ascii")


def slug(text: str, taken: Sequence[str] = ()) -> str:
    """Return a unique name for anchors and elements, of letters, digits and hyphens."""
    plain = "".join(c if c.isalnum() and c.isascii() else "-" for c in text.lower()).strip("-") or "x"
    return plain if plain not in taken else slug(f"{plain}-{len(taken)}", taken)


LEAST = 2
"""Fewest points of a curve; an evaluation is drawn as a dot."""
LEAST_VALUES = 50
"""Fewest values of a histogram."""


@dataclass(frozen=True)
class Row:
    """One metric of a table. saved: at the update whose model is saved; the last value, where that is the last."""

    name: str
    saved: float | None
    first: float
    last: float
    least: float
    largest: float
    points: int


@dataclass(frozen=True)
class KeyRow:
    """One metric of the short table, in training and on held-out data."""

    name: str
    train: Row | None
    held_out: Row | None


@dataclass(frozen=True)
class StageView:
    """The content of one stage on the page.

    summary: a sentence on what the stage changed. groups: (title, its charts). zeros: metrics that were always 0, which
    have no chart.
    """

    run: ReportedStage
    id: str
    facts: tuple[str, ...]
    summary: str
    next_command: str
    key: tuple[KeyRow, ...]
    rows: tuple[Row, ...]
    groups: tuple[tuple[str, tuple[Chart, ...]], ...]
    zeros: tuple[str, ...]
    completions: Completions | None
    previews: Completions | None
    rollout: RolloutGroups | None
    pairs: tuple[samples.ScoredPair, ...]
    parts: tuple[TimeShare, ...]


def page(run: ReportedRun) -> str:
    """Return the page as HTML."""
    made = Page(problems=run.problems)
    cut = stretches(sum(len(drawn) for stage in run.stages for _, drawn in drawn_charts(stage)[0]))
    views: list[StageView] = []
    for stage in run.stages:
        views.append(_view(stage, run, made, cut, [view.id for view in views]))
    began = [stage.sessions[0].began for stage in run.stages if stage.sessions]
    return render(
        "report.html.j2",
        made,
        title=run.name,
        run=run,
        stages=views,
        picture=picture(run.stages) if run.stages else None,
        began=datetime.fromtimestamp(min(began)).astimezone().strftime("%d %B %Y, %H:%M") if began else "",
        machine=machine(run),
        versions=versions(run),
        thinned=cut if any(len(p.steps) > 2 * cut for s in run.stages for p in s.metrics.values()) else 0,
        longest=max((len(p.steps) for s in run.stages for p in s.metrics.values()), default=0),
    )


def machine(run: ReportedRun) -> str:
    """Describe the machine, as in `1 × cpu, jax 0.10.2, Python 3.11.7`; empty if no event has it."""
    facts = run.machine
    if not facts:
        return ""
    device = str(facts.get("device", facts.get("platform", "")))
    words = [f"{facts.get('devices', '?')} × {device}"]
    if facts.get("processes", 1) != 1:
        words.append(f"{facts['processes']} processes")
    words += [
        f"{label} {facts[key]}" for key, label in (("jax", "jax"), ("python", "Python")) if key in facts
    ]
    return ", ".join(words)


def versions(run: ReportedRun) -> str:
    """Return `rlhf-core 0.1.0, …` of the last stage that began."""
    for stage in reversed(run.stages):
        if recorded := stage.files.spec.get("versions"):
            return ", ".join(f"{name} {version}" for name, version in recorded.items())
    return ""


def drawn_charts(stage: ReportedStage) -> tuple[list[tuple[charts.ChartKind, list[Line]]], list[str]]:
    """Return the charts of a stage's metrics with their lines, and the metrics left out because all are always 0."""
    drawn: list[tuple[charts.ChartKind, list[Line]]] = []
    zeros: list[str] = []
    for kind, names in charts.charts(stage.metrics):
        lines = {
            name: points
            for name in names
            if len((points := stage.metrics[name]).steps) >= LEAST or name.startswith(charts.EVAL)
        }
        if any(points.values.any() for points in lines.values()):
            drawn.append((kind, _lines(lines, kind.unit)))
        else:
            zeros += lines
    return drawn, zeros


def _lines(metrics: Mapping[str, Points], unit: float) -> list[Line]:
    """Make the lines of a chart, one for metrics that are equal."""
    lines: list[Line] = []
    for name, points in metrics.items():
        held_out, scaled = name.startswith(charts.EVAL), points.scaled(unit)
        twin = next((i for i, e in enumerate(lines) if e.dashed == held_out and e.points.same(scaled)), None)
        if twin is None:
            lines.append(Line(name, scaled, len(lines), held_out))
        else:
            lines[twin] = replace(lines[twin], label=f"{lines[twin].label} = {name}")
    return lines


def _view(stage: ReportedStage, run: ReportedRun, made: Page, cut: int, taken: list[str]) -> StageView:
    id = slug(f"stage-{stage.name}", taken)
    completed, rollout, spreads = samples.completions(stage, made.problems)
    evaluations = samples.evaluations(stage, made.problems)
    groups: dict[str, list[Chart]] = {}
    with_lines, zeros = drawn_charts(stage)
    for index, (kind, drawn) in enumerate(with_lines):
        chart = lines(f"{id}-{index}", kind.title, drawn, cut, log=kind.log)
        groups.setdefault(kind.group, []).append(made.add(chart))
    for chart in _spread_charts(id, spreads):
        groups.setdefault(DISTRIBUTIONS, []).append(made.add(chart))
    for chart in weight_charts(id, stage, made.problems, cut):
        groups.setdefault(WEIGHTS, []).append(made.add(chart))
    for group, chart in _evaluation_charts(id, evaluations):
        groups.setdefault(group, []).append(made.add(chart))
    rows = {name: _row(name, points, stage.saved) for name, points in stage.metrics.items()}
    return StageView(
        run=stage,
        id=id,
        facts=tuple(_facts(stage)),
        summary=summary(stage, evaluations, completed),
        next_command=_next_command(stage, run),
        key=tuple(_key_rows(stage, rows)),
        rows=tuple(rows[name] for name in sorted(rows)),
        groups=tuple((title, tuple(charts)) for title, charts in in_order(groups)),
        zeros=tuple(zeros),
        completions=completed,
        previews=samples.fixed_prompts(stage, made.problems, "preview"),
        rollout=rollout,
        pairs=tuple(samples.scored_pairs(stage)),
        parts=tuple(parts(stage, run.seconds)),
    )


DISTRIBUTIONS = "Distributions"
WEIGHTS = "Weights"
ORDER = (
    "Reward",
    DISTRIBUTIONS,
    "Accuracy and calibration",
    charts.EPISODES,
    "Loss and gradient",
    "Clip and KL",
    "Lengths",
    WEIGHTS,
)


def in_order(groups: dict[str, list[Chart]]) -> list[tuple[str, list[Chart]]]:
    """Sort groups of charts, the most important first."""
    rank = {name: i for i, name in enumerate(ORDER)}
    return sorted(groups.items(), key=lambda item: rank.get(item[0], len(ORDER)))


def _spread_charts(id: str, spreads: list[samples.Spread]) -> list[Chart]:
    charts = []
    names = {
        "reward": ("Reward of completions", "reward"),
        "length": ("Length of completions, tokens", "tokens"),
    }
    for spread in spreads:
        title, x = names[spread.name]
        if len(spread.updates) >= LEAST and spread.percentiles.any():
            charts.append(band(f"{id}-{spread.name}-band", f"{title}: percentiles", spread))
        ends = {f"update {spread.updates[0]:.0f}": spread.first}
        if len(spread.updates) > 1:
            ends[f"update {spread.updates[-1]:.0f}"] = spread.last
        if min(map(len, ends.values())) >= LEAST_VALUES:
            charts.append(histogram(f"{id}-{spread.name}-histogram", f"{title}: before and after", x, ends))
    return charts


def _key_rows(stage: ReportedStage, rows: Mapping[str, Row]) -> Iterator[KeyRow]:
    """Yield the rows of the short table; of equal metrics, such as `reward` and a single reward's mean, the first."""
    shown: list[list[Points | None]] = []
    for name in charts.key_metrics(rows):
        both = [stage.metrics.get(name), stage.metrics.get(charts.EVAL + name)]
        if not any(all(map(_covers, other, both)) for other in shown):
            shown.append(both)
            yield KeyRow(name, rows.get(name), rows.get(charts.EVAL + name))


def _covers(shown: Points | None, other: Points | None) -> bool:
    """Return whether the values shown are those of the other metric, which may have none; 0 is equal to 0 by chance."""
    return other is None or (shown is not None and bool(shown.values.any()) and shown.same(other))


def _evaluation_charts(id: str, evaluations: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Chart]]:
    """Yield (group, chart): scores of held-out pairs at the last evaluation, calibration at the first and last."""
    evaluations = [row for row in evaluations if "scores" in row]
    for row in evaluations[-1:]:
        scores = row["scores"]
        counts = {side: np.asarray(scores[side]) for side in ("chosen", "rejected")}
        title = f"Scores of held-out pairs, update {row['step']}"
        yield DISTRIBUTIONS, bars(f"{id}-scores", title, "score", np.asarray(scores["edges"]), counts)
    if evaluations:
        parts = {f"update {row['step']}": row["calibration"] for row in evaluations}
        title = "Calibration: accuracy over confidence"
        yield "Accuracy and calibration", reliability(f"{id}-calibration", title, parts)


def _row(name: str, points: Points, saved: int | None) -> Row:
    values = points.values
    first, last, least, largest = map(float, (values[0], values[-1], values.min(), values.max()))
    return Row(name, points.value_at(saved), first, last, least, largest, len(values))


def _facts(stage: ReportedStage) -> Any:
    if stage.updates:
        planned = f" of {stage.planned:,}" if stage.planned and stage.planned != stage.updates else ""
        yield f"{stage.updates:,}{planned} updates"
    if stage.saved is not None:
        yield f"the model of update {stage.saved:,} was saved"
    if stage.seconds:
        yield charts.clock(stage.seconds)
    if "num_tokens" in stage.metrics:
        yield f"{stage.metrics['num_tokens'].values[-1]:,.0f} tokens"
    if "epoch" in stage.metrics:
        epochs = float(stage.metrics["epoch"].values[-1])
        yield f"{epochs:.3g} epoch{'s' * (epochs != 1)}"
    if len(stage.sessions) > 1:
        yield f"in {len(stage.sessions)} sessions"


def _next_command(stage: ReportedStage, run: ReportedRun) -> str:
    """Return the command that continues a stage which is neither done nor running."""
    if stage.state in ("done", "running") or not run.files.text:
        return ""
    return f"rlhf run {run.dir / 'pipeline.resolved.toml'}"
