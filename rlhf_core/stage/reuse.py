"""Take over finished stages of another run directory that match, so that only the other stages train."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core import artifacts
from rlhf_core.errors import InputError
from rlhf_core.runtime.files import attempt, make_directory, replace_directory
from rlhf_core.stage import record
from rlhf_core.stage.decide import decide
from rlhf_core.stage.record import StageRecord

if TYPE_CHECKING:
    from rlhf_core.stage.spec import StageSpec

LINKED = ("artifacts", "checkpoints", "journal")
"""Folders whose files are never written to again, so that two runs can share them; all others are copied."""


class Reused(NamedTuple):
    """A finished stage of another run. then: its record. spec: what is asked for, with the hash of every input."""

    spec: StageSpec
    source: Path
    then: Mapping[str, Any]

    def take_over(self) -> None:
        """Copy the stage into this run, with hard links to its large files where the disk allows them."""
        final = self.spec.dir
        temporary = final.with_name(f".{final.name}.tmp")
        attempt(lambda: make_directory(final.parent), f"stage '{self.spec.name}'", final.parent)
        shutil.rmtree(temporary, ignore_errors=True)
        attempt(lambda: self._copy(temporary, final), f"stage '{self.spec.name}'", final, leftover=temporary)

    def _copy(self, temporary: Path, final: Path) -> None:
        shutil.copytree(self.source, temporary, copy_function=self._link_or_copy)
        # The old paths of inputs and the settings that do not count are replaced by those of this run.
        now = {key: self.spec.record[key] for key in ("config", "inputs")}
        reused = {"run": str(self.source.parent), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        record.write(temporary, {**self.then, **now, "reused": reused})
        replace_directory(temporary, final)

    def _link_or_copy(self, source: str, target: str) -> None:
        if Path(source).relative_to(self.source).parts[0] in LINKED:
            with suppress(OSError):  # another disk, or one without links
                os.link(source, target)
                return
        shutil.copy2(source, target)


def find_reusable(run: str | Path, stages: Sequence[StageSpec]) -> tuple[dict[str, Reused], list[str]]:
    """Find the stages that are new here and finished in another run with the same settings and inputs.

    Returns {stage: what to take over}, and why each other stage that is new here is not. Raises InputError if `run` is
    no run directory, or this one.
    """
    run = Path(run).expanduser().absolute()
    records = {each.name: StageRecord(each.dir, each.name) for each in stages}
    if not any(run.glob(f"*/{record.FILE}")):
        raise InputError(f"--reuse {run}: not a run directory: there is no STAGE/{record.FILE} in it")
    if any(stage.dir.parent.resolve() == run.resolve() for stage in stages):
        raise InputError(f"--reuse {run}: this is the run's own directory; give the run a new one with --dir")
    found: dict[str, Reused] = {}
    reasons: list[str] = []
    for stage in stages:
        here = records[stage.name]
        if here.then or here.has_checkpoints or here.has_artifacts:
            continue
        there = StageRecord(run / stage.name, stage.name)
        inputs = _with_identities(stage.record["inputs"], found)
        spec = replace(stage, record={**stage.record, "inputs": inputs})
        finished = {*found, *(name for name, each in records.items() if each.done)}
        why = _why_not(spec, there, finished)
        if why:
            reasons += [f"not reused from {run}: {line}" for line in why]
        else:
            found[stage.name] = Reused(spec, run / stage.name, there.then)
    return found, reasons


def _why_not(spec: StageSpec, there: StageRecord, finished: Collection[str]) -> list[str]:
    """Say why a stage of another run cannot be taken over. finished: stages that do not train here."""
    name = f"stage '{spec.name}'"
    why = [] if there.done else [f"{name} is not finished there"]
    why += [
        f"{name} reads '{each}', which trains here" for each in sorted(spec.reads) if each not in finished
    ]
    if why:
        return why
    decision = decide(there.begun, spec)
    if decision.action == "extend":
        return [f"{name} is longer here"]
    return list(decision.reasons[:-1]) or _damage(there)


def _damage(there: StageRecord) -> list[str]:
    """List what is missing from the artifacts of a finished stage, or was changed since it wrote them."""
    names = there.then.get("results", {}).get("artifacts", {})
    try:
        outputs = {name: artifacts.open_artifact(there.dir / "artifacts" / name) for name in names}
        there.require_outputs(outputs)
    except InputError as error:
        about = f"stage '{there.name}': "
        return [about + problem.removeprefix(about).partition(";")[0] for problem in error.problems]
    return []


def _with_identities(inputs: Mapping[str, Any], found: Mapping[str, Reused]) -> dict[str, Any]:
    """Fill in the hashes of artifacts that are taken over, which are not in this run yet."""

    def identity(given: Mapping[str, Any]) -> Any:
        stage, _, output = (given["reference"] or "").partition(".")
        if stage not in found:
            return given["identity"]
        return found[stage].then.get("results", {}).get("artifacts", {}).get(output)

    return {field: {**given, "identity": identity(given)} for field, given in inputs.items()}
