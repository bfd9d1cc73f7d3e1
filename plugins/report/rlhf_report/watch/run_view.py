"""A run of the page: its stages, their metrics, verdicts and configuration, of which only what was added is read."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import rlhf_report.charts as charts
from rlhf_core.hidden import scrub_all
from rlhf_core.runs import Damaged, RunDirectory, StageDirectory, open_run
from rlhf_report.diagram import picture
from rlhf_report.run_reader import (
    EVENTS,
    LARGEST,
    METRICS,
    Points,
    ReportedRun,
    ReportedStage,
    compiled,
    described,
    number,
    parts,
    require_run,
    stage_sessions,
    stage_state,
)
from rlhf_report.watch.columns import Columns
from rlhf_report.watch.evidence import FileEvidence
from rlhf_report.watch.growing import GrowingRows, ends
from rlhf_report.watch.leaks import Leaked
from rlhf_report.watch.listing import (
    AUDIT,
    Fingerprint,
    file_mark,
    fingerprint,
    finite,
    important,
    seconds_left,
    stage_mark,
    state_of,
)
from rlhf_report.watch.places import links_that_leave
from rlhf_report.watch.rollout_view import updates_per_rollout
from rlhf_report.watch.verdicts import Sentence, verdict

KEY = 8
"""Metrics of a stage that are shown first."""


@dataclass
class WatchedRun:
    """A run that is looked at: what was read of it, and the answer that was made of it last.

    is_whole: whether all rows of metrics.jsonl are read; else its end and pieces of the rest, once.
    """

    id: str
    path: Path
    is_whole: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)
    problems: dict[str, None] = field(default_factory=dict)
    _lines: dict[str, GrowingRows] = field(default_factory=dict)
    _columns: dict[str, Columns] = field(default_factory=dict)
    _mark: Fingerprint = ()
    _opened: tuple[Fingerprint, RunDirectory] | None = None
    _answer: dict[str, Any] = field(default_factory=dict)
    _verdicts: dict[str, tuple[Any, list[Sentence]]] = field(default_factory=dict)
    _evidence: dict[str, FileEvidence] = field(default_factory=dict)

    def open(self) -> RunDirectory:
        """Open the directory. Raises InputError where it is no run any more, and Damaged for a link that leaves it."""
        for link in links_that_leave(self.path)[:1]:
            raise Damaged(link, "it is a link that leaves the run's directory, and is not followed")
        now = fingerprint(self.path)
        if self._opened is None or self._opened[0] != now:
            self._opened = now, open_run(self.path, damaged=self._note)
        return self._opened[1]

    def _note(self, error: Damaged) -> None:
        self.problems[described(error)] = None

    def stage(self, name: str) -> StageDirectory | None:
        """Return a stage by its name; None where there is none."""
        return next((stage for stage in self.open().stages if stage.name == name), None)

    def metrics(self, stage: StageDirectory) -> GrowingRows:
        """Return the rows of a stage's metrics, brought up to date. A file that cannot be read is a problem."""
        path = stage.dir / METRICS
        if not self.is_whole and stage.name not in self._lines and path.exists():
            spread, last = ends(path)
            self._lines[stage.name] = GrowingRows(Path(), [*spread, *last])
        lines = self._lines.setdefault(stage.name, GrowingRows(path))
        if self.is_whole:
            self._refresh(lines)
        return lines

    def events(self) -> list[dict[str, Any]]:
        """Return the run's events, brought up to date."""
        lines = self._lines.setdefault("/", GrowingRows(self.path / EVENTS))
        self._refresh(lines)
        return lines.rows

    def _refresh(self, lines: GrowingRows) -> None:
        try:
            lines.refresh()
        except OSError as error:
            self._note(Damaged(lines.path, str(error.strerror)))

    def answer(self) -> dict[str, Any]:
        """Describe the run."""
        mark = fingerprint(self.path)
        if not self._answer or mark != self._mark:
            self._answer = self._made()
            self._mark = mark
        return self._answer

    def reported(self, run: RunDirectory) -> ReportedRun:
        """Return the run as the report reads it, with the metrics of `metrics`."""
        events = self.events()
        running = run.is_running
        stages = tuple(self._reported(stage, running) for stage in run.stages)
        machines = [event["machine"] for event in events if isinstance(event.get("machine"), dict)]
        return ReportedRun(run, stages, machines[-1] if machines else {})

    def _reported(self, stage: StageDirectory, running: bool) -> ReportedStage:
        own = [
            event
            for event in self.events()
            if event.get("stage") == stage.name and number(event.get("time")) is not None
        ]
        lines = self.metrics(stage)
        columns = self._columns.setdefault(stage.name, Columns(lines))
        state, message = stage_state(stage, own, running)
        rows = lines.rows
        times = [when for row in (rows[:1] + rows[-1:]) if (when := number_of(row, "time"))]
        updates = next((step for row in reversed(rows) if (step := number_of(row, "step")) is not None), 0)
        planned = number(stage.plan.get("updates"))
        saved = stage.best.get("model")
        is_last = saved == stage.best.get("updates", saved)
        return ReportedStage(
            stage,
            state,
            message,
            sessions=stage_sessions(own, stage.spec, times[-1] if times else None),
            updates=int(updates),
            planned=None if planned is None else int(planned),
            metrics=columns,
            first_row=times[0] if times else None,
            saved=saved if isinstance(saved, int) and not is_last else None,
            facts=tuple(_facts(rows, own)),
        )

    def _made(self) -> dict[str, Any]:
        self.problems = {}
        self._opened = None  # what is damaged is said where it is read first
        run = self.open()
        reported = self.reported(run)
        events = self.events()
        state, error = state_of(run, events)
        stages = [self._stage(stage, reported) for stage in reported.stages]
        for lines in self._lines.values():
            damaged = lines.damaged + (lines.torn and not run.is_running)
            if damaged:
                self._note(Damaged(lines.path, "damaged lines", lines=damaged))
        return {
            "id": self.id,
            "name": self.path.name,
            "dir": str(self.path),
            "state": state,
            "error": error,
            "machine": _machine(reported.machine),
            "versions": _versions(reported),
            "seed": run.pipeline.get("seed"),
            "began": min((each.sessions[0].began for each in reported.stages if each.sessions), default=None),
            "seconds": reported.seconds,
            "picture": asdict(picture(reported.stages)) if reported.stages else None,
            "config": scrub_all(run.text or _toml(reported)),
            "events": [shown_event(event) for event in events],
            "problems": list(self.problems),
            "stages": stages,
        }

    def _stage(self, stage: ReportedStage, run: ReportedRun) -> dict[str, Any]:
        files, rows = stage.files, self._lines[stage.name].rows
        names = list(stage.metrics)
        left = None
        if stage.state == "running" and stage.planned is not None:
            left = seconds_left(rows, stage.planned)
        sentences = self._verdict(stage)
        return {
            "name": stage.name,
            "trainer": stage.trainer,
            "state": stage.state,
            "message": stage.message,
            "update": stage.updates,
            "updates": stage.planned,
            "saved": stage.saved,
            "facts": list(stage.facts),
            "next": _next_command(stage, run),
            "seconds_left": left,
            "verdict": [asdict(each) for each in sentences if each.tone != "checked"],
            "checked": [each.text for each in sentences if each.tone == "checked"],
            "key": [name for name in important(names) if not name.startswith(charts.EVAL)][:KEY],
            "metrics": names,
            "charts": shown_charts(names),
            "time": [{"name": part.name, "seconds": part.seconds} for part in parts(stage, run.seconds)],
            "subsets": subsets(stage.metrics),
            "rollouts": rollout_updates(files),
            "rows": numbered(files.dir / "rows", ".npz"),
            "evaluations": list(files.evaluations),
        }

    def _verdict(self, stage: ReportedStage) -> list[Sentence]:
        """Return the sentences of a stage; they are made again where it has logged or been evaluated since."""
        mark = (stage.state, stage_mark(stage.files.dir), file_mark(self.path / AUDIT))
        known = self._verdicts.get(stage.name)
        if known is None or known[0] != mark:
            problems: list[str] = []
            try:
                known = (mark, verdict(stage, problems, self._files(stage.name).sentences(stage)))
            except Exception as error:  # evaluations may hold anything
                known = (mark, [])
                problems.append(f"{stage.name}: no verdict: {error}")
            self.problems |= dict.fromkeys(problems)
            self._verdicts[stage.name] = known
        return known[1]

    def leaks(self, stage: StageDirectory) -> Leaked:
        """Return which held-out prompts of a stage the training data have, too."""
        return self._files(stage.name).leaks.of(stage)

    def _files(self, stage: str) -> FileEvidence:
        return self._evidence.setdefault(stage, FileEvidence())


def read_run(path: str | Path) -> ReportedRun:
    """Read a run. Raises InputError where there is none."""
    run = WatchedRun("", require_run(path))
    return run.reported(run.open())


def _facts(rows: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say how much a stage was trained on, and what its process compiled for it."""
    newest = {name: value for row in rows[-1:] for name in row if (value := number(row[name])) is not None}
    if "num_tokens" in newest:
        yield f"{newest['num_tokens']:,.0f} tokens"
    if "epoch" in newest:
        yield f"{newest['epoch']:.3g} epoch{'s' * (newest['epoch'] != 1)}"
    sessions = sum(event.get("event") in ("begun", "continued") for event in events)
    if sessions > 1:
        yield f"in {sessions} sessions"
    programs = compiled(events)
    if programs:
        yield f"compiled {programs}"


def _machine(facts: Mapping[str, Any]) -> str:
    """Describe the machine, as in `1 × cpu, jax 0.10.2, Python 3.11.7`; empty if no event has it."""
    if not facts:
        return ""
    device = str(facts.get("device", facts.get("platform", "")))
    words = [f"{facts.get('devices', '?')} × {device}"]
    if facts.get("processes", 1) != 1:
        words.append(f"{facts['processes']} processes")
    words += [
        f"{label} {facts[key]}" for key, label in (("jax", "jax"), ("python", "Python")) if key in facts
    ]
    return ", ".join(words)


def _versions(run: ReportedRun) -> str:
    """Return `rlhf-core 0.1.0, …` of the last stage that began."""
    for stage in reversed(run.stages):
        recorded = stage.files.spec.get("versions")
        if isinstance(recorded, Mapping):
            return ", ".join(f"{name} {version}" for name, version in recorded.items())
    return ""


def _next_command(stage: ReportedStage, run: ReportedRun) -> str:
    """Return the command that continues a stage which is neither done nor running."""
    if stage.state in ("done", "running") or not run.files.text:
        return ""
    return f"rlhf run {run.files.dir / 'pipeline.resolved.toml'}"


def number_of(row: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a row; None where it has none."""
    value = finite(row.get(name))
    return None if value is None or abs(value) > LARGEST else value


def _toml(run: ReportedRun) -> str:
    """Write the configuration of a run without a pipeline's file."""
    return "\n".join(f"[[stage]]\n{stage.files.toml()}" for stage in run.stages if stage.files.config)


def shown_event(event: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what the page shows of an event, without secrets."""
    kept = {name: event[name] for name in ("time", "stage", "event", "message", "step") if name in event}
    return scrub_all(kept)


def shown_charts(names: Iterable[str]) -> list[dict[str, Any]]:
    """Group metrics into charts, those of the short table first."""
    return _shown_charts(tuple(names))


@lru_cache(maxsize=64)  # a run has the same names at every reading
def _shown_charts(names: tuple[str, ...]) -> list[dict[str, Any]]:
    ranks = {name: rank for rank, name in enumerate(important(names))}
    described = [
        {"group": kind.group, "title": kind.title, "names": each, "log": kind.log, "unit": kind.unit}
        for kind, each in charts.charts(names)
    ]
    return sorted(described, key=lambda chart: min(ranks.get(name, len(ranks)) for name in chart["names"]))


def subsets(metrics: Mapping[str, Points]) -> dict[str, Any] | None:
    """Return the last results by group, such as `accuracy/ANNOTATOR`, as a table; None without any."""
    table: dict[str, dict[str, float]] = {}
    columns: dict[str, None] = {}
    for name in metrics:
        metric, slash, group = charts.base(name).partition("/")
        if slash and metric in ("accuracy", "margin", "loss"):
            column = ("eval_" if name.startswith(charts.EVAL) else "") + metric
            columns[column] = None
            table.setdefault(group, {})[column] = float(metrics[name].values[-1])
    if not table:
        return None
    rows = [[group, *(values.get(column) for column in columns)] for group, values in sorted(table.items())]
    return {"columns": ["group", *columns], "rows": rows}


def numbered(folder: Path, suffix: str) -> list[int]:
    """List the numbers that name the files of a folder, NNNNNN and a suffix."""
    try:
        names = [path.name for path in folder.iterdir() if path.suffix == suffix]
    except OSError:
        return []
    return sorted(int(name.split(".")[0]) for name in names if name.split(".")[0].isdecimal())


def rollout_updates(stage: StageDirectory) -> list[int]:
    """List the updates that begin with a rollout whose completions are kept, in the journal or as samples."""
    times = updates_per_rollout(stage)
    journaled = {number * times + 1 for number in stage.rollout_numbers}
    sampled = {step + 1 for step in stage.samples("update")}
    return sorted(journaled | sampled)
