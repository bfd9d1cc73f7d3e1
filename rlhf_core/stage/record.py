"""Read and write a stage's record, stage.json, and open the records of a run in agreement with the job's processes."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlhf_core import artifacts
from rlhf_core.contracts import Artifact
from rlhf_core.errors import UNREADABLE, InputError
from rlhf_core.runtime.agreement import enter_on_first, gather_texts, require_shared_directory
from rlhf_core.runtime.directory_lock import lock
from rlhf_core.runtime.files import remove, seal, unseal, write_atomic
from rlhf_core.stage.decide import (
    Begun,
    Decision,
    Difference,
    Record,
    Request,
    compare,
    decide_all,
    unused_accepts,
)

FILE = "stage.json"
FORMAT = 3


class StageRecord:
    """The stage.json of one stage, and what else its directory tells. Raises InputError if the file is damaged."""

    def __init__(self, directory: Path, name: str) -> None:
        self.dir, self.name = directory, name
        self.path = directory / FILE
        self.then: dict[str, Any] = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except NotADirectoryError:
            raise InputError(
                f"{self.dir} is not a directory; move it away, or give another directory"
            ) from None
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}") from None
        try:
            record = unseal(content)
            if record["format"] != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
        except (ValueError, KeyError) as error:
            raise InputError(
                f"{self.path} is damaged, or was written by another version ({error}). Delete that file: the stage "
                "then continues from its newest checkpoint, which records what it belongs to. Or delete "
                f"{self.dir} to run it from the start"
            ) from None
        return record

    @property
    def done(self) -> bool:
        return self.then.get("state") == "done"

    @property
    def has_checkpoints(self) -> bool:
        """Return whether a checkpoint exists, including one that was being replaced when the process died."""
        directory = self.dir / "checkpoints"
        return any(directory.glob("[0-9]*")) or any(directory.glob(".*.replaced"))

    @property
    def has_artifacts(self) -> bool:
        """Return whether the trainer, perhaps one without checkpoints, saved an output."""
        return any((self.dir / "artifacts").glob(f"*/{artifacts.MANIFEST}"))

    @property
    def made(self) -> int | None:
        """Return the updates made before the newest checkpoint; None without one."""
        checkpoints = (self.dir / "checkpoints").glob("[0-9]*")
        return max((int(path.name) for path in checkpoints if path.name.isdecimal()), default=None)

    @property
    def begun(self) -> Begun | None:
        """Return the stage as `decide` compares it; None if there is no record."""
        if not self.then:
            return None
        total, per_epoch = None, None
        with suppress(*UNREADABLE):  # of a trainer that does not write it
            plan = json.loads((self.dir / "plan.json").read_bytes())
            total, per_epoch = int(plan["updates"]), float(plan["updates_per_epoch"])
        return Begun(self.then, self.done, self.made, total, per_epoch)

    def with_accepted(self, now: Record, accepted: Sequence[Difference]) -> Record:
        """Add to `now` what was accepted before and what is accepted now, after which update."""
        new = [
            {"field": change.field, "change": str(change), "after_update": self.made or 0, "time": _now()}
            for change in accepted
        ]
        all_accepted = [*self.then.get("accepted", ()), *new]
        return {**now, "accepted": all_accepted} if all_accepted else now

    def write_running(self, now: Record, day: str | None = None) -> None:
        """Record that the stage runs, before its trainer starts, when all inputs exist and can be hashed.

        day: the day on which the run began, which `started` may miss by another clock or a moment before midnight.
        """
        started, day = self.then.get("started", _now()), self.then.get("day", day)
        record = {"format": FORMAT, "name": self.name, "state": "running", **now, "started": started}
        self._write(record if day is None else {**record, "day": day})

    def write_done(self, metrics: Mapping[str, float], outputs: Mapping[str, Artifact]) -> None:
        """Record that the stage is done, with its last metrics and the identities of its artifacts."""
        results = {
            "metrics": {name: float(x) if math.isfinite(x) else None for name, x in metrics.items()},
            "artifacts": {name: artifacts.identity(artifact.path) for name, artifact in outputs.items()},
        }
        self._write({**self.then, "state": "done", "finished": _now(), "results": results})

    def keep_done(self, now: Record) -> None:
        """Record the accepted changes of a stage that stays done."""
        self._write({**self.then, **{key: now[key] for key in ("config", "inputs", "code", "accepted")}})

    def put_back(self, before: Mapping[str, Any]) -> None:
        """Undo `write_running` for a stage that failed before it did anything, so that its input can be repaired."""
        if before:
            self._write(dict(before))
        else:
            remove(self.path)
            self.then = {}

    @property
    def metrics(self) -> dict[str, float]:
        """Return the last value of every metric of a finished stage, NaN where it was not finite."""
        metrics = self.then.get("results", {}).get("metrics", {})
        return {name: math.nan if value is None else value for name, value in metrics.items()}

    def require_outputs(self, outputs: Mapping[str, Artifact]) -> None:
        """Raise InputError if an artifact is not the one that the finished stage wrote."""
        identities = self.then.get("results", {}).get("artifacts", {})
        problems = [
            f"stage '{self.name}': output '{name}' in {artifact.path} is not what the stage wrote there; it was done "
            f"before: delete {self.dir} to rerun it"
            for name, artifact in outputs.items()
            if name in identities and artifacts.identity(artifact.path) != identities[name]
        ]
        if problems:
            raise InputError(*problems)

    def _write(self, record: dict[str, Any]) -> None:
        write(self.dir, record)
        self.then = record


def write(directory: Path, record: Mapping[str, Any]) -> None:
    """Write a stage's record with a checksum, readable by its owner only: it holds the configuration."""
    write_atomic(directory / FILE, seal(record), private=True)


def read_records(
    requests: Sequence[Request], accept: Collection[str] = ()
) -> tuple[dict[str, StageRecord], dict[str, Decision]]:
    """Read the records of a run's stages and decide about them: {stage: its record}, {stage: the decision}.

    Warns of a name in `accept` that no change has.
    """
    records = {each.name: StageRecord(each.dir, each.name) for each in requests}
    decisions = decide_all(requests, {name: record.begun for name, record in records.items()})
    for line in unused_accepts(accept, decisions):
        warnings.warn(line, stacklevel=2)
    return records, decisions


@contextmanager
def open_records(
    directory: Path,
    ask: Callable[[], Sequence[Request]],
    *,
    field: str = "dir",
    accept: Collection[str] = (),
    prepare: Callable[[], None] | None = None,
    **facts: Any,
) -> Iterator[tuple[dict[str, StageRecord], dict[str, Decision]]]:
    """Lock a run directory and decide about its stages: {stage: its record}, {stage: the decision}.

    The main process takes the lock; every process compares. ask: returns the stages, in order. accept: all names of
    changes to accept. prepare: called first, on the main process alone. facts: what else all processes must agree on.
    Raises InputError, on every process, if the directory is in use, a stage is refused, or processes differ.
    """
    with enter_on_first(lambda: _locked(directory, field, prepare)):
        require_shared_directory(directory, field)
        records: dict[str, StageRecord] = {}
        decisions: dict[str, Decision] = {}
        problems: list[str] = []
        try:
            requests = ask()
            records, decisions = read_records(requests, accept)
            problems += [line for decision in decisions.values() for line in decision.reasons]
            facts["stages"] = {
                each.name: {"record": dict(each.now), "state": records[each.name].then.get("state", "new")}
                for each in requests
            }
        except InputError as error:
            problems += error.problems
        require_agreement(facts, problems)
        yield records, decisions


@contextmanager
def _locked(directory: Path, field: str, prepare: Callable[[], None] | None) -> Iterator[None]:
    with lock(directory, field):
        if prepare is not None:
            prepare()
        yield


def require_agreement(facts: Mapping[str, Any], problems: Sequence[str]) -> None:
    """Raise the same InputError on every process if any has problems, or if their facts differ."""
    reports = [json.loads(text) for text in gather_texts(json.dumps([facts, list(problems)]))]
    processes: dict[str, list[int]] = {}
    for process, (_, process_problems) in enumerate(reports):
        for problem in process_problems:
            processes.setdefault(problem, []).append(process)
    if processes:
        raise InputError(
            *(p if len(on) == len(reports) else f"process {on[0]}: {p}" for p, on in processes.items())
        )
    first = reports[0][0]
    differing = [
        f"process {process}: {line}"
        for process, (process_facts, _) in enumerate(reports)
        for line in _differences(first, process_facts)
    ]
    if differing:
        raise InputError(
            *differing,
            "the processes of a job must be given the same pipeline, data, code and versions, and see the same run "
            "directory; start all of them with the same",
        )


def _differences(first: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each difference between the first process and another one."""
    for name in first:
        if name != "stages" and first[name] != here.get(name):
            yield f"{name} is {json.dumps(here.get(name))}, and {json.dumps(first[name])} on process 0"
    ours, theirs = here["stages"], first["stages"]
    if list(ours) != list(theirs):
        yield f"the stages are {', '.join(ours)}, and {', '.join(theirs)} on process 0"
        return
    for name, stage in ours.items():
        changes = compare(theirs[name]["record"], stage["record"])
        for change in (*changes.refused, *changes.warned, *changes.data):
            yield f"stage '{name}'.{change.field} is {change.now}, and {change.before} on process 0"
        if stage["state"] != theirs[name]["state"]:
            yield (
                f"stage '{name}' is {stage['state']}, and {theirs[name]['state']} on process 0: the run directory must "
                "be on a disk that all processes share"
            )


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
