"""The contents of a run directory, however far the run got."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlhf_core.artifacts import MANIFEST
from rlhf_core.config.toml import parse_toml
from rlhf_core.errors import InputError, library_words, limited_lines, read_limited
from rlhf_core.stage import events

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

    def same(self, other: Points) -> bool:
        """Return whether both have the same values, up to rounding, at the same updates."""
        return np.array_equal(self.steps, other.steps) and np.allclose(
            self.values, other.values, rtol=1e-6, atol=0
        )

    def at(self, update: int | None) -> tuple[float, float] | None:
        """Return (update, value) of the newest point up to an update, None without one. update: None: the last."""
        known = len(self.steps) if update is None else int(np.searchsorted(self.steps, update, side="right"))
        return (float(self.steps[known - 1]), float(self.values[known - 1])) if known else None

    def value_at(self, update: int | None) -> float | None:
        """Return the value that `at` finds."""
        found = self.at(update)
        return None if found is None else found[1]

    def scaled(self, unit: float) -> Points:
        """Divide the values by a unit."""
        return replace(self, values=self.values / unit)


@dataclass(frozen=True)
class ThinnedLine:
    """The points of a metric to draw, float64 [n].

    line_x, line_y: the smallest and largest value of each stretch, at their steps; all points if there are few.
    mean_x, mean_y, count: the means of each stretch and its number of points.
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
    """Return ({metric: points}, times) of the rows of a metrics.jsonl; a step logged twice counts once."""
    by_metric: dict[str, dict[float, float]] = {}
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
                by_metric.setdefault(name, {})[step] = finite
            else:
                missing[name] = missing.get(name, 0) + 1
    points = {}
    for name, values in by_metric.items():
        steps = np.array(sorted(values))
        points[name] = Points(steps, np.array([values[s] for s in steps]), missing.get(name, 0))
    return points, times


def draw(points: Points, stretches: int) -> ThinnedLine:
    """Reduce points to at most 2 · `stretches` + 2 on the line, extremes kept, and `stretches` means."""
    n = len(points.steps)
    if n <= 2 * stretches:
        return ThinnedLine(points.steps, points.values, points.steps, points.values, np.ones(n))
    edges = np.linspace(0, n, stretches + 1).astype(int)
    extremes = {0, n - 1}
    for a, b in pairwise(edges):
        extremes |= {a + int(points.values[a:b].argmin()), a + int(points.values[a:b].argmax())}
    indices, count = sorted(extremes), np.diff(edges).astype(float)
    mean_x, mean_y = (np.add.reduceat(x, edges[:-1]) / count for x in (points.steps, points.values))
    return ThinnedLine(points.steps[indices], points.values[indices], mean_x, mean_y, count)


STAGE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
"""A stage's name, which is the name of its directory."""
RESOLVED = "pipeline.resolved.toml"
State = Literal["done", "failed", "stopped", "interrupted", "running", "not begun"]
BROKEN_OFF = {"failed", "stopped"}


@dataclass(frozen=True)
class Session:
    """One session of a stage, in seconds since 1970. how: the event that ended it; None if unknown."""

    began: float
    ended: float | None
    how: str | None = None


@dataclass(frozen=True)
class StageRun:
    """One stage, read from its directory.

    message: why it failed or was stopped. planned: total updates, None before the first one.
    metrics: {name: its logged points}. first_row: when the first row was logged, seconds since 1970. record:
    stage.json, empty if there is none. saved: the update whose model is saved, where that is not the last.
    """

    name: str
    trainer: str
    dir: Path
    state: State
    message: str
    config: Mapping[str, Any]
    record: Mapping[str, Any]
    sessions: tuple[Session, ...]
    planned: int | None
    metrics: Mapping[str, Points]
    first_row: float | None
    saved: int | None = None

    @property
    def updates(self) -> int:
        """Return the newest logged update."""
        return max((int(points.steps[-1]) for points in self.metrics.values()), default=0)

    @property
    def seconds(self) -> float:
        return sum((session.ended or session.began) - session.began for session in self.sessions)


@dataclass(frozen=True)
class Run:
    """A run directory. warnings: (stage, text). problems: files that could not be read."""

    dir: Path
    table: Mapping[str, Any]
    resolved: str
    stages: tuple[StageRun, ...]
    machine: Mapping[str, Any]
    warnings: tuple[tuple[str, str], ...]
    problems: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        return self.dir.name

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)


def read_run(path: str | Path) -> Run:
    """Read everything that a report shows except the samples, which are read when they are drawn.

    Damaged files are skipped and named in `problems`. Raises InputError if `path` is not a run directory.
    """
    directory = Path(path).absolute()
    directories = _stage_directories(Path(path), directory)
    problems: list[str] = []
    resolved = _text(directory / RESOLVED, problems)
    try:
        pipeline = parse_toml(resolved)
    except (ValueError, RecursionError) as error:
        pipeline = {}
        problems.append(f"{RESOLVED} is not readable: {error}")
    log = list(rows(directory / events.FILE, problems))
    configs = _stage_tables(pipeline, problems)
    active = _in_use(directory)
    stages = tuple(
        _stage(directories.get(name, directory / name), name, configs.get(name, {}), log, active, problems)
        for name in dict.fromkeys([*configs, *directories])
    )
    machine: Mapping[str, Any] = next(
        (e["machine"] for e in reversed(log) if isinstance(e.get("machine"), dict)), {}
    )
    warnings = dict.fromkeys(
        (str(e.get("stage", "")), str(e.get("message", ""))) for e in log if e.get("event") == "warning"
    )
    return Run(directory, pipeline, resolved, stages, machine, tuple(warnings), tuple(problems))


def _stage_tables(written: Mapping[str, Any], problems: list[str]) -> dict[str, dict[str, Any]]:
    """Return {name: table} of the stages in the resolved pipeline, leaving out invalid names."""
    stages = written.get("stage", [])
    tables = [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    by_name = {name: stage for stage in tables if STAGE_NAME.fullmatch(name := str(stage.get("name", "")))}
    if not isinstance(stages, list) or len(by_name) != len(stages):
        problems.append(f"{RESOLVED}: not every stage in it has a unique name")
    return by_name


def rows(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file; name a file with other lines once in `problems`."""
    damaged = 0
    try:
        for line in limited_lines(path) if path.is_file() else ():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield row
            elif line.strip():
                damaged += 1
    except (OSError, ValueError) as error:
        problems.append(f"{path.parent.name}/{path.name} is not readable: {library_words(error)}")
    if damaged:
        lines_text = f"{damaged} damaged line{'s' * (damaged > 1)}"
        problems.append(f"{path.parent.name}/{path.name}: {lines_text} left out")


def _stage_directories(given: Path, directory: Path) -> dict[str, Path]:
    """Return {stage: its directory}, oldest first; a directory written by a trainer from Python is its only stage."""
    if not directory.is_dir():
        state = "is a file" if directory.exists() else "does not exist"
        raise InputError(f"{given}: {state}; give the directory of a run, such as: rlhf report runs/first")
    if _is_stage(directory):
        if (directory.parent / RESOLVED).is_file():
            raise InputError(f"{given}: is one stage of a run; type: rlhf report {given.parent}")
        return {str(json_object(directory / "stage.json", []).get("name") or directory.name): directory}
    stages = [path for path in directory.iterdir() if _is_stage(path)]
    if not stages and not (directory / RESOLVED).is_file():
        raise InputError(
            f"{given}: not a run directory, it has neither {RESOLVED} nor a stage with metrics.jsonl; give the "
            "`dir` of a pipeline that ran, such as: rlhf report runs/first"
        )
    return {path.name: path for path in sorted(stages, key=lambda path: path.stat().st_mtime)}


def _is_stage(path: Path) -> bool:
    return (path / "stage.json").is_file() or (path / "metrics.jsonl").is_file()


def _stage(
    path: Path,
    name: str,
    config: Mapping[str, Any],
    log: list[dict[str, Any]],
    active: bool,
    problems: list[str],
) -> StageRun:
    record = json_object(path / "stage.json", problems)
    planned = json_object(path / "plan.json", problems).get("updates")
    stage_log = [e for e in log if e.get("stage") == name and number(e.get("time")) is not None]
    metrics, times = read_metrics(rows(path / "metrics.jsonl", problems))
    best = json_object(path / "best.json", problems)
    saved = best.get("model")
    kept = isinstance(saved, int) and saved != best.get("updates", saved)
    first, last = (times[0], times[-1]) if times else (None, None)
    sessions = _sessions(stage_log, record, last)
    state, message = _state(path, stage_log, record, active)
    return StageRun(
        name=name,
        trainer=str(record.get("trainer") or config.get("trainer") or ""),
        dir=path,
        state=state,
        message=message,
        config={
            k: v
            for k, v in {**config, **(record.get("config") or {})}.items()
            if k not in ("name", "trainer")
        },
        record=record,
        sessions=sessions,
        planned=int(updates) if (updates := number(planned)) is not None else None,
        metrics=metrics,
        first_row=first,
        saved=saved if kept else None,
    )


def _state(
    path: Path, log: list[dict[str, Any]], record: Mapping[str, Any], active: bool
) -> tuple[State, str]:
    ended: dict[str, Any] = next((e for e in reversed(log) if e.get("event") != "warning"), {})
    alone = not record and not ended  # a trainer called from Python writes neither
    if record.get("state") == "done" or (alone and any(path.glob(f"artifacts/*/{MANIFEST}"))):
        return "done", ""
    if (how := str(ended.get("event", ""))) in BROKEN_OFF:
        return ("failed" if how == "failed" else "stopped"), str(ended.get("message", ""))
    if alone and not (path / "metrics.jsonl").is_file():
        return "not begun", ""
    return ("running" if active else "interrupted"), ""


def _sessions(
    log: list[dict[str, Any]], record: Mapping[str, Any], last: float | None
) -> tuple[Session, ...]:
    """Reconstruct a stage's sessions from the events; without events, from stage.json."""
    sessions: list[Session] = []
    for event in log:
        when, what = float(event["time"]), str(event.get("event", ""))
        if what in ("begun", "continued"):
            sessions.append(Session(when, None))
        elif what != "warning" and sessions and sessions[-1].ended is None:
            sessions[-1] = Session(sessions[-1].began, when, what)
    if not sessions and (began := _seconds(record.get("started"))) is not None:
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


def _in_use(directory: Path) -> bool:
    """Return whether a process is running in this directory, which then holds the lock."""
    try:
        with open(directory / ".lock", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def json_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """Return the JSON object of a file; empty if the file is missing or, with a problem, damaged."""
    content = _text(path, problems)
    try:
        value = json.loads(content) if content else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        problems.append(f"{path.parent.name}/{path.name} is not readable")
        return {}
    return value


def _text(path: Path, problems: list[str]) -> str:
    try:
        return read_limited(path).decode(errors="replace") if path.is_file() else ""
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} is not readable: {library_words(error)}")
        return ""


@dataclass(frozen=True)
class Part:
    """The time of one kind of work. share: of the whole run, between 0 and 1."""

    name: str
    seconds: float
    share: float


UPDATES, BEFORE, AFTER = "updates", "before the first update", "evaluation, saving, the rest"


def parts(stage: StageRun, total: float) -> list[Part]:
    """Split a stage's time into start-up (data, model, compiling), updates, and the rest (evaluations, saving).

    `step_time` is the mean over the updates since the previous row, without evaluations; updates repeated after a kill
    count as rest. total: seconds of the whole run.
    """
    whole = stage.seconds
    if not whole or not total:
        return []
    if "step_time" not in stage.metrics:
        return [Part(BEFORE, whole, whole / total)] if not stage.metrics else []
    times = stage.metrics["step_time"]
    updates = float(np.sum(np.diff(times.steps, prepend=0.0) * times.values))
    updates = min(updates, whole)
    before = _before(stage, float(times.steps[0] * times.values[0]))
    before = min(before, whole - updates)
    times_by_part = {BEFORE: before, UPDATES: updates, AFTER: whole - updates - before}
    return [Part(name, seconds, seconds / total) for name, seconds in times_by_part.items()]


def _before(stage: StageRun, first: float) -> float:
    """Return the seconds before the first update, which took `first` seconds until the first row."""
    if stage.first_row is None:
        return 0.0
    return max(stage.first_row - stage.sessions[0].began - first, 0.0)
