"""Record a stage's settings and results in stage.json, to skip, continue or refuse it the next time."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from rlhf_core import artifacts
from rlhf_core.contracts import Artifact
from rlhf_core.errors import UNREADABLE, InputError
from rlhf_core.runtime.files import remove, seal, unseal, write_atomic
from rlhf_core.stage import differences

FILE = "stage.json"
FORMAT = 2
FIELDS = {
    "name": str,
    "state": str,
    "started": str,
    "trainer": str,
    "seed": int,
    "config": dict,
    "inputs": dict,
    "code": dict,
    "versions": dict,
}

State = Literal["new", "running", "done"]


class StageRecord:
    """Read and write the stage.json of one stage.

    fix: how a user can run the stage with other settings, for messages. accept: names of refused changes to accept,
    see `differences.accept_names`. Raises InputError if the file is damaged.
    """

    def __init__(self, directory: Path, name: str, *, fix: str, accept: Collection[str] = ()) -> None:
        self.dir, self.name, self.fix, self.accept = directory, name, fix, accept
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
            _require_fields(record)
            return record
        except ValueError as error:
            raise InputError(
                f"{self.path} is damaged, or was written by another version ({error}). Delete that file: the stage "
                "then goes on from its newest checkpoint, which records what it belongs to. Or delete "
                f"{self.dir} to run it from the start"
            ) from None

    @property
    def state(self) -> State:
        if not self.then:
            return "new"
        return "done" if self.then["state"] == "done" else "running"

    @property
    def has_checkpoints(self) -> bool:
        """Return whether a checkpoint exists, including one that was being replaced when the process died."""
        directory = self.dir / "checkpoints"
        return any(directory.glob("[0-9]*")) or any(directory.glob(".*.replaced"))

    @property
    def has_artifacts(self) -> bool:
        """Return whether the trainer, perhaps one without checkpoints, saved an output."""
        return any((self.dir / "artifacts").glob(f"*/{artifacts.MANIFEST}"))

    def settle(self, now: differences.Record) -> State:
        """Decide what to do with the stage when asked for `now`; "running" for a finished one that is extended.

        Raises InputError, one line per difference, if it was begun as another experiment. Inputs that do not exist
        are not compared: the stages that make them have not run yet.
        """
        if not self.then:
            return "new"
        changes = differences.compare(self.then, now)
        state: State = self.state
        refused = [change for change in changes.refused if change not in self.accepted(now)]
        problems = [f"{change}{self._how_to_accept(change, now)}" for change in refused]
        length = [change for change in changes.warned if change.field in differences.LENGTH]
        too_long: list[str] = []
        if length and not refused and not self._same_length(now):
            reason = self._why_not_extended(now)
            if reason is None:
                state = "running"
            else:
                too_long += [f"{change}: {reason}" for change in length]
        if state == "done" or not self._knows_rows():
            problems += map(str, changes.data)
        if problems or too_long:
            begun = "finished" if self.state == "done" else "begun"
            ending = f"stage '{self.name}' was {begun} with other settings: {self.fix}"
            raise InputError(
                *(f"stage '{self.name}'.{problem}" for problem in (*too_long, *problems)),
                *([ending] if problems or self.state == "done" else []),
            )
        return state

    def accepted(self, now: differences.Record) -> list[differences.Difference]:
        """List the refused changes that the user accepts by name, with or without the stage's."""
        names = {name.removeprefix(f"{self.name}.") for name in self.accept}
        changes = differences.compare(self.then, now).refused if self.then and names else []
        return [each for each in changes if names & {*differences.accept_names(each.field, self.then, now)}]

    def with_accepted(self, now: differences.Record) -> differences.Record:
        """Add to `now` what was accepted before and what is accepted now, after which update."""
        after, time_now = self.newest or 0, _now()
        new = [
            {"field": change.field, "change": str(change), "after_update": after, "time": time_now}
            for change in self.accepted(now)
        ]
        accepted = [*self.then.get("accepted", ()), *new]
        return {**now, "accepted": accepted} if accepted else now

    def _how_to_accept(self, change: differences.Difference, now: differences.Record) -> str:
        names = differences.accept_names(change.field, self.then, now)
        if not names:
            return ""
        what = "keep the stage, which was trained before that" if self.state == "done" else "continue with it"
        return f'; to {what}: --accept {shlex.quote(names[0])}, in Python accept=["{names[0]}"]'

    def warnings(self, now: differences.Record) -> list[str]:
        """List the differences to warn of."""
        changes = differences.compare(self.then, now) if self.then else differences.Differences([], [], [])
        versions = [change.said for change in changes.warned if change.said]
        fields = [str(change) for change in changes.warned if not change.said]
        lines = [f"stage '{self.name}' was begun with {'; '.join(versions)}"] if versions else []
        accepted = self.accepted(now)
        if accepted:
            what = "; ".join(map(str, accepted))
            how = f"continues after update {self.newest or 0}" if self.settle(now) == "running" else "is kept"
            lines.append(f"stage '{self.name}' {how} with what was accepted: {what}")
        if fields and self.settle(now) == "running":
            lines.append(f"stage '{self.name}' goes on with other settings: {'; '.join(fields)}")
        if changes.data and not self.has_checkpoints:
            lines.append(
                f"stage '{self.name}'.{'; '.join(map(str, changes.data))}; nothing was trained on it yet, as there is "
                "no checkpoint"
            )
        return lines

    def _same_length(self, now: differences.Record) -> bool:
        """Return whether the length is the same after all: epochs do not count where `max_training_steps` is set."""
        then, asked = self.then["config"], now["config"]
        steps = then.get("max_training_steps")
        return steps is not None and steps == asked.get("max_training_steps")

    def _why_not_extended(self, now: differences.Record) -> str | None:
        """Explain why the number of updates cannot change; None if it can."""
        try:
            plan = json.loads((self.dir / "plan.json").read_bytes())
            per_epoch, before = float(plan["updates_per_epoch"]), int(plan["updates"])
        except UNREADABLE:
            return None if self.state == "running" else "its trainer does not say how it could be extended"
        asked = differences.planned_updates(now["config"], per_epoch)
        if self.state == "done" and asked <= before:
            return f"the stage has made its {before:,} updates; it can only be extended"
        made = self.newest if self.newest is not None else before if self.state == "done" else 0
        return differences.fixed_length(now["config"], before, asked, made)

    @property
    def newest(self) -> int | None:
        """Return the updates made before the newest checkpoint; None without one."""
        checkpoints = (self.dir / "checkpoints").glob("[0-9]*")
        return max((int(path.name) for path in checkpoints if path.name.isdecimal()), default=None)

    def _knows_rows(self) -> bool:
        """Return whether the loop can know which rows it has drawn: from the newest checkpoint, or without any.

        Changes in rows that were not drawn yet can then be accepted; `fit` decides.
        """
        if self.newest is None:
            return True
        try:
            host = json.loads((self.dir / "checkpoints" / str(self.newest) / "host.json").read_bytes())
            return bool(host["host"]["rows"])
        except UNREADABLE:
            return False

    def write_running(self, now: differences.Record, day: str | None = None) -> None:
        """Record that the stage runs, before its trainer starts, when all inputs exist and can be hashed.

        day: the day on which the run began. It is kept beside `started`, which another clock or a moment before
        midnight may put on another day.
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

    def keep_done(self, now: differences.Record) -> None:
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
            f"before: delete {self.dir} to run it anew"
            for name, artifact in outputs.items()
            if name in identities and artifacts.identity(artifact.path) != identities[name]
        ]
        if problems:
            raise InputError(*problems)

    def _write(self, record: dict[str, Any]) -> None:
        write(self.dir, record)
        self.then = record


def _require_fields(record: Mapping[str, Any]) -> None:
    """Raise ValueError for a record of another format, or without what is read of it."""
    if record.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    fields = {**FIELDS, "finished": str} if record.get("state") == "done" else FIELDS
    for name, kind in {**fields, **({"results": dict} if "results" in record else {})}.items():
        if not isinstance(record.get(name), kind):
            raise ValueError(f"its {name} is missing, or of another type")
    try:
        differences.compare(record, record)
    except UNREADABLE as error:
        raise ValueError(f"a field of it is of another type ({type(error).__name__}: {error})") from None


def write(directory: Path, record: Mapping[str, Any]) -> None:
    """Write a stage's record with a checksum, readable by its owner only: it holds the configuration."""
    write_atomic(directory / FILE, seal(record), private=True)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
