"""The one reader of run directories: what a run was asked for, logged, sampled and evaluated, however far it got.

    run = open_run("runs/first")
    for stage in run.stages:
        print(stage.name, stage.spec["trainer"], stage.metrics[-1]["loss"])

Nothing is written, and no lock is kept, so that a run can be read while it goes on. Every file is read when it is asked
for, and once: open the run again to see what it has written since.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlhf_core.config.toml import parse_toml, to_toml
from rlhf_core.errors import Damaged, InputError, library_words, limited_lines, read_limited
from rlhf_core.runtime.rollout_files import (
    FOLDER,
    RolloutFile,
    read_rollout,
    rollout_numbers,
    rollout_path,
)

if TYPE_CHECKING:
    from rlhf_core.rollouts.journal import JournalEntry

__all__ = ["Damaged", "RunDirectory", "StageDirectory", "open_run"]

RESOLVED, EVENTS, LOCK = "pipeline.resolved.toml", "events.jsonl", ".lock"
"""Files of a run."""
SPEC, BEFORE, METRICS, JOURNAL = "stage.json", "before.json", "metrics.jsonl", FOLDER
"""What a stage's directory has."""
STAGE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
"""A stage's name, which is the name of its directory."""
UPDATES = re.compile(r"(\d+)\.jsonl?")
"""How the name of a file ends that holds what was found after so many updates."""


def open_run(path: str | Path, *, damaged: Callable[[Damaged], object] | None = None) -> RunDirectory:
    """Open the directory of a run, of one of its stages, or of a trainer that was called from Python.

    damaged: called with every file that cannot be read, which then counts as far as it can be read; None: Damaged is
    raised where the file is asked for. Raises InputError where `path` is no such directory.
    """
    directory = Path(path).expanduser().absolute()
    if not directory.is_dir():
        state = "is a file" if directory.exists() else "does not exist"
        raise InputError(f"{path}: {state}; give the directory of a run, such as runs/first")
    run = RunDirectory(directory, _Files(directory / LOCK, damaged or _raise))
    if (
        not run.is_stage
        and not (directory / RESOLVED).is_file()
        and not any(map(_is_stage, directory.iterdir()))
    ):
        raise InputError(
            f"{path}: not a run directory, it has neither {RESOLVED} nor a stage with {SPEC}; give the `dir` of a "
            "pipeline that ran, such as runs/first"
        )
    return run


@dataclass(frozen=True)
class RunDirectory:
    """A run, as its directory has it."""

    dir: Path
    _files: _Files = field(repr=False)

    @property
    def is_stage(self) -> bool:
        """Whether this is the directory of a single stage: of a pipeline's, or of a trainer called from Python."""
        return _is_stage(self.dir)

    @property
    def is_running(self) -> bool:
        """Whether a process is at work in the directory, which then holds its lock."""
        return self._files.growing

    @cached_property
    def text(self) -> str:
        """The resolved pipeline, pipeline.resolved.toml; empty where there is none."""
        return self._files.text(self.dir / RESOLVED)

    @cached_property
    def pipeline(self) -> Mapping[str, Any]:
        """The resolved pipeline as a table; empty where there is none."""
        try:
            return parse_toml(self.text)
        except (ValueError, RecursionError) as error:
            self._files.damaged(Damaged(self.dir / RESOLVED, str(error)))
            return {}

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """Beginnings, warnings and ends of stages, oldest first: `time` (seconds since 1970), `stage`, `event`, …"""
        return self._files.rows(self.dir / EVENTS)

    @cached_property
    def stages(self) -> tuple[StageDirectory, ...]:
        """Stages in the order of the pipeline, then others by age; some may not have begun."""
        if self.is_stage:
            alone = StageDirectory(self.dir.name, self.dir, {}, self._files)
            return (replace(alone, name=str(alone.spec.get("name") or alone.name)),)
        there = {path.name: path for path in self.dir.iterdir() if _is_stage(path)}
        tables = self._tables()
        others = sorted(there.keys() - tables.keys(), key=lambda name: there[name].stat().st_mtime)
        return tuple(
            StageDirectory(name, self.dir / name, tables.get(name, {}), self._files)
            for name in [*tables, *others]
        )

    @property
    def specs(self) -> Mapping[str, Mapping[str, Any]]:
        """What every stage that has begun was asked for, by name: its stage.json."""
        return {stage.name: stage.spec for stage in self.stages if stage.spec}

    def _tables(self) -> dict[str, Mapping[str, Any]]:
        """Return {name: table} of the stages in the resolved pipeline, leaving out names that are no directory's."""
        stages = self.pipeline.get("stage", [])
        tables = [table for table in stages if isinstance(table, dict)] if isinstance(stages, list) else []
        named = {str(table.get("name", "")): table for table in tables}
        by_name: dict[str, Mapping[str, Any]] = {
            name: table for name, table in named.items() if STAGE_NAME.fullmatch(name)
        }
        if not isinstance(stages, list) or len(by_name) != len(stages):
            self._files.damaged(Damaged(self.dir / RESOLVED, "not every stage in it has a unique name"))
        return by_name


@dataclass(frozen=True)
class StageDirectory:
    """A stage, as its directory has it. table: the stage's in the resolved pipeline; empty where there is none."""

    name: str
    dir: Path
    table: Mapping[str, Any]
    _files: _Files = field(repr=False)

    @cached_property
    def spec(self) -> Mapping[str, Any]:
        """What the stage was asked for, and how far it is: stage.json; empty where there is none.

        Of a stage that failed before it did anything, what it was begun as.

        `trainer`, `config`, `seed`, `versions`, `state` ("running" or "done"), and what else this version records.
        """
        return self._files.object(self.dir / SPEC) or self._files.object(self.dir / BEFORE)

    @property
    def trainer(self) -> str:
        """The name of its trainer; empty where it is not known."""
        return str(self.spec.get("trainer") or self.table.get("trainer") or "")

    @property
    def config(self) -> dict[str, Any]:
        """The fields of its configuration, as far as they are known."""
        asked = self.spec.get("config")
        fields = {**self.table, **(asked if isinstance(asked, dict) else {})}
        return {name: value for name, value in fields.items() if name not in ("name", "trainer")}

    def toml(self) -> str:
        """Return `config` as the lines of a stage's table in a pipeline file."""
        return to_toml({"stage": [self.config]}).partition("[[stage]]\n")[2]

    @cached_property
    def plan(self) -> Mapping[str, Any]:
        """What was planned before the first update, plan.json: `updates`, `start`, `updates_per_epoch`."""
        return self._files.object(self.dir / "plan.json")

    @cached_property
    def best(self) -> Mapping[str, Any]:
        """The best evaluation, best.json, with `load_best_model_at_end`; empty without it."""
        return self._files.object(self.dir / "best.json")

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: `step`, `time` and metrics, null where one was not finite."""
        return self._files.rows(self.dir / METRICS)

    @cached_property
    def weights(self) -> list[dict[str, Any]]:
        """The rows of weights.jsonl, which `log_weights` writes."""
        return self._files.rows(self.dir / "weights.jsonl")

    @cached_property
    def evaluations(self) -> Mapping[int, dict[str, Any]]:
        """Evaluations by the updates before them, evaluations/NNNNNN.json: `rows`, a value per held-out row; `metrics`.

        Each is read when it is asked for.
        """
        return _ByUpdate(self.dir / "evaluations", "*.json", self._files.object)

    def samples(self, name: str) -> Mapping[int, list[dict[str, Any]]]:
        """Return the rows of samples/NAME-NNNNNN.jsonl by the updates before them; each is read when it is asked for.

        name: "update", of rollouts; "evaluation"; "preview".
        """
        return _ByUpdate(self.dir / "samples", f"{name}-*.jsonl", self._files.rows)

    @property
    def rollout_numbers(self) -> list[int]:
        """The numbers of the rollouts in the journal."""
        return rollout_numbers(self.dir / JOURNAL)

    def rollout_file(self, number: int) -> RolloutFile | None:
        """Read the file of one rollout without the trainer, and without JAX; None where it is missing or damaged."""
        path = rollout_path(self.dir / JOURNAL, number)
        try:
            return read_rollout(path)
        except FileNotFoundError:
            return None
        except Exception as error:  # of zipfile, zlib, json and NumPy
            self._files.damaged(_unread(path, error))
            return None

    def rollouts(self) -> Iterator[JournalEntry]:
        """Yield the rollouts of the journal, one in memory at a time."""
        from rlhf_core.rollouts.journal import Journal

        known = self.rollout_numbers
        journal = Journal(self.dir / JOURNAL, known, writes=False)
        for number in known:
            try:
                yield journal.require(number)
            except Damaged as error:
                self._files.damaged(error)

    @property
    def has_artifacts(self) -> bool:
        """Whether an output was saved."""
        return any(self.dir.glob("artifacts/*/rlhf_artifact.json"))

    @property
    def has_metrics(self) -> bool:
        """Whether a file of metrics was begun."""
        return (self.dir / METRICS).is_file()


class _ByUpdate(Mapping[int, Any]):
    """Files of a folder by the number that their names end in, each read when it is asked for."""

    def __init__(self, folder: Path, pattern: str, read: Callable[[Path], Any]) -> None:
        files = folder.glob(pattern) if folder.is_dir() else ()
        numbered = [(UPDATES.search(path.name), path) for path in files]
        self._paths = {int(match[1]): path for match, path in numbered if match}
        self._read = read

    def __getitem__(self, update: int) -> Any:
        return self._read(self._paths[update])

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._paths))

    def __len__(self) -> int:
        return len(self._paths)


@dataclass(frozen=True)
class _Files:
    """Reads files that may be missing, which are empty then, or damaged."""

    lock: Path
    damaged: Callable[[Damaged], object]

    @property
    def growing(self) -> bool:
        try:
            with open(self.lock, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def text(self, path: Path) -> str:
        try:
            return read_limited(path).decode(errors="replace") if path.is_file() else ""
        except (OSError, ValueError) as error:
            self.damaged(_unread(path, error))
            return ""

    def object(self, path: Path) -> dict[str, Any]:
        content = self.text(path)
        if not content:
            return {}
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            self.damaged(Damaged(path, library_words(error)))
            return {}
        if not isinstance(value, dict):
            self.damaged(Damaged(path, "it holds no JSON object"))
            return {}
        return value

    def rows(self, path: Path) -> list[dict[str, Any]]:
        """Read JSON lines. The half line at the end of a file that grows is left out, and is no damage."""
        rows: list[dict[str, Any]] = []
        wrong: list[int] = []
        line = b"\n"
        try:
            for number, line in enumerate(limited_lines(path) if path.is_file() else (), 1):
                row = _row(line)
                if row is not None:
                    rows.append(row)
                elif line.strip():
                    wrong.append(number)
        except (OSError, ValueError) as error:
            self.damaged(_unread(path, error))
        if wrong and not line.endswith(b"\n") and self.growing:
            wrong.pop()
        if wrong:
            self.damaged(Damaged(path, f"line {wrong[0]} is no JSON object", lines=len(wrong)))
        return rows


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _unread(path: Path, error: Exception) -> Damaged:
    if isinstance(error, OSError):
        return Damaged(path, library_words(error), "make it readable, or restore it")
    return Damaged(path, library_words(error))


def _is_stage(path: Path) -> bool:
    return any((path / name).is_file() for name in (SPEC, BEFORE, METRICS))


def _raise(error: Damaged) -> NoReturn:
    raise error
