"""Judge, and continue from, what a power cut or a kill may leave after each call of a recorded run.

A pipeline of three stages is recorded with every byte it writes, and again as it goes on after kills and power cuts.
While it runs it marks what it promises: a checkpoint that is saved, a file that is written, a line that is on the disk.
After each call a simulated disk gives what a crash may leave there, and the suite's own readers must find in it
whatever was promised before.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.torture import children, file_calls, runs
from tests.torture.disk import Crash, Digests, Disk, Image, Operation, Tree
from tests.torture.experiment import CORES, Case, Failed, Failure, Trial
from tests.torture.promises import Expected, Judge, Promises, contents
from tests.torture.translator import Translator

SHARE = 2.0
PIPELINE = (
    runs.SFT,
    runs.REWARD + "save_total_limit = 1\nload_best_model_at_end = true\n",
    runs.GRPO + "save_total_limit = 2\n",
)
UNDISTURBED = "undisturbed"
RESUMED = ("killed-0", "cut-0", "killed-1", "killed-2", "cut-1", "killed-3")
"""Recordings that go on: after a kill at the first directory made, at another one, or anywhere; after a power cut."""
MODELS = ("killed", "ordered", "strict")
CHUNK = 32
"""Calls whose states one case judges."""
DRAWS = 60
"""States drawn after a call, for each of the two kinds of power cut."""
ROUNDS = 2
WHOLE = 200
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


def write_pipeline(place: Path, directory: Path) -> None:
    """Write p.toml with the data of `directory`, as the names of its files are in some of what a run writes."""
    text = 'dir = "run"\n' + "".join(PIPELINE)
    (place / "p.toml").write_text(text.replace('"data/', f'"{directory}/data/'))


def _write_data(directory: Path) -> None:
    runs.write_data(directory / "data")


def start(place: Path, image: Image) -> subprocess.Popen[bytes]:
    """Start the pipeline in a directory, with its calls recorded, where an image of it is there already."""
    place.mkdir()
    write_pipeline(place, place.parent)
    copy(image.tree(), place)
    command = [sys.executable, "-c", "from tests.torture.promises import run_marked; run_marked()"]
    return file_calls.record(command, place, _trace(place), place.with_suffix(".log"))


def finish(
    process: subprocess.Popen[bytes],
    place: Path,
    before: Sequence[Operation] = (),
    crash: Image | None = None,
) -> Recording:
    """Wait for a pipeline; before, crash: the operations that led to what was there, and a power cut after them."""
    try:
        process.wait(600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    if process.wait():
        output = place.with_suffix(".log").read_text(errors="replace")[-4000:]
        raise Failed(f"the recorded run ended with {process.returncode}:\n{output}")
    disk = Disk()
    for operation in before:
        disk.apply(operation)
    first = max((file or 0 for operation in before for _, _, file in operation.entries), default=0)
    translator = Translator(str(place), crash or disk.live, first)
    operations = [*before, *translator.translate(file_calls.read(_trace(place)))]
    _trace(place).unlink()
    if translator.live.tree()["run"] != read_tree(place / "run"):
        raise Failed("the recorded calls do not give what is there in the end")
    return Recording(place.name, operations, len(before), crash)


def _trace(place: Path) -> Path:
    return place.with_suffix(".trace")


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


def prepare(trial: Trial, directory: Path) -> tuple[list[Recording], Expected]:
    """Record an undisturbed run, and where there is time some that go on after a crash of it."""
    ended = children.Child(_write_data, directory).wait()
    if ended.code:
        raise Failed(f"the pipeline could not be written: {ended}")
    began = time.monotonic()
    place = directory / UNDISTURBED
    recordings = [finish(start(place, Image()), place)]
    runs_left = trial.seconds_left / (time.monotonic() - began)
    resumed = RESUMED[: int(max(0.0, runs_left / 3))]
    if trial.only is not None:
        resumed = tuple(name for name in RESUMED if f" {name} " in trial.only)
    for group in (resumed[i : i + CORES] for i in range(0, len(resumed), CORES)):
        begun = []
        for name in group:
            last, disk = _crash_point(trial, name, recordings[0])
            stream = trial.random(name)
            crash = stream.choice(list(disk.strict(stream, DRAWS))).image if name.startswith("cut") else None
            before = recordings[0].operations[: last + 1]
            process = start(directory / name, crash or disk.live)
            begun.append((process, directory / name, before, crash))
        recordings += [finish(*each) for each in begun]
    expected = Expected(contents(place / "run"))
    for recording in recordings:
        expected.add_checkpoints(recording.disk())
    return recordings, expected


def _crash_point(trial: Trial, name: str, recording: Recording) -> tuple[int, Disk]:
    """Choose where a recorded run is crashed by the names of calls, which repeat themselves better than their order."""
    calls = {operation.call: i for i, operation in enumerate(recording.operations)}
    if name in ("killed-0", "killed-1"):
        visible = [call for call in calls if call.startswith("mkdir") and "/." not in call]
        call = visible[0] if name == "killed-0" else trial.random("crash", name).choice(sorted(visible[1:]))
    else:
        call = trial.random("crash", name).choice(sorted(calls))
    return calls[call], next(disk for i, _, disk in recording.disk() if i == calls[call])


def run(trial: Trial) -> None:
    """Judge at least 100,000 states, and continue from 200."""
    file_calls.require()
    directory = Path(tempfile.mkdtemp(prefix="torture-", dir=MEMORY))
    try:
        recordings, expected = prepare(trial, directory)
        (directory / "seen").mkdir()
        by_name = {recording.name: recording for recording in recordings}

        def judge(case: Case) -> None:
            kind, name, how, call = case.name.split(" ", 3)
            recording = by_name[name]
            calls = [operation.call for operation in recording.operations[recording.begins :]]
            case.require(call in calls, "the run that was recorded now made no such call")
            at = recording.begins + calls.index(call)
            if kind == "states":
                _judge_states(case, trial, recording, at, how, expected, directory)
            else:
                _continue(case, trial, recording, at, how, directory)

        trial.each(_cases(trial, recordings), judge, seconds=300.0)
        hashes = b"".join(path.read_bytes() for path in (directory / "seen").iterdir())
        trial.counts["distinct states"] = len({hashes[i : i + 16] for i in range(0, len(hashes), 16)})
    except Failed as failed:
        trial.cases += 1
        trial.failures.append(Failure("recording", str(failed)))
    finally:
        shutil.rmtree(directory)


def _cases(trial: Trial, recordings: Sequence[Recording]) -> list[str]:
    """Name the cases by calls, as these have other numbers when a run is recorded again."""
    if trial.only is not None:
        return [trial.only]
    stream = trial.random("order")
    names: list[str] = []
    for draws in range(ROUNDS):
        chunks = [
            f"states {recording.name} {draws} {recording.operations[first].call}"
            for recording in recordings
            for first in range(recording.begins, len(recording.operations), CHUNK)
        ]
        names += stream.sample(chunks, len(chunks))
    places = [
        (recording, operation)
        for recording in recordings
        for operation in recording.operations[recording.begins :]
    ]
    chosen: dict[str, None] = {}
    while len(chosen) < WHOLE:
        recording, operation = stream.choice(places)
        chosen[f"whole {recording.name} {stream.choice(MODELS)} {operation.call}"] = None
    every = max(1, len(names) // WHOLE)
    for i, name in enumerate(chosen):
        names.insert((i + 1) * (every + 1) - 1, name)
    return names


def _judge_states(
    case: Case,
    trial: Trial,
    recording: Recording,
    first: int,
    draws: str,
    expected: Expected,
    directory: Path,
) -> None:
    """Judge the states after each of `CHUNK` calls."""
    import jax

    # The readers ask for these, for which jax would start its backend.
    jax.process_count = lambda backend=None: 1
    jax.process_index = lambda backend=None: 0
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
            about = (recording.name, operation.call, draws)
            for number, crash in enumerate(crashes(model, disk, trial, *about)):
                tree = crash.image.tree()
                digest = digests.of(tree)
                seen.add(digest)
                if digest in judged:
                    continue
                judged.add(digest)
                problems = judge.problems(tree, promises)
                if problems and problems[0] not in shown:
                    shown.add(problems[0])
                    case.fail(_describe(problems, model, operation.call, number, crash))
        if i == first + CHUNK:
            break
    case.count("states judged", len(seen))
    for blob in judge.changed_blobs():
        case.fail(f"a reader wrote to {blob}")
    (directory / "seen" / f"{os.getpid()}").write_bytes(b"".join(seen))
    shutil.rmtree(judge.directory)


def _describe(problems: Sequence[str], model: str, call: str, number: int, crash: Crash) -> str:
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"{problems[0]}{more}\n({model}, draw {number}, after {call}{_lost(crash)})"


def _lost(crash: Crash) -> str:
    more = f"; and {len(crash.lost) - 8} more" if len(crash.lost) > 8 else ""
    return f"; lost: {'; '.join(crash.lost[:8])}{more}" if crash.lost else ""


def _continue(case: Case, trial: Trial, recording: Recording, at: int, model: str, directory: Path) -> None:
    """Go on from a state to the end, which must be that of the undisturbed run, and readable for a report."""
    from rlhf_report.watch.run_view import read_run

    disk = next(disk for i, _, disk in recording.disk() if i == at)
    crash = case.random.choice(list(crashes(model, disk, trial, case.name)))
    write_pipeline(case.directory, directory)
    copy(crash.image.tree(), case.directory)
    ended = children.rlhf("run", "p.toml", cwd=case.directory).wait(200)
    case.count("states continued from")
    case.require(ended.code == 0 and not ended.traceback, f"the run that goes on {ended}{_lost(crash)}")
    for line in runs.differences(directory / UNDISTURBED / "run", case.directory / "run"):
        if not line.startswith("events.jsonl"):
            case.fail(f"{line}{_lost(crash)}")
    read_run(case.directory / "run")
