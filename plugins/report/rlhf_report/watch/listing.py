"""The list of runs: the state of each, how far it is, and its last metrics, from the ends of its files alone."""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import rlhf_report.charts as charts
from rlhf_core.runs import RunDirectory, StageDirectory, open_run
from rlhf_report.run_reader import EVENTS, METRICS, RESOLVED, number
from rlhf_report.watch.growing import Row, ends
from rlhf_report.watch.places import links_that_leave

AUDIT = "audit.json"
"""In the run's directory, where one has written it: what `rlhf audit RUN --json` printed."""
GROWING = ("journal", "evaluations", "samples", "rows", "values")
"""Folders of a stage that files are added to."""
MOST_METRICS = 6
MOST_WARNINGS = 5
SPARK = 60
"""Values of a sparkline."""
RECENT = 10
"""Logged rows by which the time left is forecast."""

RunState = Literal["running", "stopped", "failed", "finished"]
Fingerprint = tuple[Any, ...]


@dataclass
class Listed:
    """A run of the list. fingerprint: of the files that it was made of."""

    entry: dict[str, Any]
    fingerprint: Fingerprint


class RunList:
    """The runs of the list, each read again only where its files have changed.

    alarm: returns what the page of a run warns of first, by its directory and fingerprint; None where it is not known,
    and where there is none.
    """

    def __init__(self, alarm: Callable[[Path, Fingerprint], str | None] = lambda path, mark: None) -> None:
        self._known: dict[str, Listed] = {}
        self._alarm = alarm

    def refresh(self, runs: Mapping[str, Path]) -> list[dict[str, Any]]:
        """Return the entries of the runs, {id: directory}, those that changed last first."""
        self._known = {id: self._listed(id, path) for id, path in runs.items()}
        entries = [
            {**listed.entry, "alarm": self._alarm(runs[id], listed.fingerprint)}
            for id, listed in self._known.items()
        ]
        return sorted(entries, key=lambda entry: -entry["changed"])

    def _listed(self, id: str, path: Path) -> Listed:
        mark = fingerprint(path)
        known = self._known.get(id)
        if known is not None and known.fingerprint == mark:
            return known
        try:
            entry = _entry(path)
        except Exception as error:  # a directory may vanish, or hold anything
            entry = _empty(path) | {"state": "stopped", "error": f"not readable: {error}"}
        return Listed({"id": id, "name": path.name, "dir": str(path), **entry}, mark)


def fingerprint(path: Path) -> Fingerprint:
    """Identify the content of a run's files by their sizes and times, and whether it is running."""
    marks: list[Any] = [_is_running(path), *(file_mark(path / name) for name in (EVENTS, RESOLVED, AUDIT))]
    for folder in (path, *_folders(path)):
        marks += [folder.name, stage_mark(folder)]
    return tuple(marks)


def stage_mark(folder: Path) -> Fingerprint:
    """Identify the content of a stage's files."""
    names = (METRICS, "stage.json", "plan.json", "best.json", *GROWING)
    return tuple(file_mark(folder / name) for name in names)


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(Path(each.path) for each in entries if each.is_dir(follow_symlinks=False))
    except OSError:
        return []


def file_mark(path: Path) -> tuple[int, int, int] | None:
    """Identify a file by when it changed, its size and its number; None where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _is_running(path: Path) -> bool:
    try:
        return open_run(path, damaged=lambda error: None).is_running
    except Exception:
        return False


def _empty(path: Path) -> dict[str, Any]:
    marks = [file_mark(path), file_mark(path / EVENTS)]
    return {
        "state": "stopped",
        "stage": "",
        "trainer": "",
        "update": 0,
        "updates": None,
        "seconds_left": None,
        "changed": max((mark[0] for mark in marks if mark), default=0) / 1e9,
        "metrics": {},
        "spark": None,
        "warnings": [],
        "error": None,
    }


def _entry(path: Path) -> dict[str, Any]:
    entry = _empty(path)
    leaving = links_that_leave(path)
    if leaving:
        link = leaving[0].relative_to(path)
        return entry | {"error": f"{link} is a link that leaves the run's directory; it is not followed"}
    problems: list[str] = []
    run = open_run(path, damaged=lambda error: problems.append(error.why))
    events = _events(path / EVENTS)
    stage = current_stage(run, events)
    state, error = state_of(run, events)
    entry |= {"state": state, "error": error, "warnings": warnings_of(events)}
    if stage is None:
        return entry
    entry |= {"stage": stage.name, "trainer": stage.trainer}
    planned = number(stage.plan.get("updates"))
    entry["updates"] = None if planned is None else int(planned)
    mark = file_mark(stage.dir / METRICS)
    if mark is None:
        return entry
    entry["changed"] = max(entry["changed"], mark[0] / 1e9)
    spread, last = ends(stage.dir / METRICS)
    return entry | _progress(spread, last, entry["updates"], state)


def _progress(
    spread: Sequence[Row], last: Sequence[Row], planned: int | None, state: RunState
) -> dict[str, Any]:
    """Describe how far a stage is, by rows of its metrics.jsonl."""
    newest: dict[str, float] = {}
    for row in last:
        newest |= {name: value for name, each in row.items() if (value := finite(each)) is not None}
    update = int(newest.get("step", 0))
    metrics = important(name for name in newest if name not in ("step", "time"))
    # Of metrics that are the same number, as a reward and its sum are, one is enough.
    once = {(newest[name], name.startswith(charts.EVAL)): name for name in reversed(metrics)}
    shown = [name for name in metrics if name in once.values()][:MOST_METRICS]
    left = None
    if state == "running" and planned is not None:
        left = seconds_left(last, planned)
    return {
        "update": update,
        "seconds_left": left,
        "metrics": {name: newest[name] for name in shown},
        "spark": _spark(shown[0], [*spread, *last]) if shown else None,
    }


def seconds_left(rows: Sequence[Row], planned: int) -> float | None:
    """Forecast the seconds of the updates that are left from the pace of the last rows; None where it is not known."""
    timed = [
        (step, when)
        for row in rows[-RECENT:]
        if (step := number(row.get("step"))) is not None and (when := finite(row.get("time"))) is not None
    ]
    if len(timed) < 2 or timed[-1][0] <= timed[0][0]:
        return None
    pace = (timed[-1][1] - timed[0][1]) / (timed[-1][0] - timed[0][0])
    return max(round((planned - timed[-1][0]) * pace, 1), 0.0)


def _spark(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Take the metric's values at most `SPARK` updates that are evenly spread; the rows lie closer at the end."""
    points = [
        (step, value)
        for row in rows
        if (value := finite(row.get(name))) is not None and (step := finite(row.get("step"))) is not None
    ]
    if len(points) > SPARK:
        first, last = points[0][0], points[-1][0]
        wanted = [first + (last - first) * i / (SPARK - 1) for i in range(SPARK)]
        steps = [step for step, _ in points]
        places = dict.fromkeys(min(bisect_left(steps, step), len(steps) - 1) for step in wanted)
        points = [points[place] for place in places]
    return {"name": name, "values": [value for _, value in points]}


def important(names: Iterable[str]) -> list[str]:
    """Order the metrics of a list: those of the short table, a policy's reward before its loss."""
    return list(_important(tuple(names)))


@lru_cache(maxsize=64)  # a run has the same names at every reading
def _important(every: tuple[str, ...]) -> list[str]:
    ordered = [
        name for key in charts.key_metrics(every) for name in (key, charts.EVAL + key) if name in every
    ]
    if "reward" in ordered:
        ordered.remove("reward")
        ordered.insert(0, "reward")
    return ordered


def finite(value: Any) -> float | None:
    """Return a finite number as it is; None for everything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


def _events(path: Path) -> list[Row]:
    """Read the end of events.jsonl, which has all that matters for the list."""
    try:
        return ends(path)[1]
    except FileNotFoundError:
        return []


def current_stage(run: RunDirectory, events: Sequence[Row]) -> StageDirectory | None:
    """Return the stage that is at work or was last."""
    begun = [stage for stage in run.stages if stage.spec or stage.has_metrics]
    last = next((str(event["stage"]) for event in reversed(events) if event.get("stage")), None)
    named = [stage for stage in begun if stage.name == last]
    return next(reversed(named or begun), None)


def state_of(run: RunDirectory, events: Sequence[Row]) -> tuple[RunState, str | None]:
    """Return the state of a run, and of a failed one its error."""
    if run.is_running:
        return "running", None
    ended = [event for event in events if event.get("event") != "warning"]
    how = str(ended[-1].get("event", "")) if ended else ""
    if how == "failed":
        return "failed", str(ended[-1].get("message", "")) or None
    if how != "stopped" and run.stages and all(map(_is_done, run.stages)):
        return "finished", None
    return "stopped", None


def _is_done(stage: StageDirectory) -> bool:
    if stage.spec:
        return stage.spec.get("state") == "done"
    return stage.has_artifacts


def warnings_of(events: Sequence[Row]) -> list[str]:
    """Return the newest warnings, without repetition."""
    texts = [str(event.get("message", "")) for event in events if event.get("event") == "warning"]
    return list(dict.fromkeys(texts))[-MOST_WARNINGS:]
