"""Charts of weights.jsonl, which `log_weights` writes: norms, updates, zeros, and histograms before and after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_report.run_reader import ReportedStage, number

MOST = 6
"""Parameters that are drawn, those that the last logged update moved most."""
CURVES = {
    "norm": "Norm of parameters",
    "update_ratio": "Size of an update, relative to the parameters",
    "zeros": "Share of parameters that are 0",
}
BINS = 40
Chart = dict[str, Any]
"""A chart beside the metrics: group, title, axis (unit of x), lines of {name, x, y}, and `bars` for histograms."""


def weight_charts(stage: ReportedStage, problems: list[str]) -> Iterator[Chart]:
    """Yield the charts of a stage's weights; rows of another form are left out, and named once in `problems`."""
    logged: dict[int, Mapping[str, Mapping[str, Any]]] = {}
    wrong = 0
    for row in stage.files.weights:
        if isinstance(row.get("step"), int) and _is_whole(row.get("weights")):
            logged[row["step"]] = row["weights"]
        else:
            wrong += 1
    if wrong:
        problems.append(
            f"{stage.name}/weights.jsonl: {wrong} row{'s' * (wrong > 1)} of another form left out"
        )
    if not logged:
        return
    first, last = logged[min(logged)], logged[max(logged)]
    every = sorted(set(first) & set(last), key=lambda name: -last[name]["update_ratio"])
    shown = every[:MOST]
    note = f" ({len(shown)} of {len(every)})" if len(every) > len(shown) else ""
    for key, title in CURVES.items():
        lines = [_line(logged, name, key) for name in shown]
        if any(any(line["y"]) for line in lines):
            yield {"group": "Weights", "title": title + note, "axis": "update", "lines": lines}
    for name in shown:
        edges = np.linspace(*_ends(first[name], last[name]), BINS + 1)
        ends = {f"update {step}": _counts(logged[step][name], edges) for step in (min(logged), max(logged))}
        yield bars("Weights", name, "value", edges, ends)


def bars(
    group: str,
    title: str,
    axis: str,
    edges: NDArray[Any],
    counts: Mapping[str, Sequence[float] | NDArray[Any]],
) -> Chart:
    """Return histograms in common bins, as percentages of each part. edges: [bins + 1]; counts: {part: [bins]}."""
    middles = (edges[:-1] + edges[1:]) / 2
    parts = {name: np.asarray(count, float) for name, count in counts.items()}
    lines = [
        {"name": name, "x": middles.tolist(), "y": (100 * count / max(count.sum(), 1)).tolist()}
        for name, count in parts.items()
    ]
    return {"group": group, "title": f"{title}, %", "axis": axis, "bars": True, "lines": lines}


def _is_whole(weights: Any) -> bool:
    """Return whether a row's weights have all numbers, finite ones."""
    return isinstance(weights, dict) and all(
        isinstance(each, dict)
        and all(number(each.get(key)) is not None for key in (*CURVES, "least", "largest"))
        and isinstance(each.get("counts"), list)
        and bool(each["counts"])
        and all(number(count) is not None for count in each["counts"])
        for each in weights.values()
    )


def _line(logged: Mapping[int, Mapping[str, Any]], name: str, key: str) -> dict[str, Any]:
    steps = sorted(step for step in logged if name in logged[step])
    return {"name": name, "x": steps, "y": [logged[step][name][key] for step in steps]}


def _ends(*each: Mapping[str, Any]) -> tuple[float, float]:
    """Return the least and the largest value of all, apart where they are equal."""
    least, largest = min(x["least"] for x in each), max(x["largest"] for x in each)
    return least, largest if largest > least else least + 1.0


def _counts(weights: Mapping[str, Any], edges: Sequence[float] | NDArray[Any]) -> NDArray[Any]:
    """Count in other bins than were logged, as if the values of a logged bin were spread evenly over it."""
    own = np.linspace(*_ends(weights), len(weights["counts"]) + 1)
    below = np.concatenate([[0.0], np.cumsum(weights["counts"])])
    return np.diff(np.interp(edges, own, below))
