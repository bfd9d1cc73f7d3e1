"""Charts as Bokeh documents in JSON, which the page draws when they come into view."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from bokeh.embed import json_item
from bokeh.models import (
    BasicTickFormatter,
    BoxZoomTool,
    ColumnDataSource,
    GlyphRenderer,
    NumeralTickFormatter,
    Range1d,
    Span,
    glyphs,
)
from bokeh.plotting import figure
from numpy.typing import NDArray

from rlhf_report.run_reader import Points, draw
from rlhf_report.samples import PERCENTILES, Spread

EVAL = "eval_"
OTHER = "Other metrics"
EPISODES = "Episodes"


@dataclass(frozen=True)
class ChartKind:
    """One kind of chart. names: patterns of its metrics, with or without `eval_`. log: use a log axis.

    unit: what the values are divided by for the unit in the title.
    """

    group: str
    title: str
    names: tuple[str, ...]
    log: bool = False
    unit: float = 1.0


KINDS = (
    ChartKind("Loss and gradient", "Loss", ("loss",)),
    ChartKind("Loss and gradient", "Gradient norm, before clipping", ("grad_norm",)),
    ChartKind("Loss and gradient", "Gradient norm of each layer", ("grad_norm/*",), log=True),
    ChartKind("Loss and gradient", "Entropy, nats per token", ("entropy",)),
    ChartKind("Reward", "Reward, mean of completions", ("reward", "rewards/*/mean")),
    ChartKind("Reward", "Reward, standard deviation", ("reward_std", "reward_std_all", "rewards/*/std")),
    ChartKind("Reward", "Share of groups whose rewards are all equal", ("frac_reward_zero_std",)),
    ChartKind("Reward", "Failed calls of a reward", ("rewards/*/failed",)),
    ChartKind("Reward", "Share of completions that a reward left unscored", ("rewards/*/unscored",)),
    ChartKind("Reward", "Implicit reward", ("rewards/chosen", "rewards/rejected")),
    ChartKind("Reward", "Log-probability of a completion, nats", ("logps/chosen", "logps/rejected")),
    ChartKind(
        "Reward", "Scores of the pairs: smallest, mean, largest", ("min_reward", "mean_reward", "max_reward")
    ),
    ChartKind("Reward", "Scores of the pairs: mean", ("chosen/mean", "rejected/mean")),
    ChartKind("Reward", "Scores of the pairs: standard deviation", ("chosen/std", "rejected/std")),
    ChartKind("Reward", "Scores of the pairs: extremes", ("chosen/m??", "rejected/m??")),
    ChartKind(
        "Accuracy and calibration",
        "Preference accuracy",
        ("accuracy", "rewards/accuracies", "auc", "accuracy/*"),
    ),
    ChartKind("Accuracy and calibration", "Share of ties", ("ties",)),
    ChartKind("Accuracy and calibration", "Margin, chosen less rejected", ("margin", "rewards/margins")),
    ChartKind("Accuracy and calibration", "Calibration error", ("calibration_error",)),
    ChartKind(
        "Accuracy and calibration",
        "Length as a predictor",
        ("length_correlation", "longer_wins_accuracy", "longer_wins_ties"),
    ),
    ChartKind("Accuracy and calibration", "Pass rate", ("pass@*",)),
    ChartKind("Clip and KL", "KL to the reference, nats per token", ("kl",)),
    ChartKind("Clip and KL", "Share of tokens clipped", ("clip_ratio/*",)),
    ChartKind("Clip and KL", "Sampler against trainer, nats", ("sampling/logp_difference_*",), log=True),
    ChartKind("Clip and KL", "Importance ratio of the sampler", ("sampling/importance_ratio_*",)),
    ChartKind("Lengths", "Completion length, tokens", ("completions/*length",)),
    ChartKind("Lengths", "Share of completions truncated at the limit", ("completions/clipped_ratio",)),
    ChartKind(EPISODES, "Turns per episode", ("episodes/turns",)),
    ChartKind(EPISODES, "Episodes that failed and are left out", ("episodes/failed",)),
    ChartKind(EPISODES, "Share of episodes cut at a limit", ("episodes/cut_ratio",)),
    ChartKind(EPISODES, "Tokens per episode that the environment added", ("episodes/observation_tokens",)),
    ChartKind("Schedule", "Learning rate", ("learning_rate",)),
    ChartKind("Throughput", "Tokens per second", ("tokens_per_second",)),
    ChartKind("Throughput", "Seconds per update", ("step_time", "time/*")),
    ChartKind("Throughput", "Sampled tokens per second", ("rollout/tokens_per_second",)),
    ChartKind("Throughput", "Share of slots with a token", ("useful_fraction",)),
    ChartKind("Throughput", "Dynamic sampling", ("dynamic_sampling/*",)),
    ChartKind("Throughput", "Memory, GB", ("memory/*",), unit=1e9),
)
COUNTERS = ("num_tokens", "epoch")
"""Metrics that grow linearly: shown in the summary, not drawn."""

KEY = (
    "loss",
    "accuracy",
    "rewards/accuracies",
    "auc",
    "calibration_error",
    "margin",
    "rewards/margins",
    "reward",
    "rewards/*/mean",
    "reward_std",
    "frac_reward_zero_std",
    "kl",
    "entropy",
    "completions/mean_length",
    "completions/clipped_ratio",
    "episodes/turns",
    "episodes/failed",
    "tokens_per_second",
    "step_time",
)
"""Metrics of the short table, in this order."""


def base(name: str) -> str:
    return name.removeprefix(EVAL)


def charts(names: Iterable[str]) -> list[tuple[ChartKind, list[str]]]:
    """Group metrics into charts, in the order of KINDS; unknown metrics get a chart each, at the end."""
    left = [name for name in names if base(name) not in COUNTERS]
    grouped: list[tuple[ChartKind, list[str]]] = []
    for kind in KINDS:
        if matching := _ordered(left, kind.names):
            grouped.append((kind, matching))
            left = [name for name in left if name not in matching]
    others: dict[str, list[str]] = {}
    for name in left:
        others.setdefault(base(name), []).append(name)
    for name, metrics in others.items():
        group = EPISODES if name.startswith("episodes/") else OTHER
        grouped.append((ChartKind(group, name, (name,)), metrics))
    return grouped


def key_metrics(names: Iterable[str]) -> list[str]:
    """Return the metrics of the short table, the most important first, without `eval_`."""
    return list(dict.fromkeys(base(name) for name in _ordered(names, KEY)))


def number(value: float | None) -> str:
    """Format a number for a table, short enough for a card: 0.9993, 9,709, 3.00e-04, 1.14e+08."""
    if value is None:
        return "–"
    size = abs(value)
    if size != 0 and (size < 1e-3 or size >= 1e6):
        return f"{value:.2e}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def quantity(value: float | None, name: str) -> str:
    """Format a metric's value for a table, bytes as GB."""
    if value is not None and base(name).startswith("memory/"):
        return f"{value / 1e9:.2f} GB"
    return number(value)


def clock(seconds: float) -> str:
    """Format seconds as 41 s, 2 min 11 s or 3 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def flat(value: object, key: str = "") -> Mapping[str, object]:
    """Return {dotted path: leaf} of a configuration."""
    if isinstance(value, Mapping) and value:
        items = [(f"{key}.{k}" if key else str(k), v) for k, v in value.items()]
    elif isinstance(value, list | tuple) and value:
        items = [(f"{key}[{i}]", v) for i, v in enumerate(value)]
    else:
        return {key: value}
    return {k: v for name, item in items for k, v in flat(item, name).items()}


def _ordered(names: Iterable[str], patterns: tuple[str, ...]) -> list[str]:
    """Return the names that match a pattern, in the order of the patterns; `eval_NAME` follows NAME."""
    ranks = [
        (rank, base(name), name.startswith(EVAL), name)
        for name in names
        if (rank := next((i for i, p in enumerate(patterns) if fnmatchcase(base(name), p)), None)) is not None
    ]
    return [name for *_, name in sorted(ranks)]


HEIGHT = 220
BINS = 30
STROKE, FILL, BOTH, QUIET = "stroke", "fill", "both", "quiet"
FEW = 60
"""Most points to mark, so that a line of few points shows where it was measured."""


@dataclass(frozen=True)
class Legend:
    """One line of a chart. colour: its index in the page's palette. value: the last value, as text."""

    label: str
    colour: int
    value: str
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart. item: input of `Bokeh.embed.embed_item`. x: unit of the horizontal axis. note: a line below the chart.

    smooths: whether the page's slider smooths it. percent: whether its values are percentages.
    """

    id: str
    title: str
    x: str
    legend: tuple[Legend, ...]
    item: Mapping[str, Any]
    note: str = ""
    summary: str = ""
    smooths: bool = False
    percent: bool = False


@dataclass(frozen=True)
class Line:
    """A metric to draw; several that are equal are one, with both names. dashed: held-out data."""

    label: str
    points: Points
    colour: int
    dashed: bool = False


def lines(id: str, title: str, drawn: Sequence[Line], stretches: int, *, log: bool = False) -> Chart:
    """Draw metrics over updates: the logged values, faint, and their means, which the page smooths."""
    log = log and all(line.points.values.min() > 0 for line in drawn)
    fig = _figure(id, log=log)
    missing = sum(line.points.missing for line in drawn)
    # The first is drawn on top.
    for i, line in reversed(list(enumerate(drawn))):
        _draw_line(fig, f"{id}/{i}", line, stretches)
    _set_ranges(fig, drawn, log=log)
    _over_updates(fig)
    _readout(fig, id)
    legend = tuple(Legend(e.label, e.colour, number(e.points.values[-1]), e.dashed) for e in drawn)
    note = f"{missing} logged value{'s' * (missing > 1)} not finite, not drawn." if missing else ""
    summary = "; ".join(f"{line.label}: {_ends(line.points)}" for line in drawn)
    return Chart(id, title, "update", legend, json_item(fig), note, summary, smooths=True)


def _draw_line(fig: figure, id: str, line: Line, stretches: int) -> None:
    """Draw the logged values of a metric, with dots where they are few, and their means."""
    thin = draw(line.points, stretches)
    dash = "dashed" if line.dashed else "solid"
    raw = _source(x=thin.line_x, y=thin.line_y)
    mean = _source(id, x=thin.mean_x, y=thin.mean_y)
    _add(fig, raw, glyphs.Line(x="x", y="y", line_alpha=0.3, line_width=1), STROKE, line.colour)
    _add(fig, mean, glyphs.Line(x="x", y="y", line_width=2, line_dash=dash), STROKE, line.colour)
    if len(thin.line_x) <= FEW:
        size = 4 if len(thin.line_x) > 1 else 8
        _add(fig, raw, glyphs.Scatter(x="x", y="y", size=size, line_color=None), FILL, line.colour)


def _set_ranges(fig: figure, drawn: Sequence[Line], *, log: bool) -> None:
    """Let the ranges of a single update, or of a single value, begin at 0: Bokeh would centre it in a range of 2."""
    if all(len(line.points.steps) == 1 for line in drawn):
        fig.x_range = Range1d(0, 2 * max(float(line.points.steps[0]) for line in drawn) or 1.0)
    low = min(min(line.points.values) for line in drawn)
    high = max(max(line.points.values) for line in drawn)
    if low == high and not log:
        fig.y_range = Range1d(min(0.0, 2 * low), max(0.0, 2 * high) or float(low == 0))


def _ends(points: Points) -> str:
    """Describe the first and the last value."""
    ends = (0, -1) if len(points.steps) > 1 else (0,)
    return ", ".join(f"{number(points.values[i])} at update {points.steps[i]:.0f}" for i in ends)


def band(id: str, title: str, spread: Spread) -> Chart:
    """Draw percentiles of a quantity over updates."""
    fig = _figure(id)
    x, columns = spread.updates, spread.percentiles.T
    for low, high, alpha in ((0, 4, 0.15), (1, 3, 0.25)):
        area = _source(x=x, low=columns[low], high=columns[high])
        _add(fig, area, glyphs.VArea(x="x", y1="low", y2="high", fill_alpha=alpha), FILL, 0)
    for i, values in enumerate(columns):
        source = _source(f"{id}/{i}", x=x, y=values)
        _add(fig, source, glyphs.Line(x="x", y="y", line_width=2 if i == 2 else 0.5), STROKE, 0)
    _over_updates(fig)
    _readout(fig, id)
    names = [f"{p} %" if p != 50 else "median" for p in PERCENTILES]
    legend = tuple(Legend(name, 0, number(v[-1])) for name, v in zip(names, columns, strict=True))
    first, last = number(columns[2][0]), number(columns[2][-1])
    return Chart(id, title, "update", legend, json_item(fig), summary=f"median {first} first, {last} last")


def histogram(id: str, title: str, x: str, parts: Mapping[str, NDArray[Any]]) -> Chart:
    """Draw a histogram of several groups in common bins, as shares of each group."""
    together = np.concatenate(list(parts.values()))
    edges = np.histogram_bin_edges(together, BINS)
    whole = together.size and np.all(together == np.round(together)) and np.ptp(together) <= 2 * BINS
    if whole:  # one bin per integer
        edges = np.arange(together.min() - 0.5, together.max() + 1)
    return bars(id, title, x, edges, {name: np.histogram(v, edges)[0] for name, v in parts.items()})


def bars(id: str, title: str, x: str, edges: NDArray[Any], counts: Mapping[str, NDArray[Any]]) -> Chart:
    """Draw histograms as shares of each group. edges: [bins + 1]; counts: {group: [bins]}."""
    fig = _figure(id, percent=True)
    fig.y_range.start = 0
    legend = []
    for i, (name, count) in enumerate(counts.items()):
        share = np.asarray(count, float) / max(np.sum(count), 1)
        box = _source(left=edges[:-1], right=edges[1:], top=share)
        quad = glyphs.Quad(left="left", right="right", top="top", bottom=0, fill_alpha=0.35, line_width=0.5)
        _add(fig, box, quad, BOTH, i)
        middles = (np.asarray(edges[:-1]) + np.asarray(edges[1:])) / 2
        _add(
            fig,
            _source(f"{id}/{i}", x=middles, y=share),
            glyphs.Line(x="x", y="y", line_alpha=0),
        )
        legend.append(Legend(name, i, ""))
    _readout(fig, id)
    return Chart(id, title, x, tuple(legend), json_item(fig), summary=", ".join(counts), percent=True)


def reliability(id: str, title: str, parts: Mapping[str, Sequence[Mapping[str, float]]]) -> Chart:
    """Draw accuracy over confidence, one point per bin, sized by its pairs; the dashed line is ideal."""
    fig = _figure(id, percent=True)
    fig.xaxis.formatter = _percent()
    ideal = _source(x=np.array([0.5, 1.0]), y=np.array([0.5, 1.0]))
    _add(fig, ideal, glyphs.Line(x="x", y="y", line_dash="dashed", line_width=1), QUIET)
    for i, bins in enumerate(parts.values()):
        confidence, right, pairs = (
            np.array([b[k] for b in bins], float) for k in ("confidence", "right", "pairs")
        )
        size = 5 + 15 * np.sqrt(pairs / max(pairs.sum(), 1))
        source = ColumnDataSource(name=f"{id}/{i}", data={"x": confidence, "y": right, "size": size})
        _add(fig, source, glyphs.Line(x="x", y="y", line_width=1, line_alpha=0.3), STROKE, i)
        dots = glyphs.Scatter(x="x", y="y", size="size", fill_alpha=0.6, line_color=None)
        _add(fig, source, dots, FILL, i)
    _readout(fig, id)
    legend = tuple(Legend(name, i, "") for i, name in enumerate(parts))
    return Chart(id, title, "confidence", legend, json_item(fig), summary=", ".join(parts), percent=True)


def _figure(id: str, *, log: bool = False, percent: bool = False) -> figure:
    fig = figure(
        name=id,
        height=HEIGHT,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools=[BoxZoomTool(dimensions="width")],
        y_axis_type="log" if log else "linear",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_left=52,
        min_border_right=10,
        min_border_top=8,
    )
    for axis in fig.axis:
        axis.axis_line_color = None
        axis.major_tick_line_color = axis.minor_tick_line_color = None
        axis.major_label_text_font = "system-ui, sans-serif"
        axis.major_label_text_font_size = "11px"
        axis.ticker.desired_num_ticks = 5
    if not log:
        fig.yaxis.formatter = _percent() if percent else _plain()
    fig.xaxis.formatter = _plain()
    fig.xgrid.grid_line_color = None
    fig.ygrid.grid_line_width = 1
    return fig


def _over_updates(fig: figure) -> None:
    """Begin the horizontal axis at update 0, before training, in every chart, and mark whole updates."""
    fig.x_range.start = 0
    fig.xaxis.ticker.min_interval = 1


def _plain() -> BasicTickFormatter:
    return BasicTickFormatter(power_limit_low=-8, power_limit_high=6)


def _percent() -> Any:
    return NumeralTickFormatter(format="0 %")


def _readout(fig: figure, id: str) -> None:
    """Add a cursor that follows the pointer or arrow keys: a vertical line, and a mark on every series."""
    fig.add_layout(Span(dimension="height", location=0, visible=False, line_width=1, name=f"{id}/cursor"))
    here = ColumnDataSource(name=f"{id}/here", data={"x": [], "y": [], "colour": []})
    _add(fig, here, glyphs.Scatter(x="x", y="y", size=8, fill_color="colour", line_color=None))


def _add(fig: figure, source: ColumnDataSource, glyph: Any, kind: str = "none", colour: int = 0) -> None:
    """Add a glyph without the copies for selected and muted glyphs that `fig.line` makes.

    kind, colour: which part the page's script paints, and in which of the page's colours.
    """
    glyph.tags = [kind, colour]
    fig.renderers.append(GlyphRenderer(data_source=source, glyph=glyph))


def _source(name: str | None = None, **columns: NDArray[Any]) -> ColumnDataSource:
    return ColumnDataSource(name=name, data={k: np.asarray(v, np.float32) for k, v in columns.items()})
