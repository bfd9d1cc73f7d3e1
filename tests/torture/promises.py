"""What a run promises while it runs, and whether the suite's readers find it in what a crash left."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tests.torture import file_calls, runs
from tests.torture.disk import ROOT, Digests, Disk, Image, Operation, Tree

APPENDED = ("metrics.jsonl", "metrics.sha256", "events.jsonl")


def run_marked() -> None:
    """Run p.toml and put into the trace what the run promises, at the moment at which it relies on it."""
    from rlhf_core import checkpoint, cli
    from rlhf_core.runtime import files
    from rlhf_core.stage import events

    def after(function: Callable[..., Any], text: str, place: int) -> Callable[..., Any]:
        def marked(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            file_calls.mark(f"{text} {os.path.relpath(arguments[place])}")
            return result

        return marked

    retire = checkpoint.Checkpoints._retire

    def marked_retire(self: checkpoint.Checkpoints, newest: int, protect: int | None) -> list[str]:
        file_calls.mark(f"checkpoint {os.path.relpath(self.directory / str(newest))}")
        return retire(self, newest, protect)

    attempt = files.attempt

    def marked_attempt(act: Callable[[], Any], *arguments: Any, **named: Any) -> Any:
        result = attempt(act, *arguments, **named)
        if "leftover" in named and os.path.isfile(arguments[1]):  # `write_atomic`
            file_calls.mark(f"file {os.path.relpath(os.path.realpath(arguments[1]))}")
        return result

    files.attempt = marked_attempt
    events.append_line = after(files.append_line, "lines", 0)  # type: ignore[attr-defined]
    checkpoint.Checkpoints._retire = marked_retire  # type: ignore[method-assign]
    sys.argv = ["rlhf", "run", "p.toml"]
    cli.main()


class Promises:
    """What a run has promised so far, and what may be found in its place.

    files: {path: hashes of its contents since the last promise}, of which the newest may be lost. whole: hashes of all
    contents that were renamed into place. lines: {path: content that must be the beginning of a file that grows}.
    checkpoints: {stage: the newest step saved}. version: how often something of a stage has changed.
    """

    def __init__(self, digests: Digests) -> None:
        self.digests = digests
        self.files: dict[str, list[bytes | None]] = {}
        self.whole: set[bytes] = set()
        self.lines: dict[str, bytes] = {}
        self.checkpoints: dict[str, int] = {}
        self.version: Counter[str] = Counter()

    def add(self, operation: Operation, disk: Disk) -> None:
        if operation.call.startswith("rename"):
            file = operation.entries[1][2]
            if file is not None and file not in disk.live.directories:
                self.whole.add(self.digests.of(disk.live.contents.get(file, b"")))
            self.lines.pop(operation.call.split(" ", 2)[2], None)  # replaced by fewer lines
        for path, values in self.files.items() if operation.entries else ():
            if (value := self._value(path, disk.live)) != values[-1]:
                values.append(value)
        kind, _, path = operation.mark.partition(" ")
        if kind in ("file", "lines") and PurePosixPath(path).name in APPENDED:
            self.lines[path] = disk.live.contents.get(disk.live.find(path) or ROOT, b"")
        elif kind == "file" and not any(part.startswith(".") for part in PurePosixPath(path).parts):
            self.files[path] = [self._value(path, disk.live)]
        elif kind == "checkpoint":
            directory = PurePosixPath(path)
            self.checkpoints[directory.parts[1]] = int(directory.name)
            self.version[directory.parts[1]] += 1

    def _value(self, path: str, image: Image) -> bytes | None:
        file = image.find(path)
        return None if file is None else self.digests.of(image.contents.get(file, b""))


@dataclass
class Expected:
    """What an undisturbed run left, and every checkpoint that a recorded run saved: {(stage, step): hashes}."""

    contents: dict[str, Any]
    saved: dict[tuple[str, int], set[bytes]] = field(default_factory=dict)

    def add_checkpoints(self, history: Iterable[tuple[int, Operation, Disk]]) -> None:
        """Add the checkpoints that a recorded run saved."""
        digests = Digests()
        for _, operation, disk in history:
            kind, _, name = operation.mark.partition(" ")
            if kind == "checkpoint":
                path = PurePosixPath(name)
                content = disk.live.tree(disk.live.find(name) or ROOT)
                self.saved.setdefault((path.parts[1], int(path.name)), set()).add(digests.of(content))

    def until(self, stage: str, step: int) -> dict[str, Any]:
        """Return a stage's rows and files of the updates up to `step`, as a run has them that resumes there."""
        result: dict[str, Any] = {}
        for name, content in self.contents.items():
            path = PurePosixPath(name)
            if path.parts[0] != stage:
                continue
            if path.name == "metrics.jsonl":
                result[name] = [row for row in content if row["step"] <= step]
            elif path.parts[1] in ("samples", "evaluations") and _step(path) <= step:
                result[name] = content
        return result


def _step(path: PurePosixPath) -> int:
    return int(path.stem.rpartition("-")[2])


def contents(run: Path) -> dict[str, Any]:
    """Read what is compared of stages: `runs.contents`, and evaluations."""
    evaluations = {
        path.relative_to(run).as_posix(): json.loads(path.read_bytes())
        for path in run.glob("*/evaluations/[0-9]*.json")
    }
    return {**runs.contents(run), **evaluations}


class Judge:
    """Judge trees by the suite's readers.

    Stages that differ in their temporary files alone are judged once, with those of the first of them. Files are
    written once and linked: readers do not write to them.
    """

    def __init__(self, directory: Path, expected: Expected, digests: Digests) -> None:
        self.directory, self.expected, self.digests = directory, expected, digests
        self._verdicts: dict[tuple[object, ...], list[str]] = {}
        (directory / "blobs").mkdir()

    def problems(self, tree: Tree, promises: Promises) -> list[str]:
        problems = []
        for path, allowed in promises.files.items():
            thing = _at(tree, path)
            value = None if thing is None else self.digests.of(thing)
            if value not in allowed:
                problems.append(
                    f"{path} was written, and is {'gone' if value is None else 'not what was written'}"
                )
        for path, lines in promises.lines.items():
            content = _at(tree, path)
            if not isinstance(content, bytes) or not content.startswith(lines):
                problems.append(f"{path} has lost lines that were on the disk")
        run = tree.get("run")
        for name, thing in run.items() if isinstance(run, dict) else ():
            if isinstance(thing, dict):
                key = (name, self.digests.of(_without_temporary(thing)), promises.version[name])
                if key not in self._verdicts:
                    self._verdicts[key] = self._judge(name, thing, promises)
                problems += self._verdicts[key]
            elif not _is_whole(name, thing, promises):
                problems.append(f"run/{name} is torn")
        return problems + [
            f"stage '{stage}' has lost its checkpoint at update {step}"
            for stage, step in promises.checkpoints.items()
            if not isinstance(run, dict) or stage not in run
        ]

    def _judge(self, stage: str, tree: Tree, promises: Promises) -> list[str]:
        place = Path(tempfile.mkdtemp(dir=self.directory))
        try:
            self.place({stage: tree}, place)
            torn = [
                f"{stage}/{name} is torn"
                for name, content in _files(tree)
                if not name.startswith(("checkpoints/", "artifacts/"))
                and not _is_whole(name, content, promises)
            ]
            return torn or self._read(place / stage, tree, promises.checkpoints.get(stage))
        finally:
            shutil.rmtree(place)

    def place(self, tree: Tree, directory: Path) -> None:
        """Write a tree below an existing directory, as links to files that are written once."""
        for name, thing in tree.items():
            if isinstance(thing, dict):
                (directory / name).mkdir()
                self.place(thing, directory / name)
            else:
                blob = self.directory / "blobs" / self.digests.of(thing).hex()
                if not blob.exists():
                    blob.write_bytes(thing)
                os.link(blob, directory / name)

    def changed_blobs(self) -> list[str]:
        """List the files that a reader has written to."""
        blobs = (self.directory / "blobs").iterdir()
        return [path.name for path in blobs if Digests().of(path.read_bytes()).hex() != path.name]

    def _read(self, directory: Path, tree: Tree, promised: int | None) -> list[str]:
        from rlhf_core import artifacts, checkpoint
        from rlhf_core.errors import InputError, RunError
        from rlhf_core.fit.progress import cut_files
        from rlhf_core.stage.record import StageRecord

        stage, step, problems = directory.name, -1, []
        try:
            record = StageRecord(directory, stage)
            newest = checkpoint.Checkpoints(directory / "checkpoints", keep=None)._choose(None)
            if promised is not None and (newest is None or newest < promised):
                problems.append(
                    f"stage '{stage}' has lost its checkpoint at update {promised}; it finds {newest}"
                )
            if newest is not None:
                checkpoints = tree["checkpoints"]
                assert isinstance(checkpoints, dict)
                content = checkpoints.get(str(newest)) or checkpoints[f".{newest}.replaced"]
                if self.digests.of(content) not in self.expected.saved.get((stage, newest), ()):
                    problems.append(
                        f"stage '{stage}': the checkpoint at update {newest} is not what was saved"
                    )
                saved = directory / "checkpoints" / str(newest)
                host = json.loads((saved / "host.json").read_bytes())["host"]
                best = host["best"]["step"]
                if best is not None and checkpoint._problem(saved.with_name(str(best))):
                    problems.append(f"stage '{stage}' has lost its best checkpoint, that at update {best}")
                step = newest if host["reported"] else newest - 1
            if record.done:
                artifact = artifacts.open_artifact(directory / "artifacts" / "model")
                record.require_outputs({"model": artifact})
                wanted = {
                    name: content
                    for name, content in self.expected.contents.items()
                    if name.startswith(f"{stage}/")
                }
            else:
                cut_files(directory, step)
                wanted = self.expected.until(stage, step)
            found = contents(directory.parent)
        except Exception as error:
            kind = "" if isinstance(error, InputError | RunError) else f"{type(error).__name__}: "
            text = str(error).replace(f"{directory.parent}/", "")
            return [*problems, f"stage '{stage}' cannot go on: {kind}{text}"]
        problems += [
            f"{name} is {'not what it was' if name in found else 'gone'}, with the checkpoint at update {step}"
            for name, content in wanted.items()
            if found.get(name) != content and (content or name in found)
        ]
        return problems


def _at(tree: Tree, path: str) -> Tree | bytes | None:
    thing: Tree | bytes | None = tree
    for name in PurePosixPath(path).parts:
        thing = thing.get(name) if isinstance(thing, dict) else None
    return thing


def _without_temporary(tree: Tree) -> Tree:
    return {
        name: thing if isinstance(thing, bytes) else _without_temporary(thing)
        for name, thing in tree.items()
        if not (name.startswith(".") and name.endswith(".tmp"))
    }


def _files(tree: Tree, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    for name, thing in tree.items():
        if isinstance(thing, dict):
            yield from _files(thing, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", thing


def _is_whole(path: str, content: bytes, promises: Promises) -> bool:
    """Return whether a file that is always replaced as a whole is whole."""
    name = PurePosixPath(path).name
    return name.startswith(".") or name in APPENDED or promises.digests.of(content) in promises.whole
