"""Metrics as arrays, and few enough of them to draw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.report.values import number

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Points:
    """One metric's finite values: `steps`, updates done, and `values`, float64 [points], at least one.

    missing: logged values that were not finite.
    """

    steps: Floats
    values: Floats
    missing: int = 0


@dataclass(frozen=True)
class Drawn:
    """What is drawn of `Points`, float64 [n].

    line_x, line_y: of every stretch, its least and its largest value where they were logged; all points where there
    are few. mean_x, mean_y, count: of every stretch, the means and the number of its points.
    """

    line_x: Floats
    line_y: Floats
    mean_x: Floats
    mean_y: Floats
    count: Floats

    @property
    def thinned(self) -> bool:
        return len(self.line_x) < self.count.sum()


def read_metrics(rows: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Points], list[float]]:
    """({metric: points}, the times) of the rows of a metrics.jsonl; a step told twice counts once."""
    found: dict[str, dict[float, float]] = {}
    missing: dict[str, int] = {}
    times: list[float] = []
    for row in rows:
        step = number(row.get("step"))
        if step is None:
            continue
        if (when := number(row.get("time"))) is not None:
            times.append(when)
        for name, value in row.items():
            if name in ("step", "time"):
                continue
            if (finite := number(value)) is not None:
                found.setdefault(name, {})[step] = finite
            else:
                missing[name] = missing.get(name, 0) + 1
    points = {}
    for name, values in found.items():
        steps = np.array(sorted(values))
        points[name] = Points(steps, np.array([values[s] for s in steps]), missing.get(name, 0))
    return points, times


def draw(points: Points, stretches: int) -> Drawn:
    """At most 2 · `stretches` + 2 points of the line and `stretches` means; the extremes of every stretch are kept."""
    n = len(points.steps)
    if n <= 2 * stretches:
        return Drawn(points.steps, points.values, points.steps, points.values, np.ones(n))
    edges = np.linspace(0, n, stretches + 1).astype(int)
    kept = {0, n - 1}
    for a, b in pairwise(edges):
        kept |= {a + int(points.values[a:b].argmin()), a + int(points.values[a:b].argmax())}
    at, count = sorted(kept), np.diff(edges).astype(float)
    mean_x, mean_y = (np.add.reduceat(x, edges[:-1]) / count for x in (points.steps, points.values))
    return Drawn(points.steps[at], points.values[at], mean_x, mean_y, count)
