"""Print the closing table of a run, at most 80 columns wide and complete without colour."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

PARTS = {
    "form": 'ends in "The answer is N"',
    "number": "and N is right",
    "sentence": "one sentence",
    "length": "as long as asked for",
    "needed": "has the words needed",
    "banned": "lacks the word banned",
    "finished": "ended by itself",
}
SHOWN = 3
"""Prompts whose completions are printed."""


def percent(estimate: Mapping[str, float], sign: str = "") -> str:
    """`48.2 % [43.9, 52.6]`."""
    value, low, high = (100 * estimate[key] for key in ("value", "low", "high"))
    return f"{value:{sign}.1f} % [{low:{sign}.1f}, {high:{sign}.1f}]"


def closing_table(summary: Mapping[str, Any], directory: Path) -> RenderableType:
    """Lay out a run's summary for a terminal."""
    before, after = summary["before"], summary["after"]
    control = ", rewards shuffled: a control" if summary["shuffled"] else ""
    count = len(summary["prompts"])
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for index, column in enumerate(("", "before", "after")):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    table.add_row("right", percent(before["success"]), percent(after["success"]), style="bold")
    for part, share in before["parts"].items():
        table.add_row(PARTS[part], f"{100 * share:.1f} %", f"{100 * after['parts'][part]:.1f} %", style="dim")
    table.add_row("different texts", *(f"{100 * side['different']:.1f} %" for side in (before, after)))
    table.add_row("mean length, words", *(f"{side['words']:.1f}" for side in (before, after)))
    found = (
        [Text(f"\nFound the finished run in {directory}; nothing was trained.", "bold")]
        if summary["found"]
        else []
    )
    gain = percent(summary["gain"], "+").replace("%", "points")
    return Group(
        *found,
        Text(f"\n{summary['title']}, seed {summary['seed']}{control}\n", "bold"),
        Text(f"Completions of {count} held-out prompts at temperature {summary['temperature']}"),
        Text("[95 % interval, Wilson]:"),
        table,
        Text(f"Gain: {gain} [95 % interval, bootstrap over prompts].\n", "bold"),
        _examples(summary),
        _times(summary["seconds"]),
        Text(f"As a page: rlhf report {directory}"),
    )


def _examples(summary: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for index, prompt in enumerate(summary["prompts"][:SHOWN]):
        table.add_row("prompt", Text(prompt, "bold"), "")
        for side in ("before", "after"):
            right = summary[side]["right"][index]
            verdict = Text("right", "green") if right else Text("wrong", "red")
            table.add_row(side, Text(summary[side]["texts"][index]), verdict)
    return table


def _times(seconds: Mapping[str, tuple[float, float]]) -> Text:
    parts = ", ".join(f"{name} {wall:.0f} s" for name, (wall, _) in seconds.items())
    cpu = sum(cpu for _, cpu in seconds.values()) / 60
    return Text(f"\nWall time of this attempt: {parts}; {cpu:.1f} minutes of CPU.")
