"""Read and write the records of stages, stage.json, and decide about the stages of a run by them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_core import artifacts
from rlhf_core.contracts import Artifact
from rlhf_core.errors import UNREADABLE, InputError, read_limited, warn
from rlhf_core.hub import Pins
from rlhf_core.runtime.agreement import broadcast_text, raise_together
from rlhf_core.runtime.files import remove, seal, unseal, write_atomic
from rlhf_core.stage.decide import Begun, Decision, decide_all
from rlhf_core.stage.spec import Difference, Record, StageSpec

FILE = "stage.json"
METRICS = "metrics.jsonl"
BEFORE = "before.json"
"""The record of a run of which nothing is kept."""
FORMAT = 3
LAST_COMMITS = {2: "3dbd4a3a"}
"""{format of before: the last commit that continues a run whose records have it}."""


class FormatError(InputError):
    """A record that another version wrote in a format of its own. Nothing of its run is touched."""


class StageRecord:
    """The stage.json of one stage, and what else its directory tells. Raises InputError if the file is damaged."""

    def __init__(self, directory: Path, name: str) -> None:
        self.dir, self.name = directory, name
        self.path = directory / FILE
        self.then: dict[str, Any] = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            content = read_limited(self.path)
            too_large = None
        except ValueError as error:
            content, too_large = b"", error
        except FileNotFoundError:
            return {}
        except NotADirectoryError:
            raise InputError(
                f"{self.dir} is not a directory; move it away, or give another directory"
            ) from None
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}") from None
        try:
            if too_large is not None:
                raise too_large
            record = unseal(content)
            found = record["format"]
        except (ValueError, KeyError) as error:
            raise InputError(
                f"{self.path} is damaged ({error}). Delete that file: the stage then continues from its newest "
                f"checkpoint, which records what it belongs to. Or delete {self.dir} to run it from the start"
            ) from None
        if found != FORMAT:
            commit = LAST_COMMITS.get(found)
            how = (
                "the version that wrote it"
                if commit is None
                else f"that of commit {commit}, the last to read it,"
            )
            raise FormatError(
                f"{self.path} has format {found}, and this version reads {FORMAT}. Nothing was changed: {how} "
                "continues the run, and its models are read as before; here give another directory"
            )
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
            plan = json.loads(read_limited(self.dir / "plan.json"))
            total, per_epoch = int(plan["updates"]), float(plan["updates_per_epoch"])
        return Begun(self.then, self.done, self.made, total, per_epoch)

    def with_accepted(self, spec: StageSpec, accepted: Sequence[Difference]) -> StageSpec:
        """Add to what is asked for what was accepted before and what is accepted now, after which update."""
        new = [
            {"field": change.field, "change": str(change), "after_update": self.made or 0, "time": _now()}
            for change in accepted
        ]
        all_accepted = [*self.then.get("accepted", ()), *new]
        if not all_accepted:
            return spec
        return replace(spec, record={**spec.record, "accepted": all_accepted})

    def write_running(self, spec: StageSpec, day: str | None = None) -> None:
        """Record that the stage runs, before its trainer starts, when all inputs exist and can be hashed.

        day: the day on which the run began, which `started` may miss by another clock or a moment before midnight.
        """
        started = self.then.get("started", _now())
        day = self.then.get("day", day)
        record = {"format": FORMAT, "name": self.name, "state": "running", **spec.record, "started": started}
        self._write(record if day is None else {**record, "day": day})

    def write_done(self, metrics: Mapping[str, float], outputs: Mapping[str, Artifact]) -> None:
        """Record that the stage is done, with its last metrics, their file's hash and its artifacts' identities."""
        logged = self.dir / METRICS
        results = {
            "metrics": {name: float(x) if math.isfinite(x) else None for name, x in metrics.items()},
            "artifacts": {name: artifacts.identity(artifact.path) for name, artifact in outputs.items()},
            "files": {METRICS: artifacts.hash_file(logged)} if logged.is_file() else {},
        }
        self._write({**self.then, "state": "done", "finished": _now(), "results": results})

    def keep_done(self, spec: StageSpec) -> None:
        """Record the accepted changes of a stage that stays done."""
        now = {key: spec.record[key] for key in ("config", "inputs", "code", "accepted")}
        self._write({**self.then, **now})

    def put_back(self, before: Mapping[str, Any]) -> None:
        """Undo `write_running` for a stage that failed before it did anything, so that its input can be repaired.

        before: the record until then; without one, `attempt` returns the one that is removed.
        """
        if before:
            self._write(dict(before))
            return
        if self.then:
            write_atomic(self.dir / BEFORE, seal(self.then), private=True)
        remove(self.path)
        self.then = {}

    @property
    def attempt(self) -> Record | None:
        """What the stage was begun as by a run of which nothing is kept."""
        with suppress(OSError, ValueError, KeyError):  # it is only told
            return unseal(read_limited(self.dir / BEFORE))
        return None

    def forget_attempt(self) -> None:
        remove(self.dir / BEFORE)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the last value of every metric of a finished stage, NaN where it was not finite."""
        metrics = self.then.get("results", {}).get("metrics", {})
        return {name: math.nan if value is None else value for name, value in metrics.items()}

    def require_outputs(self, outputs: Mapping[str, Artifact]) -> None:
        """Raise InputError if an artifact is not the one that the finished stage wrote."""
        identities = self.then.get("results", {}).get("artifacts", {})
        problems = [
            f"stage '{self.name}': output '{name}' in {artifact.path} is not what the stage wrote there; it "
            f"was finished: delete {self.dir} to rerun it"
            for name, artifact in outputs.items()
            if name in identities and artifacts.identity(artifact.path) != identities[name]
        ]
        if problems:
            raise InputError(*problems)

    def _write(self, record: dict[str, Any]) -> None:
        write(self.dir, record)
        self.then = record


def recorded_pins(directories: Sequence[Path]) -> Pins:
    """Return the commits of hf:// names that are in the records of stages.

    Raises FormatError for a record of another format, before anything is locked or written.
    """
    pins: dict[str, str] = {}
    for directory in directories:
        try:
            pins |= StageRecord(directory, directory.name).then.get("hub", {})
        except FormatError:
            raise
        except (InputError, ValueError):
            continue  # damaged, or no path: reported when the stage is decided about
    return Pins(pins)


def write(directory: Path, record: Mapping[str, Any]) -> None:
    """Write a stage's record with a checksum, readable by its owner only: it holds the configuration."""
    write_atomic(directory / FILE, seal(record), private=True)


class StageRun(NamedTuple):
    """A stage of a run: what is asked for, its record, and the decision about it."""

    spec: StageSpec
    record: StageRecord
    decision: Decision


def read_records(specs: Sequence[StageSpec], accept: Collection[str] = ()) -> dict[str, StageRun]:
    """Read the records of a run's stages and decide about them, by name.

    accept: names of changes to accept. Warns of one that no stage has.
    """
    records = [StageRecord(spec.dir, spec.name) for spec in specs]
    decisions = decide_all(specs, {record.name: record.begun for record in records}, accept)
    used = frozenset[str]().union(*(decision.used for decision in decisions.values()))
    for name in sorted({*accept} - used):
        warn(f"accept '{name}': no refused change has this name")
    return {
        spec.name: StageRun(spec, record, decisions[spec.name])
        for spec, record in zip(specs, records, strict=True)
    }


def decide_together(
    make_specs: Callable[[], Sequence[StageSpec]], accept: Collection[str] = (), **facts: Any
) -> dict[str, StageRun]:
    """Decide about a run's stages, in agreement with the other processes of the job.

    make_specs: returns the stages, in order. accept: see `read_records`. facts: what else all processes must agree on.
    Raises InputError, on every process, if a stage is refused or processes differ.
    """
    with raise_together():
        runs = read_records(make_specs(), accept)
        problems = [line for each in runs.values() for line in each.decision.reasons]
        if problems:
            raise InputError(*problems)
    now = {
        name: {"record": dict(each.spec.record), "state": each.record.then.get("state", "new")}
        for name, each in runs.items()
    }
    here = json.loads(json.dumps({**facts, "stages": now}))
    first = json.loads(broadcast_text(json.dumps(here)))
    with raise_together():
        lines = [] if here == first else [*_differences(first, here, runs)]
        if lines:
            lines[-1] += "; give all processes of a job the same pipeline, data, code and versions"
            raise InputError(*lines)
    return runs


def _differences(
    first: Mapping[str, Any], here: Mapping[str, Any], runs: Mapping[str, StageRun]
) -> Iterator[str]:
    """Yield a line for each difference between the first process and this one."""
    for name in first:
        if name != "stages" and first[name] != here[name]:
            yield f"{name} is {json.dumps(here[name])}, and {json.dumps(first[name])} on process 0"
    ours, theirs = here["stages"], first["stages"]
    if list(ours) != list(theirs):
        yield f"the stages are {', '.join(ours)}, and {', '.join(theirs)} on process 0"
        return
    for name, stage in ours.items():
        changes = runs[name].spec.diff(theirs[name]["record"])
        for change in (*changes.refused, *changes.warned, *changes.data):
            yield f"stage '{name}'.{change.field} is {change.now}, and {change.before} on process 0"
        if stage["state"] != theirs[name]["state"]:
            yield (
                f"stage '{name}' is {stage['state']}, and {theirs[name]['state']} on process 0: the run directory must "
                "be on a disk that all processes share"
            )


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
