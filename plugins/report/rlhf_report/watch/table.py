"""`rlhf watch --text`: a live table of runs for a terminal, also over ssh."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

import rlhf_report.charts as charts
from rlhf_report.watch.watched import Watched

PATIENCE = 10.0
"""Seconds that a table which is printed once waits for what is wrong with the runs."""
SECONDS = 2.0
"""Between two readings."""
BARS = "▁▂▃▄▅▆▇█"
STYLES = {"running": "green", "failed": "red", "finished": "", "stopped": "yellow"}
METRICS = 3
"""Metrics of a run that are shown; the page has the rest."""
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, marks that reorder text, and surrogates, which cannot be encoded."""


def shown(text: str) -> str:
    """Show control characters and marks that reorder text as their escapes."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def show(directories: Sequence[Path]) -> None:
    """Show the table until Ctrl-C; once where the output is no terminal."""
    watched = Watched(directories)
    console = Console()
    if not console.is_terminal:
        watched.runs()
        if watched.alarms is not None:
            watched.alarms.wait(PATIENCE)
        console.print(table(watched.runs()))
        return
    with Live(table(watched.runs()), console=console, auto_refresh=False, screen=True) as live:
        try:
            while True:
                time.sleep(SECONDS)
                live.update(table(watched.runs(), console.height - 4), refresh=True)
        except KeyboardInterrupt:
            pass
    console.print(table(watched.runs(), console.height - 4))


def table(answer: Mapping[str, Any], most: int | None = None) -> Group:
    """Make the table of what `Watched.runs` returned, and below it what is wrong. most: runs that fit on the screen."""
    made = Table(expand=True, pad_edge=False, box=None, header_style="bold")
    for name in ("run", "state", "stage", "update", "left", "", "last values", "changed"):
        made.add_column(name, no_wrap=name != "last values", overflow="ellipsis")
    runs = answer["runs"]
    for run in runs[:most]:
        made.add_row(*_cells(run))
    if most is not None and len(runs) > most:
        made.add_row(Text(f"… {len(runs) - most:,} more"))
    if not runs:
        made.add_row(Text("no runs yet"))
    said = [Text(shown(problem), style="red") for problem in answer["problems"]]
    notes = [note for note in map(_note, runs[:most]) if note is not None]
    return Group(made, *notes, *said)


def _note(run: Mapping[str, Any]) -> Text | None:
    """Return what is wrong with a run, the worst thing alone; None where nothing is."""
    said = run["error"] or run["alarm"] or (run["warnings"][-1] if run["warnings"] else "")
    if not said:
        return None
    return Text(f"{shown(run['name'])}: {shown(said)}", style="red" if run["error"] else "yellow")


def _cells(run: Mapping[str, Any]) -> list[Text]:
    updates = "" if run["updates"] is None else f" of {run['updates']:,}"
    left = "" if run["seconds_left"] is None else charts.clock(run["seconds_left"])
    values = [
        f"{name}\u00a0{charts.quantity(value, name)}"
        for name, value in list(run["metrics"].items())[:METRICS]
    ]
    last = Text("  ".join(map(shown, values)))
    changed = datetime.fromtimestamp(run["changed"]).astimezone()
    is_today = changed.date() == datetime.now().astimezone().date()
    return [
        Text(shown(run["name"])),
        Text(run["state"], style=STYLES[run["state"]]),
        Text(shown(run["stage"])),
        Text(f"{run['update']:,}{updates}"),
        Text(left),
        Text(spark(run["spark"])),
        last,
        Text(changed.strftime("%H:%M:%S" if is_today else "%d %b")),
    ]


def spark(found: Mapping[str, Any] | None, width: int = 10) -> str:
    """Draw a sparkline of at most `width` characters; empty where there are no values."""
    if found is None or not found["values"]:
        return ""
    values = found["values"]
    if len(values) > width:
        values = [values[i * (len(values) - 1) // (width - 1)] for i in range(width)]
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)
