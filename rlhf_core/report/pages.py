"""The page of one run."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from bokeh.resources import Resources
from markupsafe import Markup, escape

from rlhf_core.pipeline.toml import to_toml
from rlhf_core.report import charts, samples
from rlhf_core.report.charts import Chart, Line, band, bars, clock, histogram, lines, number, reliability
from rlhf_core.report.diagram import pictures
from rlhf_core.report.json_values import table
from rlhf_core.report.run_reader import Part, Points, Run, StageRun, parts
from rlhf_core.report.samples import Completions

HERE = Path(__file__).parent / "page"
BUDGET = 700_000
"""Bytes of the page that the curves may take; see `stretches`."""
BYTES = 32
"""Of one stretch of one curve: two points of the line and a mean, float32, in base 64."""


@dataclass
class Page:
    """Charts and texts, gathered in the order of the page."""

    charts: dict[str, Chart] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, chart: Chart) -> Chart:
        self.charts[chart.id] = chart
        return chart


def stretches(curves: int) -> int:
    """Into how many stretches a run is cut for drawing, so that all curves fit the budget: 40 to 300."""
    return int(min(300, max(40, BUDGET / BYTES / max(curves, 1))))


def render(template: str, page: Page, **context: Any) -> str:
    """The whole page as HTML: nothing in it is loaded from elsewhere."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"number": number, "clock": clock, "breaks": breaks, "toml": toml}
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
    return environment.get_template(template).render(
        **context,
        problems=page.problems,
        style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        library=packed("\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)),
        data=packed(json.dumps(data, separators=(",", ":"), allow_nan=False)),
        version=version("rlhf-core"),
    )


def breaks(name: str) -> Markup:
    """A metric's name, which may be broken after its slashes and underscores."""
    return Markup(str(escape(name)).replace("/", "/<wbr>").replace("_", "_<wbr>"))


def toml(config: Mapping[str, Any]) -> str:
    """A stage's fields as its file would have them."""
    return to_toml({"stage": [config]}).partition("[[stage]]\n")[2]


def packed(text: str) -> str:
    """Base 64 of the text, gzipped: what the page's script unpacks, a third of the size, and no `<` in it."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode("ascii")


def slug(text: str, taken: Sequence[str] = ()) -> str:
    """A name for anchors and elements: letters, digits and hyphens."""
    plain = "".join(c if c.isalnum() and c.isascii() else "-" for c in text.lower()).strip("-") or "x"
    return plain if plain not in taken else slug(f"{plain}-{len(taken)}", taken)


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


def drawn_charts(stage: StageRun) -> list[tuple[charts.Kind, list[str]]]:
    """The charts of a stage's metrics, those that have a curve."""
    found = []
    for kind, names in charts.charts(stage.metrics):
        own = [name for name in names if len(stage.metrics[name].steps) >= LEAST]
        if own:
            found.append((kind, own))
    return found


def _view(stage: StageRun, run: Run, made: Page, cut: int, taken: list[str]) -> StageView:
    id = slug(f"stage-{stage.name}", taken)
    completed, spreads = samples.completions(stage, made.problems)
    found: dict[str, list[Chart]] = {}
    for index, (kind, names) in enumerate(drawn_charts(stage)):
        drawn = [
            Line(name, stage.metrics[name], colour, name.startswith(charts.EVAL))
            for colour, name in enumerate(names)
        ]
        chart = lines(f"{id}-{index}", kind.title, drawn, cut, log=kind.log)
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
            KeyRow(name, rows.get(name), rows.get(charts.EVAL + name)) for name in charts.key_metrics(rows)
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
        yield charts.clock(stage.seconds)
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
