"""What the files of a run say together, however far the run got: curves, sessions, how stages ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlhf_core import InputError
from rlhf_core.runs import Damaged, RunDirectory, StageDirectory, open_run

RESOLVED, EVENTS, METRICS = "pipeline.resolved.toml", "events.jsonl", "metrics.jsonl"
Floats = NDArray[np.float64]
LARGEST = float(np.finfo(np.float32).max)
"""Charts use float32: larger numbers count as not finite."""


def number(value: Any) -> float | None:
    """Return a finite float; None for everything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST else None  # False for NaN


@dataclass(frozen=True)
class Points:
    """One metric's finite values, float64 [points], at least one; `steps` are updates done.

    missing: number of logged values that were not finite.
    """

    steps: Floats
    values: Floats
    missing: int = 0

    def at(self, update: int | None) -> tuple[float, float] | None:
        """Return (update, value) of the newest point up to an update, None without one. update: None: the last."""
        known = len(self.steps) if update is None else int(np.searchsorted(self.steps, update, side="right"))
        return (float(self.steps[known - 1]), float(self.values[known - 1])) if known else None

    def value_at(self, update: int | None) -> float | None:
        """Return the value that `at` finds."""
        found = self.at(update)
        return None if found is None else found[1]


State = Literal["done", "failed", "stopped", "interrupted", "running", "not begun"]
BROKEN_OFF = {"failed", "stopped"}


@dataclass(frozen=True)
class Session:
    """One session of a stage, in seconds since 1970. how: the event that ended it; None if unknown."""

    began: float
    ended: float | None
    how: str | None = None


@dataclass(frozen=True)
class ReportedStage:
    """One stage, and what its files say together.

    files: its directory. message: why it failed or was stopped. updates: the newest that was logged. planned: total
    updates, None before the first one. metrics: {name: its logged points}. first_row: when the first row was logged,
    seconds since 1970. saved: the update whose model is saved, where that is not the last. facts: how much it was
    trained on, and what its process compiled for it, in words.
    """

    files: StageDirectory
    state: State
    message: str
    sessions: tuple[Session, ...]
    updates: int
    planned: int | None
    metrics: Mapping[str, Points]
    first_row: float | None
    saved: int | None = None
    facts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.files.name

    @property
    def trainer(self) -> str:
        return self.files.trainer

    @property
    def config(self) -> Mapping[str, Any]:
        return self.files.config

    @property
    def seconds(self) -> float:
        return sum((session.ended or session.began) - session.began for session in self.sessions)


@dataclass(frozen=True)
class ReportedRun:
    """A run directory."""

    files: RunDirectory
    stages: tuple[ReportedStage, ...]
    machine: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    def stage(self, name: str) -> ReportedStage | None:
        """Return a stage by its name; None where there is none."""
        return next((stage for stage in self.stages if stage.name == name), None)


def require_run(path: str | Path) -> Path:
    """Return the directory of a run. Raises InputError where there is none, and for one stage of a run."""
    files = open_run(path, damaged=lambda error: None)
    if files.is_stage and (files.dir.parent / RESOLVED).is_file():
        given = Path(path)
        raise InputError(f"{given}: is one stage of a run; type: rlhf report {given.parent}")
    return files.dir


def described(error: Damaged) -> str:
    """Name a damaged file, from its folder on, and what was left out."""
    name = error.path.name if error.path.name == RESOLVED else f"{error.path.parent.name}/{error.path.name}"
    if error.lines:
        return f"{name}: {error.lines} damaged line{'s' * (error.lines > 1)} left out"
    return f"{name} is not readable: {error.why}"


def compiled(log: Sequence[Mapping[str, Any]]) -> str:
    """Say what was compiled for a stage, from the event that ended it; "" where an older version wrote it."""
    counts = log[-1].get("compiled") if log else None
    if not isinstance(counts, dict):
        return ""
    programs, seconds, cached = (number(counts.get(name)) for name in ("programs", "seconds", "cached"))
    if programs is None or seconds is None or cached is None:
        return ""
    return f"{programs:.0f} programs in {seconds:.1f} s, {cached:.0f} of them from the cache"


def stage_state(
    files: StageDirectory, events: Sequence[Mapping[str, Any]], active: bool
) -> tuple[State, str]:
    ends = [event for event in events if event.get("event") != "warning"]
    ended: Mapping[str, Any] = ends[-1] if ends else {}
    alone = not files.spec and not ended  # a trainer called from Python writes neither
    if files.spec.get("state") == "done" or (alone and files.has_artifacts):
        return "done", ""
    how = str(ended.get("event", ""))
    if how in BROKEN_OFF:
        return ("failed" if how == "failed" else "stopped"), str(ended.get("message", ""))
    if alone and not files.has_metrics:
        return "not begun", ""
    return ("running" if active else "interrupted"), ""


def stage_sessions(
    log: Sequence[Mapping[str, Any]], record: Mapping[str, Any], last: float | None
) -> tuple[Session, ...]:
    """Reconstruct a stage's sessions from the events; without events, from stage.json."""
    sessions: list[Session] = []
    for event in log:
        when = float(event["time"])
        what = str(event.get("event", ""))
        if what in ("begun", "continued"):
            sessions.append(Session(when, None))
        elif what != "warning" and sessions and sessions[-1].ended is None:
            sessions[-1] = Session(sessions[-1].began, when, what)
    began = _seconds(record.get("started"))
    if not sessions and began is not None:
        sessions.append(Session(began, _seconds(record.get("finished"))))
    return tuple(
        Session(session.began, max(last, session.began), None)
        if session.ended is None and session is sessions[-1] and last is not None
        else session
        for session in sessions
    )


def _seconds(written: Any) -> float | None:
    try:
        return datetime.fromisoformat(written).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


@dataclass(frozen=True)
class TimeShare:
    """The time of one kind of work. share: of the whole run, between 0 and 1."""

    name: str
    seconds: float
    share: float


UPDATES, BEFORE, AFTER = "updates", "before the first update", "evaluation, saving, the rest"


def parts(stage: ReportedStage, total: float) -> list[TimeShare]:
    """Split a stage's time into start-up (data, model, compiling), updates, and the rest (evaluations, saving).

    `step_time` is the mean over the updates since the previous row, without evaluations; updates repeated after a kill
    count as rest. total: seconds of the whole run.
    """
    whole = stage.seconds
    if not whole or not total:
        return []
    if "step_time" not in stage.metrics:
        return [TimeShare(BEFORE, whole, whole / total)] if not stage.metrics else []
    times = stage.metrics["step_time"]
    updates = float(np.sum(np.diff(times.steps, prepend=0.0) * times.values))
    updates = min(updates, whole)
    before = _before(stage, float(times.steps[0] * times.values[0]))
    before = min(before, whole - updates)
    times_by_part = {BEFORE: before, UPDATES: updates, AFTER: whole - updates - before}
    return [TimeShare(name, seconds, seconds / total) for name, seconds in times_by_part.items()]


def _before(stage: ReportedStage, first: float) -> float:
    """Return the seconds before the first update, which took `first` seconds until the first row."""
    if stage.first_row is None:
        return 0.0
    return max(stage.first_row - stage.sessions[0].began - first, 0.0)
