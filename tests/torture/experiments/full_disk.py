"""Fill a disk at each size that a run passes through, then enlarge it: nothing is lost, and nothing computed again."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.torture import runs, shim
from tests.torture.children import Child, Ended, rlhf
from tests.torture.experiment import Case, Skipped, Trial
from tests.torture.experiments.disk_errors import saved_checkpoints

SHARE = 1.0
SECONDS = 90.0
PREPARING = 0.4
"""The part of the time after which no further pipeline is prepared."""
ENOUGH = {"pages": 1 << 14, "files": 1 << 14}
"""What no run fills."""


@dataclass(frozen=True)
class Pipeline:
    """The stages of a pipeline. after: the one whose stages are on the disk before."""

    stages: Sequence[str]
    after: str | None = None


PIPELINES = {
    "sft": Pipeline([runs.SFT]),
    "reward": Pipeline([runs.SFT, runs.REWARD], after="sft"),
    "grpo": Pipeline([runs.SFT, runs.REWARD, runs.GRPO], after="reward"),
}


def run(trial: Trial) -> None:
    shim.require()
    # Not a TemporaryDirectory, which forked processes would delete when they end.
    place = Path(tempfile.mkdtemp(prefix="torture-full-disk-"))
    prepared_by = time.monotonic() + PREPARING * trial.seconds_left
    names = []
    try:
        for kind in PIPELINES:
            if names and trial.only is None and time.monotonic() > prepared_by:
                break
            for unit, (first, most) in _prepare(kind, place).items():
                names += [f"{kind} {size} {unit}" for size in range(first, most + 1)]
            if trial.only is not None and trial.only.startswith(f"{kind} "):
                names = [trial.only]
                break
        trial.random("order").shuffle(names)
        trial.each(names, lambda case: judge(case, place), seconds=4 * SECONDS)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _prepare(kind: str, place: Path) -> dict[str, tuple[int, int]]:
    """Write the pipeline, and make PLACE/KIND.expected by an undisturbed run; return what of a disk it takes, by unit.

    Raises Skipped where no disk can be mounted.
    """
    pipeline, figures = _pipeline(kind, place), place / f"{kind}.json"
    runs.write(pipeline.parent, *PIPELINES[kind].stages)
    ended = Child(_measure, pipeline, _before(kind, place), place / f"{kind}.expected", figures).wait(300)
    if ended.code:
        raise RuntimeError(f"an undisturbed run failed: {ended}")
    if not figures.exists():
        raise Skipped(
            f"no disk can be mounted here, which needs root or user namespaces: {ended.out.strip()}"
        )
    return json.loads(figures.read_text())


def _pipeline(kind: str, place: Path) -> Path:
    return place / kind / "p.toml"


def _before(kind: str, place: Path) -> Path | None:
    """Return the directory of what is on the disk before, if anything is."""
    after = PIPELINES[kind].after
    return None if after is None else place / f"{after}.expected"


def _run(pipeline: Path, disk: Path, env: Mapping[str, str | None] | None = None) -> Child:
    return rlhf("run", str(pipeline), "--dir", "run", cwd=disk, env=env)


def _measure(pipeline: Path, before: Path | None, after: Path, figures: Path) -> int:
    """Run on a large disk; write down what it held at first and at most, and copy what it holds in the end."""
    disk = after.with_suffix(".disk")
    try:
        mount(disk, **ENOUGH)
    except OSError as error:
        print(error)
        return 0
    if before is not None:
        shutil.copytree(before, disk, dirs_exist_ok=True)
    first = most = _used(disk)
    child = _run(pipeline, disk)
    while child.running():
        most = {unit: max(most[unit], number) for unit, number in _used(disk).items()}
        time.sleep(0.0005)
    ended = child.wait()
    print(ended)
    shutil.copytree(disk, after)
    figures.write_text(json.dumps({unit: (first[unit], most[unit]) for unit in first}))
    return ended.code


def judge(case: Case, place: Path) -> None:
    kind, size, unit = case.name.split()
    pipeline, before, disk = _pipeline(kind, place), _before(kind, place), case.directory / "disk"
    mount(disk, **ENOUGH)
    if before is not None:
        shutil.copytree(before, disk, dirs_exist_ok=True)
    mount(disk, **{**ENOUGH, unit: int(size)}, again=True)
    log = case.directory / "log"
    ended = _run(pipeline, disk, shim.environment(disk, log=log)).wait(SECONDS)
    for line in _wrong_end(ended):
        case.fail(f"{line}: {ended}")
    case.count("disks filled", int(ended.code != 0))
    kept = _Kept.of(disk / "run")
    for path, step in saved_checkpoints(disk, list(shim.calls(log)) if log.exists() else []).items():
        if kept.steps.get(path.name, -1) < step:
            case.fail(f"the checkpoint of update {step} of {path.name} is lost\nafter it {ended}")
    if case.random.random() < 0.3:
        for line in _wrong_end(still := _run(pipeline, disk).wait(SECONDS)):
            case.fail(f"on the disk that is still full, {line}: {still}")
        for line in kept.lost(_Kept.of(disk / "run")):
            case.fail(f"on the disk that is still full, {line}: {still}")
    kept = _Kept.of(disk / "run")
    mount(disk, **ENOUGH, again=True)
    more = _run(pipeline, disk).wait(SECONDS)
    case.require(more.code == 0, f"the same command on the larger disk {more}\nafter it {ended}")
    for line in kept.lost(_Kept.of(disk / "run")):
        case.fail(f"{line}\nafter it {ended}\n{more}")
    for stage, step in kept.steps.items():
        start = json.loads((disk / "run" / stage / "plan.json").read_text())["start"]
        if stage not in kept.finished and start < step:
            case.fail(f"{stage} began again at update {start}; there was a checkpoint of update {step}")
    for line in runs.differences(place / f"{kind}.expected" / "run", disk / "run"):
        if not line.startswith("events.jsonl"):
            case.fail(f"{line}\nafter it {ended}\n{more}")


def _wrong_end(ended: Ended) -> Iterator[str]:
    lines = [line for line in ended.err.splitlines() if line.strip() and not re.match(r"\[\w+\] ", line)]
    messages = [line for line in lines if not line.startswith("warning: ")]
    if ended.traceback:
        yield "a traceback"
    elif ended.code not in (0, 1):
        yield f"exit code {ended.code}"
    elif len(messages) != ended.code:
        yield f"{len(messages)} messages with exit code {ended.code}"
    elif any("no space left on the disk" not in line for line in messages):
        yield "the message does not say that the disk is full"


@dataclass(frozen=True)
class _Kept:
    """What a run has acknowledged: records of finished stages, newest checkpoints, and the rows that these hold."""

    finished: dict[str, bytes]
    steps: dict[str, int]
    rows: dict[str, list[bytes]]

    @classmethod
    def of(cls, run: Path) -> _Kept:
        kept = cls({}, {}, {})
        for record in run.glob("*/stage.json"):
            stage, name = record.parent, record.parent.name
            content = record.read_bytes()
            if json.loads(content)["state"] == "done":
                kept.finished[name] = content
            saved = [path for path in (stage / "checkpoints").glob("[0-9]*") if path.name.isdecimal()]
            if not saved:
                continue
            newest = max(saved, key=lambda path: int(path.name))
            kept.steps[name] = int(newest.name)
            # The last update is saved before it is reported, and is reported anew by a run that goes on from there.
            reported = json.loads((newest / "host.json").read_bytes())["host"]["reported"]
            lines = (stage / "metrics.jsonl").read_bytes().splitlines()
            held = [(json.loads(line)["step"], line) for line in lines if line.endswith(b"}")]
            kept.rows[name] = [line for step, line in held if step < int(newest.name) + bool(reported)]
        return kept

    def lost(self, now: _Kept) -> Iterator[str]:
        """Yield what is not there any more."""
        for name, content in self.finished.items():
            if now.finished.get(name) != content:
                yield f"{name} was finished, and ran again"
        for name, step in self.steps.items():
            if now.steps.get(name, -1) < step:
                yield f"the checkpoint of update {step} of {name} is lost"
        for name, lines in self.rows.items():
            if now.rows.get(name, [])[: len(lines)] != lines:
                yield f"rows of {name} are lost: {lines} became {now.rows.get(name)}"


_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000
_PRIVATE, _REMOUNT = 1 << 18 | 1 << 14, 1 << 5


def mount(directory: Path, *, pages: int, files: int, again: bool = False) -> None:
    """Mount a disk of this size that no other process sees and that goes with this one, however it ends.

    again: change the size of the one mounted there. Raises OSError.
    """
    directory.mkdir(exist_ok=True)
    if not again:
        _leave_mounts()
    options = f"size={pages * os.sysconf('SC_PAGE_SIZE')},nr_inodes={files}"
    _call("mount", b"tmpfs", bytes(directory), b"tmpfs", _REMOUNT if again else 0, options.encode())


def _leave_mounts() -> None:
    """Give this process mounts of its own; as another user than root, in a user namespace."""
    user, group = os.getuid(), os.getgid()
    if user == 0:
        _call("unshare", _NEW_MOUNTS)
    else:
        _call("unshare", _NEW_USER | _NEW_MOUNTS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call("mount", None, b"/", None, _PRIVATE, None)


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _used(disk: Path) -> dict[str, int]:
    figures = os.statvfs(disk)
    return {"pages": figures.f_blocks - figures.f_bfree, "files": figures.f_files - figures.f_ffree}
