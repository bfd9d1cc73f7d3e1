"""What a stage came to: its metrics as numbers, distributions, weights, completions before and after, scored pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

import rlhf_report.samples as samples
from rlhf_report.run_reader import Points, ReportedStage
from rlhf_report.weights import Chart, bars, weight_charts

LEAST = 2
"""Fewest points of a curve."""
LEAST_VALUES = 50
"""Fewest values of a histogram."""
BINS = 30
TITLES = {
    "reward": ("Reward of completions", "reward"),
    "length": ("Length of completions, tokens", "length"),
}


def results_of(stage: ReportedStage) -> dict[str, Any]:
    """Describe the results of a stage, from its files of samples, evaluations and weights."""
    problems: list[str] = []
    completions, spreads = samples.completions(stage)
    drawn = [*_spread_charts(spreads), *_evaluation_charts(samples.evaluations(stage, problems))]
    drawn += weight_charts(stage, problems)
    shown = {"Completions": completions, "Previews": samples.fixed_prompts(stage, problems, "preview")}
    return {
        "metrics": [_row(name, points, stage.saved) for name, points in sorted(stage.metrics.items())],
        "charts": drawn,
        "completions": [
            {"title": title, **asdict(found)} for title, found in shown.items() if found is not None
        ],
        "pairs": samples.scored_pairs(stage),
        "problems": problems,
    }


def _row(name: str, points: Points, saved: int | None) -> dict[str, Any]:
    """Describe a metric by its numbers; `saved`: at the update whose model is saved, where that is not the last."""
    values = points.values
    return {
        "name": name,
        "saved": None if saved is None else points.value_at(saved),
        "first": float(values[0]),
        "last": float(values[-1]),
        "least": float(values.min()),
        "largest": float(values.max()),
        "count": len(values),
        "missing": points.missing,
    }


def _spread_charts(spreads: Sequence[samples.Spread]) -> Iterator[Chart]:
    """Yield percentiles over updates, and first against last."""
    for spread in spreads:
        title, axis = TITLES[spread.name]
        if len(spread.updates) >= LEAST and spread.percentiles.any():
            lines = [
                {
                    "name": "median" if percent == 50 else f"{percent} %",
                    "x": spread.updates.tolist(),
                    "y": spread.percentiles[:, i].tolist(),
                    "colour": abs(i - 2),
                    "dashed": percent != 50,
                }
                for i, percent in enumerate(samples.PERCENTILES)
            ]
            yield {
                "group": "Distributions",
                "title": f"{title}: percentiles",
                "axis": "update",
                "lines": lines,
            }
        ends = {f"update {spread.updates[0]:.0f}": spread.first}
        if len(spread.updates) > 1:
            ends[f"update {spread.updates[-1]:.0f}"] = spread.last
        if min(map(len, ends.values())) >= LEAST_VALUES:
            together = np.concatenate(list(ends.values()))
            edges = np.histogram_bin_edges(together, BINS)
            if np.all(together == np.round(together)) and np.ptp(together) <= 2 * BINS:  # one bin per integer
                edges = np.arange(together.min() - 0.5, together.max() + 1)
            counts = {name: np.histogram(values, edges)[0] for name, values in ends.items()}
            yield bars("Distributions", f"{title}: before and after", axis, edges, counts)


def _evaluation_charts(evaluations: Sequence[Mapping[str, Any]]) -> Iterator[Chart]:
    """Yield the scores of held-out pairs at the trained model's evaluation, and the calibration at the first, too."""
    scored = [row for row in evaluations if "scores" in row]
    for row in scored[-1:]:
        counts = {side: row["scores"][side] for side in ("chosen", "rejected")}
        title = f"Scores of held-out pairs, update {row['step']}"
        yield bars("Distributions", title, "score", np.asarray(row["scores"]["edges"]), counts)
    if scored:
        lines = [
            {
                "name": f"update {row['step']}, {sum(each['pairs'] for each in row['calibration']):,.0f} pairs",
                "x": [each["confidence"] for each in row["calibration"]],
                "y": [each["right"] for each in row["calibration"]],
            }
            for row in scored
        ]
        ideal = {"name": "calibrated", "x": [0.5, 1.0], "y": [0.5, 1.0], "dashed": True, "colour": 7}
        title = "Calibration: accuracy over confidence"
        yield {
            "group": "Accuracy and calibration",
            "title": title,
            "axis": "confidence",
            "lines": [*lines, ideal],
        }
