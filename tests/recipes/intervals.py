"""Tolerance intervals of a recipe's metrics, from the values of several seeds.

An interval is the prediction interval of one new seed under a normal distribution,

    mean ± t(1 − α/2; n − 1) · s · sqrt(1 + 1/n),

on the scale that suits the metric, where n seeds gave the mean and the n − 1 standard deviation s. α is `LEVEL`: so
small that all intervals of all recipes together hold for 99 of 100 new seeds. That also covers another machine: once
a rounding has changed a sample, a run is as far from the stored ones as a new seed's. No interval is narrower than its
scale's floor, since equal values of a few seeds do not promise equal values for ever.

A seed that was recorded is also compared with itself. What is computed before any sample was drawn from a moved policy
differs by rounding alone, and must be within `NEAR` of its value or of the seeds' standard deviation. That shows faults
which are smaller than the difference between seeds. Where rounding alone moves a metric further, as other vector widths
and numbers of threads show, it must be within `ROUNDINGS` of the largest difference that these made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LEVEL = 0.01 / 400
FEWEST_SEEDS = 10


class Scale(NamedTuple):
    """How a metric is spread, and the least half width of its interval on that scale."""

    logarithmic: bool
    one_sided: bool
    relative: float
    absolute: float


SCALES = {
    "value": Scale(False, False, 0.02, 1e-6),
    "share": Scale(False, False, 0.0, 0.03),
    "positive": Scale(True, False, 0.0, math.log(1.05)),
    "tiny": Scale(True, True, 0.0, math.log(10)),  # only its being large is a fault
}
NEAR, NEAR_SPREAD = 0.02, 0.1
"""How far a recorded seed's metric may be from its value, relative to it and to the seeds' standard deviation."""
ROUNDINGS = 3.0
"""How far a recorded seed's metric may be from its value, relative to the largest difference by rounding alone."""
SMALLEST = 1e-7
"""Added to values on a logarithmic scale: below it lie rounding and zeros."""


class Interval(NamedTuple):
    low: float
    high: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, float | int) and self.low <= value <= self.high


def interval(values: Sequence[float], scale: Scale) -> Interval:
    """The tolerance interval of one metric from its values at FEWEST_SEEDS seeds or more."""
    if len(values) < FEWEST_SEEDS:
        raise ValueError(f"{len(values)} seeds are too few for an interval; {FEWEST_SEEDS} at least")
    x = np.log(np.asarray(values) + SMALLEST) if scale.logarithmic else np.asarray(values, float)
    n, mean = len(x), float(x.mean())
    spread = student(1 - LEVEL / 2, n - 1) * float(x.std(ddof=1)) * math.sqrt(1 + 1 / n)
    half = max(spread, scale.relative * abs(mean), scale.absolute)
    low, high = mean - half, mean + half
    if scale.logarithmic:
        low, high = math.exp(low) - SMALLEST, math.exp(high) - SMALLEST
    return Interval(-math.inf if scale.one_sided else low, high)


def student(probability: float, freedom: int) -> float:
    """Quantile of Student's t distribution."""
    from scipy.stats import t

    return float(t.ppf(probability, freedom))


class Record(NamedTuple):
    """What is stored of a recipe: the interval of each metric, and the values that must come again with their seed."""

    intervals: Mapping[str, Interval]
    values: Mapping[str, Sequence[float]]
    """Of seeds 0, 1, …"""
    rounding: Mapping[str, float] = {}
    """Largest difference from those values on other vector widths and numbers of threads, where it was measured."""

    def near(self, name: str, seed: int) -> Interval | None:
        """Where a metric of a recorded seed must be; None where it needs to be inside its interval alone."""
        if name not in self.values or seed >= len(self.values[name]):
            return None
        value, spread = self.values[name][seed], float(np.std(self.values[name], ddof=1))
        rounding = ROUNDINGS * self.rounding.get(name, 0.0)
        half = max(NEAR * abs(value), NEAR_SPREAD * spread, rounding, SMALLEST)
        return Interval(value - half, value + half)


def outside(values: Mapping[str, float], stored: Record, seed: int) -> dict[str, str]:
    """{metric: what is wrong with it}: outside its interval, not what its seed gave, missing, or new."""
    problems = dict.fromkeys(values.keys() - stored.intervals.keys(), "has no interval")
    problems |= dict.fromkeys(stored.intervals.keys() - values.keys(), "is missing")
    for name in values.keys() & stored.intervals.keys():
        value, (low, high) = values[name], stored.intervals[name]
        near = stored.near(name, seed)
        if not low <= value <= high:
            problems[name] = f"is {value:.6g}, outside {low:.6g} to {high:.6g}"
        elif near is not None and value not in near:
            problems[name] = (
                f"is {value:.6g}, outside {near.low:.6g} to {near.high:.6g}, which this seed gives"
            )
    return dict(sorted(problems.items()))


def read(file: Path) -> Record:
    stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    made = {
        name: Interval(-math.inf if low is None else low, high)
        for name, (low, high) in stored["intervals"].items()
    }
    return Record(made, stored["values"], stored.get("rounding", {}))


def write(file: Path, record: Record, **about: Any) -> None:
    """Keep a record as JSON, a metric per line, with what it was made from."""
    made = {
        name: [None if math.isinf(low) else _rounded(low), _rounded(high)]
        for name, (low, high) in sorted(record.intervals.items())
    }
    values = {name: list(map(_rounded, each)) for name, each in sorted(record.values.items())}
    rounding = {name: _rounded(each) for name, each in sorted(record.rounding.items())}
    parts = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in about.items()]
    tables = {"intervals": made, "values": values} | ({"rounding": rounding} if rounding else {})
    for title, table in tables.items():
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in table.items())
        parts.append(f'  "{title}": {{\n{lines}\n  }}')
    file.parent.mkdir(exist_ok=True)
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _rounded(value: float) -> float:
    return float(f"{value:.7g}")
