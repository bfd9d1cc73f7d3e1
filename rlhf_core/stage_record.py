"""stage.json: what a stage was run with, so that it is skipped, continued or refused the next time."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf_core import artifacts
from rlhf_core.errors import InputError

if TYPE_CHECKING:
    from rlhf_core.plan import Input, StagePlan

FILE = "stage.json"
FORMAT = 1
SAMPLED_BYTES = 2**20
UNCOMPARED = frozenset(
    {
        "logger",
        "use_wandb",
        "log_steps",
        "progress_bar_type",
        "progress_metrics",
        "track_memory",
        "num_preview_samples",
        "save_steps",
        "save_interval_minutes",
        "save_total_limit",
        "save_directory",
        "training_time_limit",
        "dataset_num_proc",
    }
)
"""Fields that say how a run is watched and kept, not what it computes: they may change on the way."""

State = Literal["new", "running", "done"]


class StageRecord:
    """The stage.json of one stage.

    Raises InputError where the file is there but cannot be read.
    """

    def __init__(self, plan: StagePlan) -> None:
        self.plan = plan
        self.path = plan.dir / FILE
        self.then: dict[str, Any] = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_bytes())
            if not isinstance(found, dict) or found["format"] != FORMAT:
                raise ValueError("it has another format than this version writes")
            for key in ("state", "trainer", "seed", "config", "inputs", "versions"):
                found[key]
            return found
        except FileNotFoundError:
            return {}
        except NotADirectoryError:
            raise InputError(
                f"{self.plan.dir} is not a directory; move it away, or use another --dir"
            ) from None
        except (ValueError, KeyError) as error:
            raise InputError(
                f"{self.path}: not readable ({error}); delete {self.plan.dir} to run the stage from its "
                "start, or use another --dir"
            ) from None

    @property
    def state(self) -> State:
        if not self.then:
            return "new"
        return "done" if self.then["state"] == "done" else "running"

    def refuse_changes(self) -> None:
        """Raise InputError, one line a difference, where it was begun with another config or other inputs.

        Artifacts that do not exist are not compared: the stages that make them have not run yet.
        """
        if not self.then:
            return
        problems = self.differences()
        if problems:
            begun = "finished" if self.state == "done" else "begun"
            raise InputError(
                *(f"stage '{self.plan.name}'.{problem}" for problem in problems),
                f"stage '{self.plan.name}' was {begun} with other settings: give those back, use another "
                f"--dir, or delete {self.plan.dir} to run it anew",
            )

    def differences(self) -> list[str]:
        """`field: then X, now Y` for everything that differs and changes what the stage computes."""
        plan, then = self.plan, self.then
        if then["trainer"] != plan.trainer_name:
            return [f"trainer: then {then['trainer']}, now {plan.trainer_name}"]
        problems = [] if then["seed"] == plan.seed else [f"seed: then {then['seed']}, now {plan.seed}"]
        before, now = _flat(then["config"]), _flat(plan.written.to_dict())
        inputs = {*then["inputs"], *plan.inputs}
        for key in sorted({*before, *now}):
            compared = key.split(".")[0].split("[")[0] not in UNCOMPARED and key != "seed"
            if compared and key not in inputs and before.get(key) != now.get(key):
                problems.append(f"{key}: then {_shown(before.get(key))}, now {_shown(now.get(key))}")
        for key in sorted(inputs):
            was, found = then["inputs"].get(key), plan.inputs.get(key)
            if was is None or found is None:
                problems.append(f"{key}: then {_shown(before.get(key))}, now {_shown(now.get(key))}")
            elif found.path.exists() and identify(found.path) != was["identity"]:
                told, before_it = found.reference or str(found.path), was["reference"] or was["path"]
                problems.append(
                    f"{key}: the contents of {told} have changed since"
                    if told == before_it
                    else f"{key}: then {before_it}, now {told}, and their contents differ"
                )
        return problems

    def changed_versions(self) -> list[str]:
        """`rlhf-grpo 0.1.0, now 0.1.1` for each that differs: no reason to refuse, but to say.

        One that has come since is none: the stage has run without it.
        """
        before, now = self.then["versions"], artifacts.versions()
        return [
            f"{name} {version}, now {now.get(name, 'absent')}"
            for name, version in sorted(before.items())
            if now.get(name) != version
        ]

    def write_running(self) -> None:
        """Before the trainer runs; the inputs are there now, and what they hold is part of the record."""
        plan = self.plan
        inputs = {
            key: {"path": str(each.path), "reference": each.reference, "identity": identify(each.path)}
            for key, each in plan.inputs.items()
        }
        record = running(plan.name, plan.trainer_name, plan.seed, plan.written.to_dict(), inputs)
        self._write({**record, "started": self.then.get("started", record["started"])})

    def forget(self) -> None:
        """For a stage that failed before it saved anything: what was wrong with its input may now be mended."""
        self.path.unlink(missing_ok=True)
        self.then = {}

    def write_done(self) -> None:
        self._write(done(self.then))

    def _write(self, record: dict[str, Any]) -> None:
        write(self.plan.dir, record)
        self.then = record


def running(
    name: str, trainer: str, seed: int, config: Mapping[str, Any], inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """The record of a stage that begins now."""
    return {
        "format": FORMAT,
        "name": name,
        "trainer": trainer,
        "state": "running",
        "seed": seed,
        "config": config,
        "inputs": inputs,
        "versions": artifacts.versions(),
        "started": _now(),
    }


def done(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a stage that has ended well, now."""
    return {**record, "state": "done", "finished": _now()}


def write(directory: Path, record: Mapping[str, Any]) -> None:
    """Put a stage's record into its directory."""
    artifacts.write_atomic(directory / FILE, json.dumps(record, indent=2) + "\n")


def identify(path: Path) -> str:
    """A hash that changes with what is at `path`.

    An artifact: see `artifacts.identity`. A file: its bytes. Another directory: names, sizes and the first MiB of
    every file in it, since the weights of a large model take minutes to read.
    """
    if path.is_file():
        return artifacts.hash_file(path)
    if (path / artifacts.MANIFEST).is_file():
        return artifacts.identity(path)
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(path).as_posix()}\0{file.stat().st_size}\0".encode())
            with open(file, "rb") as stream:
                digest.update(stream.read(SAMPLED_BYTES))
    return digest.hexdigest()


def inputs_missing(inputs: Mapping[str, Input]) -> list[str]:
    """`field: path` of the inputs that are not on disk."""
    return [f"{key}: {each.path}" for key, each in inputs.items() if not each.path.exists()]


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """{dotted path: leaf}; an empty table or list is a leaf."""
    if isinstance(value, Mapping) and value:
        items = [(f"{key}.{k}" if key else str(k), v) for k, v in value.items()]
    elif isinstance(value, list | tuple) and value:
        items = [(f"{key}[{i}]", v) for i, v in enumerate(value)]
    else:
        return {key: None if value in ([], {}, ()) else value}
    return {k: v for name, item in items for k, v in _flat(item, name).items()}


def _shown(value: Any) -> str:
    return "not given" if value is None else json.dumps(value)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
