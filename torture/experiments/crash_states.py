"""Judge, and continue from, what a power cut or a kill may leave after each call of a recorded run.

A pipeline of three stages is recorded with every byte it writes, and twice more as it goes on after a kill and after a
power cut. While it runs it marks what it promises: a checkpoint that is saved, a file that is written, a line that is
on the disk. After each call a simulated disk gives what a crash may leave there, and the suite's own readers must find
in it whatever was promised before.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from torture import children, file_calls, runs
from torture.disk import ROOT, Crash, Digests, Disk, Image, Operation, Translator, Tree
from torture.experiment import Case, Failed, Trial

SHARE = 2.0
STAGES = ("base", "rm", "policy")
PIPELINE = (
    runs.SFT,
    runs.REWARD + "save_total_limit = 1\nload_best_model_at_end = true\n",
    runs.GRPO + "save_total_limit = 2\n",
)
MODELS = ("killed", "ordered", "strict")
CHUNK = 32
"""Calls whose states one case judges."""
DRAWS = 60
"""States drawn after a call, for each of the two kinds of power cut."""
ROUNDS = 3
WHOLE = 200
APPENDED = ("metrics.jsonl", "events.jsonl")
MEMORY = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None


@dataclass
class Recording:
    """The operations of a run, after those of an earlier run up to a crash.

    crash: what the run began with, a number of operations of the earlier run having been made; None if that run was
    killed, so that what was not durable is not durable yet.
    """

    name: str
    operations: list[Operation]
    begins: int = 0
    crash: Image | None = None

    def disk(self) -> Iterator[tuple[int, Operation, Disk]]:
        """Yield the disk after each operation."""
        disk = Disk()
        for i, operation in enumerate(self.operations):
            if i == self.begins and self.crash is not None:
                disk.crash(self.crash)
            disk.apply(operation)
            yield i, operation, disk


class Promises:
    """What a run has promised so far, and what may be found in its place.

    files: {path: hashes of its contents since the last promise}, of which the newest may be lost. whole: hashes of all
    contents that were renamed into place. lines: {path: content that must be the file's beginning}.
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
            if file in disk.live.contents:
                self.whole.add(self.digests.of(disk.live.contents[file]))
        for path, values in self.files.items() if operation.entries else ():
            if (value := self._value(path, disk.live)) != values[-1]:
                values.append(value)
        kind, _, path = operation.mark.partition(" ")
        if kind == "file" and not any(part.startswith(".") for part in PurePosixPath(path).parts):
            self.files[path] = [self._value(path, disk.live)]
        elif kind == "lines":
            self.lines[path] = disk.live.contents[disk.live.find(path) or ROOT]
        elif kind == "checkpoint":
            directory = PurePosixPath(path)
            self.checkpoints[directory.parts[1]] = int(directory.name)
            self.version[directory.parts[1]] += 1

    def _value(self, path: str, image: Image) -> bytes | None:
        file = image.find(path)
        return None if file is None else self.digests.of(image.contents[file])


@dataclass
class Expected:
    """What an undisturbed run left, and every checkpoint that a recorded run saved: {(stage, step): hashes}."""

    contents: dict[str, Any]
    saved: dict[tuple[str, int], set[bytes]] = field(default_factory=dict)

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
            if name in STAGES:
                key = (name, self.digests.of(_without_temporary(thing)), promises.version[name])
                if key not in self._verdicts:
                    self._verdicts[key] = self._judge(name, thing, promises)
                problems += self._verdicts[key]
            elif isinstance(thing, bytes) and not _is_whole(name, thing, promises):
                problems.append(f"run/{name} is torn")
        return problems + [
            f"stage '{stage}' has lost its checkpoint at update {step}"
            for stage, step in promises.checkpoints.items()
            if not isinstance(run, dict) or stage not in run
        ]

    def _judge(self, stage: str, tree: Tree | bytes, promises: Promises) -> list[str]:
        assert isinstance(tree, dict)
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
        from rlhf_core.stage import step_files
        from rlhf_core.stage.record import StageRecord

        stage, step, problems = directory.name, -1, []
        try:
            record = StageRecord(directory, stage, fix="")
            newest = checkpoint.Checkpoints(directory / "checkpoints", keep=None)._newest_whole()
            if promised is not None and (newest is None or newest < promised):
                problems.append(
                    f"stage '{stage}' has lost its checkpoint at update {promised}; it finds {newest}"
                )
            if newest is not None:
                checkpoints = tree["checkpoints"]
                assert isinstance(checkpoints, dict)
                found = checkpoints.get(str(newest)) or checkpoints[f".{newest}.replaced"]
                if self.digests.of(found) not in self.expected.saved.get((stage, newest), ()):
                    problems.append(
                        f"stage '{stage}': the checkpoint at update {newest} is not what was saved"
                    )
                host = json.loads((directory / "checkpoints" / str(newest) / "host.json").read_bytes())[
                    "host"
                ]
                best = host["best"]["step"]
                if best is not None and checkpoint._problem(directory / "checkpoints" / str(best)):
                    problems.append(f"stage '{stage}' has lost its best checkpoint, that at update {best}")
                step = newest if host["reported"] else newest - 1
            if record.state == "done":
                artifact = artifacts.open_artifact(directory / "artifacts" / "model")
                record.require_outputs({"model": artifact})
                wanted = {
                    name: content
                    for name, content in self.expected.contents.items()
                    if name.startswith(f"{stage}/")
                }
            else:
                step_files.cut(directory, step)
                wanted = self.expected.until(stage, step)
        except (InputError, RunError) as error:
            return [*problems, f"stage '{stage}' cannot go on: {error}"]
        found = contents(directory.parent)
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


def _without_temporary(thing: Tree | bytes) -> Tree | bytes:
    if isinstance(thing, bytes):
        return thing
    return {
        name: _without_temporary(each)
        for name, each in thing.items()
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

    files._replace = after(files._replace, "file", 1)
    events.append_line = after(events.append_line, "lines", 0)
    checkpoint.Checkpoints._retire = marked_retire  # type: ignore[method-assign]
    sys.argv = ["rlhf", "run", "p.toml"]
    cli.main()


def record(
    name: str, directory: Path, before: Sequence[Operation] = (), crash: Image | None = None
) -> Recording:
    """Run p.toml to its end; before, crash: the operations that led to what is there, and a power cut after them."""
    start = Disk()
    for operation in before:
        start.apply(operation)
    image = start.live if crash is None else crash
    copy(image.tree(), directory)
    trace = directory.with_suffix(".trace")
    command = [sys.executable, "-c", f"from {__name__} import run_marked; run_marked()"]
    process = file_calls.record(command, directory, trace)
    output, _ = process.communicate(timeout=600)
    if process.returncode:
        raise Failed(f"the recorded run ended with {process.returncode}:\n{output[-4000:]}")
    first = 1 + max((file or 0 for operation in before for _, _, file in operation.entries), default=0)
    translator = Translator(str(directory), image, first)
    operations = [*before, *translator.translate(file_calls.read(trace))]
    trace.unlink()
    if translator.live.tree()["run"] != read_tree(directory / "run"):
        raise Failed("the recorded calls do not give what is there in the end")
    return Recording(name, operations, len(before), crash)


def copy(tree: Tree, directory: Path) -> None:
    for name, thing in tree.items():
        if isinstance(thing, dict):
            (directory / name).mkdir()
            copy(thing, directory / name)
        else:
            (directory / name).write_bytes(thing)


def read_tree(directory: Path) -> Tree:
    return {
        path.name: read_tree(path) if path.is_dir() else path.read_bytes() for path in directory.iterdir()
    }


def crashes(model: str, disk: Disk, trial: Trial, *about: object, most: int = DRAWS) -> Iterator[Crash]:
    """Yield what may be left here, always the same for the same `about`."""
    stream = trial.random(model, *about)
    if model == "killed":
        yield disk.killed()
    elif model == "ordered":
        yield from disk.ordered(stream, most)
    else:
        yield from disk.strict(stream, most)


def _write_pipeline(directory: Path) -> None:
    directory.mkdir()
    runs.write(directory, *PIPELINE)


def prepare(trial: Trial, directory: Path) -> tuple[list[Recording], Expected]:
    """Record an undisturbed run, and where there is time two that go on after a crash of it."""
    places = [directory / "undisturbed", directory / "after_kill", directory / "after_cut"]
    for place in places:
        ended = children.Child(_write_pipeline, place).wait()
        if ended.code:
            raise Failed(f"the pipeline could not be written: {ended}")
    began = time.monotonic()
    recordings = [record("undisturbed", places[0])]
    seconds = time.monotonic() - began
    expected = Expected(contents(places[0] / "run"))
    wanted = "undisturbed" not in trial.only if trial.only else trial.seconds_left > 4 * seconds
    if wanted:
        stream = trial.random("recordings")
        calls = {operation.call: i for i, operation in enumerate(recordings[0].operations)}
        for place in places[1:]:
            last = calls[stream.choice(sorted(calls))]
            disk = next(disk for i, _, disk in recordings[0].disk() if i == last)
            crash = stream.choice(list(disk.strict(stream, DRAWS))).image if place is places[2] else None
            recordings.append(record(place.name, place, recordings[0].operations[: last + 1], crash))
    digests = Digests()
    for recording in recordings:
        for _, operation, disk in recording.disk():
            if operation.mark.startswith("checkpoint"):
                path = PurePosixPath(operation.mark.partition(" ")[2])
                saved = digests.of(disk.live.tree(disk.live.find(str(path)) or ROOT))
                expected.saved.setdefault((path.parts[1], int(path.name)), set()).add(saved)
    return recordings, expected


def run(trial: Trial) -> None:
    """Judge at least 100,000 states, and continue from 200."""
    file_calls.require()
    directory = Path(tempfile.mkdtemp(prefix="torture-", dir=MEMORY))
    try:
        recordings, expected = prepare(trial, directory)
        seen = directory / "seen"
        seen.mkdir()
        judges: dict[str, Callable[[Case], None]] = {}
        for recording in recordings:
            for first in range(recording.begins, len(recording.operations), CHUNK):
                for draws in range(ROUNDS):
                    name = f"states {recording.name} {draws} {recording.operations[first].call}"
                    judges[name] = _states(trial, recording, first, draws, expected, directory)
        names = list(judges)
        trial.random("order").shuffle(names)
        names.sort(key=lambda name: int(name.split()[2]))
        wholes = _wholes(trial, recordings, directory)
        judges |= wholes
        every = max(1, len(names) // len(wholes))
        for i, name in enumerate(wholes):
            names.insert((i + 1) * (every + 1) - 1, name)
        trial.each(names, lambda case: judges[case.name](case), seconds=300.0)
        hashes = b"".join(path.read_bytes() for path in seen.iterdir())
        trial.counts["distinct states"] = len({hashes[i : i + 16] for i in range(0, len(hashes), 16)})
    finally:
        shutil.rmtree(directory)


def _states(
    trial: Trial, recording: Recording, first: int, draws: int, expected: Expected, directory: Path
) -> Callable[[Case], None]:
    """Judge the states after each of `CHUNK` calls."""

    def judge(case: Case) -> None:
        import jax

        jax.process_count = lambda: 1  # asked by the readers; jax would start its backend
        jax.process_index = lambda: 0
        warnings.simplefilter("ignore")  # of damaged checkpoints that are not needed
        digests = Digests()
        promises = Promises(digests)
        judge = Judge(Path(tempfile.mkdtemp(dir=directory)), expected, digests)
        seen: set[bytes] = set()
        judged: set[bytes] = set()
        shown: set[str] = set()
        for i, operation, disk in recording.disk():
            promises.add(operation, disk)
            if operation.mark:
                judged = set()  # what could be lost before must not be lost now
            for model in MODELS if first <= i < first + CHUNK else ():
                for number, crash in enumerate(
                    crashes(model, disk, trial, recording.name, operation.call, draws)
                ):
                    tree = crash.image.tree()
                    digest = digests.of(tree)
                    seen.add(digest)
                    if digest in judged:
                        continue
                    judged.add(digest)
                    for problem in judge.problems(tree, promises):
                        if problem not in shown:
                            shown.add(problem)
                            case.fail(_describe(problem, model, operation.call, number, crash))
            if i == first + CHUNK:
                break
        case.count("states judged", len(seen))
        for blob in judge.changed_blobs():
            case.fail(f"a reader wrote to {blob}")
        (directory / "seen" / f"{os.getpid()}").write_bytes(b"".join(seen))
        shutil.rmtree(judge.directory)

    return judge


def _describe(problem: str, model: str, call: str, number: int, crash: Crash) -> str:
    more = f", and {len(crash.lost) - 8} more" if len(crash.lost) > 8 else ""
    lost = f"; lost: {'; '.join(crash.lost[:8])}{more}" if crash.lost else ""
    return f"{problem}\n({model}, draw {number}, after {call}{lost})"


def _wholes(
    trial: Trial, recordings: Sequence[Recording], directory: Path
) -> dict[str, Callable[[Case], None]]:
    """Name the states from which a run goes on to its end."""
    stream = trial.random("whole")
    places = [
        (recording, i) for recording in recordings for i in range(recording.begins, len(recording.operations))
    ]
    judges: dict[str, Callable[[Case], None]] = {}
    while len(judges) < WHOLE:
        recording, at = stream.choice(places)
        model = stream.choice(MODELS)
        name = f"whole {recording.name} {model} {recording.operations[at].call}"
        judges[name] = _whole(trial, recording, at, model, directory)
    return judges


def _whole(
    trial: Trial, recording: Recording, at: int, model: str, directory: Path
) -> Callable[[Case], None]:
    """Go on from a state to the end, which must be that of the undisturbed run."""

    def judge(case: Case) -> None:
        disk = next(disk for i, _, disk in recording.disk() if i == at)
        crash = case.random.choice(list(crashes(model, disk, trial, "whole", case.name)))
        undisturbed = directory / "undisturbed"
        place = case.directory
        shutil.copytree(undisturbed / "data", place / "data")
        shutil.copy(undisturbed / "p.toml", place)
        copy(crash.image.tree(), place)
        ended = children.rlhf("run", "p.toml", cwd=place).wait(200)
        case.count("states continued from")
        lost = f"lost: {'; '.join(crash.lost[:8])}"
        case.require(ended.code == 0 and not ended.traceback, f"the run that goes on {ended}\n{lost}")
        for line in runs.differences(undisturbed / "run", place / "run"):
            if not line.startswith("events.jsonl"):
                case.fail(f"{line}\n{lost}")

    return judge
