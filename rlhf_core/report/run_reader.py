"""Reading a run directory for people: whatever is there, however far the run came."""

from __future__ import annotations

import fcntl
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlhf_core.artifacts import MANIFEST
from rlhf_core.errors import InputError
from rlhf_core.pipeline.file import STAGE_NAME
from rlhf_core.report.json_values import number, table, text
from rlhf_core.stage import events

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


RESOLVED = "pipeline.resolved.toml"
State = Literal["done", "failed", "stopped", "interrupted", "running", "not begun"]
SAID = {"failed", "stopped"}


@dataclass(frozen=True)
class Session:
    """One stretch of a stage, from its beginning to its end; seconds since 1970. how: None where nothing says."""

    began: float
    ended: float | None
    how: str | None = None


@dataclass(frozen=True)
class StageRun:
    """One stage as its directory tells it.

    message: what ended it, where it failed or was stopped. planned: updates, None before the first one.
    metrics: {name: its logged points}. first_row: when the first of them was logged, seconds since 1970. record:
    stage.json, empty where there is none.
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

    @property
    def updates(self) -> int:
        """The newest update that was logged."""
        return max((int(points.steps[-1]) for points in self.metrics.values()), default=0)

    @property
    def seconds(self) -> float:
        return sum((each.ended or each.began) - each.began for each in self.sessions)


@dataclass(frozen=True)
class Run:
    """A run directory. warnings: (stage, text). problems: what of the directory could not be read."""

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
    """Everything that a report shows but the samples, which are read when they are drawn.

    Half-written files are passed over and named in `problems`. Raises InputError where `path` is no run directory.
    """
    directory = Path(path).absolute()
    found = _stage_directories(Path(path), directory)
    problems: list[str] = []
    resolved = _text(directory / RESOLVED, problems)
    try:
        pipeline = tomllib.loads(resolved)
    except (ValueError, RecursionError) as error:
        pipeline = {}
        problems.append(f"{RESOLVED} is not readable: {error}")
    said = list(rows(directory / events.FILE, problems))
    configs = _stage_tables(pipeline, problems)
    active = _in_use(directory)
    stages = tuple(
        _stage(found.get(name, directory / name), name, configs.get(name, {}), said, active, problems)
        for name in dict.fromkeys([*configs, *found])
    )
    machine: Mapping[str, Any] = next(
        (e["machine"] for e in reversed(said) if isinstance(e.get("machine"), dict)), {}
    )
    warned = dict.fromkeys(
        (str(e.get("stage", "")), str(e.get("message", ""))) for e in said if e.get("event") == "warning"
    )
    return Run(directory, pipeline, resolved, stages, machine, tuple(warned), tuple(problems))


def _stage_tables(written: Mapping[str, Any], problems: list[str]) -> dict[str, dict[str, Any]]:
    """{name: table} of the stages in the resolved pipeline. A name that no stage can have is not looked up on disk."""
    stages = written.get("stage", [])
    tables = [table(each) for each in stages] if isinstance(stages, list) else []
    found = {name: each for each in tables if STAGE_NAME.fullmatch(name := text(each.get("name")))}
    if not isinstance(stages, list) or len(found) != len(stages):
        problems.append(f"{RESOLVED}: not every stage in it has a name of its own")
    return found


def rows(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; of lines that are none, the file is named once in `problems`."""
    torn = 0
    try:
        lines = path.read_bytes().splitlines() if path.is_file() else []
    except OSError as error:
        problems.append(f"{path.name} is not readable: {error.strerror}")
        return
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            yield row
        elif line.strip():
            torn += 1
    if torn:
        problems.append(f"{path.parent.name}/{path.name}: {torn} line{'s' * (torn > 1)} not whole, left out")


def _stage_directories(given: Path, directory: Path) -> dict[str, Path]:
    """{stage: its directory}, oldest first. What a trainer was told to write to from Python is its only stage."""
    if not directory.is_dir():
        there = "is a file" if directory.exists() else "does not exist"
        raise InputError(f"{given}: {there}; give the directory of a run, such as: rlhf report runs/first")
    if _is_stage(directory):
        if (directory.parent / RESOLVED).is_file():
            raise InputError(f"{given}: is one stage of a run; type: rlhf report {given.parent}")
        return {str(json_object(directory / "stage.json", []).get("name") or directory.name): directory}
    found = [path for path in directory.iterdir() if _is_stage(path)]
    if not found and not (directory / RESOLVED).is_file():
        raise InputError(
            f"{given}: not a run directory, it has neither {RESOLVED} nor a stage with metrics.jsonl; give the "
            "`dir` of a pipeline that ran, such as: rlhf report runs/first"
        )
    return {path.name: path for path in sorted(found, key=lambda path: path.stat().st_mtime)}


def _is_stage(path: Path) -> bool:
    return (path / "stage.json").is_file() or (path / "metrics.jsonl").is_file()


def _stage(
    path: Path,
    name: str,
    config: Mapping[str, Any],
    said: list[dict[str, Any]],
    active: bool,
    problems: list[str],
) -> StageRun:
    record = json_object(path / "stage.json", problems)
    planned = json_object(path / "plan.json", problems).get("updates")
    own = [event for event in said if event.get("stage") == name and number(event.get("time")) is not None]
    metrics, times = read_metrics(rows(path / "metrics.jsonl", problems))
    first, last = (times[0], times[-1]) if times else (None, None)
    sessions = _sessions(own, record, last)
    state, message = _state(path, own, record, active)
    return StageRun(
        name=name,
        trainer=str(record.get("trainer") or config.get("trainer") or ""),
        dir=path,
        state=state,
        message=message,
        config={
            k: v for k, v in {**config, **table(record.get("config"))}.items() if k not in ("name", "trainer")
        },
        record=record,
        sessions=sessions,
        planned=int(updates) if (updates := number(planned)) is not None else None,
        metrics=metrics,
        first_row=first,
    )


def _state(
    path: Path, own: list[dict[str, Any]], record: Mapping[str, Any], active: bool
) -> tuple[State, str]:
    ended: dict[str, Any] = next((e for e in reversed(own) if e.get("event") != "warning"), {})
    alone = not record and not ended  # a trainer called from Python writes neither
    if record.get("state") == "done" or (alone and any(path.glob(f"artifacts/*/{MANIFEST}"))):
        return "done", ""
    if (how := text(ended.get("event"))) in SAID:
        return ("failed" if how == "failed" else "stopped"), str(ended.get("message", ""))
    if alone and not (path / "metrics.jsonl").is_file():
        return "not begun", ""
    return ("running" if active else "interrupted"), ""


def _sessions(
    own: list[dict[str, Any]], record: Mapping[str, Any], last: float | None
) -> tuple[Session, ...]:
    """From the events; for a run without them, from what stage.json says."""
    sessions: list[Session] = []
    for event in own:
        when, what = float(event["time"]), text(event.get("event"))
        if what in ("begun", "continued"):
            sessions.append(Session(when, None))
        elif what != "warning" and sessions and sessions[-1].ended is None:
            sessions[-1] = Session(sessions[-1].began, when, what)
    if not sessions and (began := _seconds(record.get("started"))) is not None:
        sessions.append(Session(began, _seconds(record.get("finished"))))
    return tuple(
        Session(each.began, max(last, each.began), None)
        if each.ended is None and each is sessions[-1] and last is not None
        else each
        for each in sessions
    )


def _seconds(written: Any) -> float | None:
    try:
        return datetime.fromisoformat(written).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _in_use(directory: Path) -> bool:
    """Whether a process runs in this directory now: it holds the lock."""
    try:
        with open(directory / ".lock", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def json_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """What a file holds; empty where it is not there, or no object, which is named in `problems`."""
    content = _text(path, problems)
    try:
        found = json.loads(content) if content else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        problems.append(f"{path.parent.name}/{path.name} is not readable")
        return {}
    return found


def _text(path: Path, problems: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except OSError as error:
        problems.append(f"{path.name} is not readable: {error.strerror}")
        return ""


@dataclass(frozen=True)
class Part:
    """seconds of one kind of work; share of the whole run, between 0 and 1."""

    name: str
    seconds: float
    share: float


UPDATES, BEFORE, AFTER = "updates", "before the first update", "evaluation, saving, the rest"


def parts(stage: StageRun, total: float) -> list[Part]:
    """Start-up (data, model, compiling), the updates, and the rest: evaluations, checkpoints, the last artifact.

    `step_time` is the mean over the updates since the row before, evaluations left out; with more than one session,
    what was done twice after a kill counts as rest. total: seconds of the whole run.
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
    found = {BEFORE: before, UPDATES: updates, AFTER: whole - updates - before}
    return [Part(name, seconds, seconds / total) for name, seconds in found.items()]


def _before(stage: StageRun, first: float) -> float:
    """Seconds from the beginning to the first update, which ended with its first row `first` seconds later."""
    if stage.first_row is None:
        return 0.0
    return max(stage.first_row - stage.sessions[0].began - first, 0.0)
