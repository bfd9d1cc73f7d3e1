"""A diagram of the pipeline: boxes for stages, arrows between them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from rlhf_report.charts import clock, flat
from rlhf_report.run_reader import ReportedStage

WIDTH, HEIGHT = 208, 96
ACROSS, BETWEEN = 92, 26
LANE = 26


@dataclass(frozen=True)
class Box:
    """A stage. x, y: its upper left corner. lines: its texts below name and trainer."""

    x: float
    y: float
    name: str
    trainer: str
    state: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Arrow:
    """An arrow. path: SVG path data, ending at the box it enters. x, y: the centre of its label."""

    path: str
    label: str
    x: float
    y: float


@dataclass(frozen=True)
class Picture:
    """A picture, in CSS pixels."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def references(stages: Sequence[ReportedStage]) -> list[tuple[str, str, str]]:
    """Return (from stage, to stage, use) of every STAGE.OUTPUT in a stage's configuration."""
    names = {stage.name for stage in stages}
    uses: dict[tuple[str, str], list[str]] = {}
    for stage in stages:
        for key, value in flat(stage.config).items():
            if not isinstance(value, str):
                continue
            source, dot, output = value.partition(".")
            if dot and source in names - {stage.name} and re.fullmatch(r"\w+", output):
                use = "reward" if key.startswith("reward") else key
                uses.setdefault((source, stage.name), []).append(use)
    return [(a, b, ", ".join(dict.fromkeys(names))) for (a, b), names in uses.items()]


def picture(stages: Sequence[ReportedStage]) -> Picture:
    """Return the picture of at least one stage: columns in the order of what flows, from left to right."""
    edges = references(stages)
    depth: dict[str, int] = {}
    at: dict[str, tuple[float, float]] = {}
    for stage in stages:  # in the order they run, so that references point back
        column = 1 + max((depth.get(a, -1) for a, b, _ in edges if b == stage.name), default=-1)
        row = list(depth.values()).count(column)
        depth[stage.name] = column
        at[stage.name] = 1.0 + column * (WIDTH + ACROSS), 1.0 + row * (HEIGHT + BETWEEN)
    right = max(x for x, _ in at.values()) + WIDTH
    bottom = max(y for _, y in at.values()) + HEIGHT
    arrows, lanes = [], 0
    for a, b, label in edges:
        if depth[b] - depth[a] == 1:
            arrows.append(_straight(at[a], at[b], label))
        else:
            lanes += 1
            arrows.append(_around(at[a], at[b], label, bottom + lanes * LANE))
    boxes = tuple(Box(*at[each.name], each.name, each.trainer, each.state, _lines(each)) for each in stages)
    return Picture(right + 1, bottom + lanes * LANE + (14 if lanes else 1), boxes, tuple(arrows))


def _straight(a: tuple[float, float], b: tuple[float, float], label: str) -> Arrow:
    x1 = a[0] + WIDTH
    y1 = a[1] + HEIGHT / 2
    x2 = b[0]
    y2 = b[1] + HEIGHT / 2
    middle = (x1 + x2) / 2
    path = f"M{x1:g} {y1:g}C{middle:g} {y1:g} {middle:g} {y2:g} {x2 - 2:g} {y2:g}"
    return Arrow(path, label, middle, (y1 + y2) / 2 - 8)


def _around(a: tuple[float, float], b: tuple[float, float], label: str, lane: float) -> Arrow:
    """Draw an arrow below the boxes in between, in its own lane."""
    r = 8
    y = a[1] + HEIGHT
    x1 = a[0] + WIDTH * 0.6
    x2 = b[0] + WIDTH * 0.4
    path = (
        f"M{x1:g} {y:g}V{lane - r:g}Q{x1:g} {lane:g} {x1 + r:g} {lane:g}"
        f"H{x2 - r:g}Q{x2:g} {lane:g} {x2:g} {lane - r:g}V{b[1] + HEIGHT + 2:g}"
    )
    return Arrow(path, label, (x1 + x2) / 2, lane - 6)


def _lines(stage: ReportedStage) -> tuple[str, ...]:
    model = stage.config.get("model")
    lines = []
    if isinstance(model, Mapping):
        size = " × ".join(str(model[k]) for k in ("hidden_size", "num_hidden_layers") if k in model)
        lines.append(f"fresh {model.get('model_type', 'model')} {size}".rstrip())
    elif isinstance(model, str) and not re.fullmatch(r"\w+\.\w+", model):
        lines.append(_short(model))
    data = _data(stage.config.get("train_data"))
    if data:
        lines.append(data)
    done = f"{stage.updates:,} updates" if stage.updates else ""
    lines.append(" · ".join(filter(None, [done, clock(stage.seconds) if stage.seconds else ""])))
    return tuple(line for line in lines if line)


def _data(data: Any) -> str:
    if isinstance(data, list):
        return _cut(" + ".join(filter(None, map(_data, data))))
    if isinstance(data, Mapping):
        data = data.get("path", data.get("name"))
    return _short(str(data)) if data else ""


def _short(path: str) -> str:
    """Return the last part of a path, or a whole hub name."""
    return _cut(PurePath(path).name if path.startswith(("/", ".")) or path.count("/") > 1 else path)


def _cut(text: str) -> str:
    return text if len(text) <= 28 else f"{text[:27]}…"
