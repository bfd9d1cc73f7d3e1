"""stage.json: what a stage was run with and what came of it, so that it is skipped, continued or refused next time."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlhf_core import artifacts
from rlhf_core.contracts import Artifact
from rlhf_core.errors import InputError
from rlhf_core.runtime.files import remove, seal, unseal, write_atomic
from rlhf_core.stage import differences

FILE = "stage.json"
FORMAT = 2

State = Literal["new", "running", "done"]


class StageRecord:
    """The stage.json of one stage.

    fix: what a user does to run the stage with other settings. Raises InputError where the file is there but damaged.
    """

    def __init__(self, directory: Path, name: str, *, fix: str) -> None:
        self.dir, self.name, self.fix = directory, name, fix
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
            return unseal(content)
        except ValueError as error:
            raise InputError(
                f"{self.path} is damaged, or was written by another version ({error}). Delete that file: the stage "
                "then goes on from its newest checkpoint, which knows what it belongs to. Or delete "
                f"{self.dir} to run it from its start"
            ) from None

    @property
    def state(self) -> State:
        if not self.then:
            return "new"
        return "done" if self.then["state"] == "done" else "running"

    @property
    def has_checkpoints(self) -> bool:
        """Whether a state was saved; a checkpoint that was being replaced when the process died is one."""
        directory = self.dir / "checkpoints"
        return any(directory.glob("[0-9]*")) or any(directory.glob(".*.replaced"))

    @property
    def has_artifacts(self) -> bool:
        """Whether a trainer, perhaps one without checkpoints, saved an output."""
        return any((self.dir / "artifacts").glob(f"*/{artifacts.MANIFEST}"))

    def settle(self, now: differences.Record) -> State:
        """What becomes of the stage with what is asked for now; "running" for a finished one that is extended.

        Raises InputError, one line per difference, where it was begun as another experiment. Inputs that do not exist
        are not compared: the stages that make them have not run yet.
        """
        if not self.then:
            return "new"
        found = differences.compare(self.then, now)
        state: State = self.state
        problems = [str(each) for each in found.refused]
        length = [each for each in found.warned if each.field in differences.LENGTH]
        if length and found.refused == [] and not self._same_length(now):
            reason = differences.fixed_length(self.then, now) or self._cannot_grow(now)
            if reason is None:
                state = "running"
            else:
                problems += [f"{each}: {reason}" for each in length]
        if state == "done" or not self._knows_rows():
            problems += map(str, found.data)
        if problems:
            begun = "finished" if self.state == "done" else "begun"
            raise InputError(
                *(f"stage '{self.name}'.{problem}" for problem in problems),
                f"stage '{self.name}' was {begun} with other settings: {self.fix}",
            )
        return state

    def warnings(self, now: differences.Record) -> list[str]:
        """Differences that are no reason to refuse, but to say."""
        found = differences.compare(self.then, now) if self.then else differences.Differences([], [], [])
        versions = [each.said for each in found.warned if each.said]
        fields = [str(each) for each in found.warned if not each.said]
        lines = [f"stage '{self.name}' was begun with {'; '.join(versions)}"] if versions else []
        if fields and self.settle(now) == "running":
            lines.append(f"stage '{self.name}' goes on with other settings: {'; '.join(fields)}")
        if found.data and not self.has_checkpoints:
            lines.append(
                f"stage '{self.name}'.{'; '.join(map(str, found.data))}; nothing was trained on it yet, as there is no "
                "checkpoint"
            )
        return lines

    def _same_length(self, now: differences.Record) -> bool:
        """Whether fields that differ make no difference, as epochs do where the number of updates is given."""
        then, asked = self.then["config"], now["config"]
        steps = then.get("max_training_steps")
        return steps is not None and steps == asked.get("max_training_steps")

    def _cannot_grow(self, now: differences.Record) -> str | None:
        """Why the number of updates cannot be another, None where it can."""
        try:
            plan = json.loads((self.dir / "plan.json").read_bytes())
            per_epoch, before = float(plan["updates_per_epoch"]), int(plan["updates"])
        except (OSError, ValueError, KeyError, TypeError):
            return None if self.state == "running" else "its trainer does not say how it could be extended"
        asked = differences.planned_updates(now["config"], per_epoch)
        if self.state == "done" and asked <= before:
            return f"the stage has made its {before:,} updates; it can only be extended"
        return None

    def _knows_rows(self) -> bool:
        """Whether a checkpoint, or there being none, lets the loop tell which rows it has drawn.

        Data that changed in rows that were not drawn yet can then be accepted; `fit` decides.
        """
        checkpoints = [path for path in (self.dir / "checkpoints").glob("[0-9]*") if path.name.isdecimal()]
        if not checkpoints:
            return True
        newest = max(checkpoints, key=lambda path: int(path.name))
        try:
            return bool(json.loads((newest / "host.json").read_bytes())["host"]["rows"])
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def write_running(self, now: differences.Record) -> None:
        """Before the trainer runs; the inputs are there now, and what they hold is part of the record."""
        started = self.then.get("started", _now())
        self._write({"format": FORMAT, "name": self.name, "state": "running", **now, "started": started})

    def write_done(self, metrics: Mapping[str, float], outputs: Mapping[str, Artifact]) -> None:
        """After it: with its last metrics, and what its artifacts are."""
        results = {
            "metrics": {name: float(x) if math.isfinite(x) else None for name, x in metrics.items()},
            "artifacts": {name: artifacts.identity(artifact.path) for name, artifact in outputs.items()},
        }
        self._write({**self.then, "state": "done", "finished": _now(), "results": results})

    def put_back(self, before: Mapping[str, Any]) -> None:
        """Undo `write_running` for a stage that failed before it did anything: its input may now be mended."""
        if before:
            self._write(dict(before))
        else:
            remove(self.path)
            self.then = {}

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric of a finished stage, NaN where it was not finite."""
        kept = self.then.get("results", {}).get("metrics", {})
        return {name: math.nan if value is None else value for name, value in kept.items()}

    def require_outputs(self, outputs: Mapping[str, Artifact]) -> None:
        """Raise InputError where an artifact is another than the one that the finished stage wrote."""
        kept = self.then.get("results", {}).get("artifacts", {})
        problems = [
            f"stage '{self.name}': output '{name}' in {artifact.path} is not what the stage wrote there; it was done "
            f"before: delete {self.dir} to run it anew"
            for name, artifact in outputs.items()
            if name in kept and artifacts.identity(artifact.path) != kept[name]
        ]
        if problems:
            raise InputError(*problems)

    def _write(self, record: dict[str, Any]) -> None:
        write(self.dir, record)
        self.then = record


def write(directory: Path, record: Mapping[str, Any]) -> None:
    """Put a stage's record into its directory, with a checksum. It holds the configuration: nobody else may read it."""
    write_atomic(directory / FILE, seal(record), private=True)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
