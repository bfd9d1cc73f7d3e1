"""Run the cases of an experiment, each in a process of its own, and collect what failed."""

from __future__ import annotations

import ctypes
import json
import os
import random
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

SUBREAPER = 36
"""prctl's option by which orphans of a case become its children, so that they end with it."""
CORES = max(1, len(os.sched_getaffinity(0)))


class Skipped(Exception):
    """An experiment cannot run on this machine; the message says what to install."""


class Failed(Exception):
    """A case failed and cannot go on."""


@dataclass(frozen=True)
class Failure:
    """What went wrong in a case."""

    case: str
    what: str


@dataclass
class Case:
    """One case: a name that repeats it, a directory and a random stream of its own."""

    name: str
    directory: Path
    random: random.Random
    failures: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def fail(self, what: str) -> None:
        """Note a failure and go on."""
        self.failures.append(what)

    def require(self, condition: object, what: str) -> None:
        """End the case with a failure unless the condition holds."""
        if not condition:
            raise Failed(what)

    def count(self, name: str, number: int = 1) -> None:
        """Add to a figure that the table shows, such as the states that were judged."""
        self.counts[name] += number


@dataclass
class Trial:
    """One run of an experiment: its seed, its time and what has been found so far.

    only: the single case to run; others are passed over. until: `time.monotonic()` after which no case begins.
    """

    name: str
    seed: int
    until: float
    only: str | None = None
    cases: int = 0
    failures: list[Failure] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    unfinished: int = 0

    def random(self, *about: object) -> random.Random:
        """Make a random stream that depends on the seed, the experiment and `about` alone."""
        return random.Random(" ".join(map(str, (self.seed, self.name, *about))))

    @property
    def seconds_left(self) -> float:
        return self.until - time.monotonic()

    def each(
        self,
        names: Iterable[str],
        judge: Callable[[Case], None],
        *,
        at_once: int = CORES,
        seconds: float = 120.0,
    ) -> None:
        """Judge cases in their order, each in a forked process, until the time is used up; begin one in any case.

        Ctrl-C uses the time up.

        judge: notes failures with `case.fail`; any exception is a failure, too. seconds: a case that takes longer is
        ended with everything it started, and has failed.
        """
        waiting = iter([name for name in names if self.only in (None, name)])
        running: list[_Running] = []
        begun = 0
        while True:
            try:
                while len(running) < at_once and (
                    begun == 0 or self.seconds_left > 0 or self.only is not None
                ):
                    name = next(waiting, None)
                    if name is None:
                        break
                    running.append(_Running(name, judge, self.random(name), seconds))
                    begun += 1
                if not running:
                    break
                select.select([each.pipe for each in running], [], [], 0.2)
                for each in [each for each in running if each.poll()]:
                    running.remove(each)
                    self._add(each)
            except KeyboardInterrupt:
                self.until = time.monotonic()
                print(f"{self.name}: no further cases; waiting for {len(running)}", flush=True)
        self.unfinished += sum(1 for _ in waiting)

    def _add(self, ended: _Running) -> None:
        self.cases += 1
        report = ended.report()
        self.failures += [Failure(ended.name, what) for what in report["failures"]]
        self.counts.update(report["counts"])


class _Running:
    """A case in a process of its own, which leads a process group."""

    def __init__(
        self, name: str, judge: Callable[[Case], None], stream: random.Random, seconds: float
    ) -> None:
        self.name, self.seconds, self.began = name, seconds, time.monotonic()
        self.directory = Path(tempfile.mkdtemp(prefix="torture-"))
        self.pipe, self._other = os.pipe()
        self._content = b""
        self._hung = False
        self.pid = os.fork()
        if self.pid == 0:
            self._judge(Case(name, self.directory, stream), judge)
        os.close(self._other)

    def _judge(self, case: Case, judge: Callable[[Case], None]) -> None:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(SUBREAPER, 1)
        try:
            judge(case)
        except Failed as failure:
            case.fail(str(failure))
        except BaseException:
            case.fail(f"the experiment itself failed:\n{traceback.format_exc()}")
        report = json.dumps({"failures": case.failures, "counts": case.counts}).encode()
        while report:
            report = report[os.write(self._other, report) :]
        os._exit(0)

    def poll(self) -> bool:
        """Read what has arrived; return whether the case has ended, having ended it after its time."""
        if time.monotonic() - self.began > self.seconds and not self._hung:
            self._hung = True
            self._kill()
        while select.select([self.pipe], [], [], 0)[0]:
            content = os.read(self.pipe, 1 << 16)
            self._content += content
            if not content:
                os.close(self.pipe)
                os.waitpid(self.pid, 0)
                self._kill()
                shutil.rmtree(self.directory, ignore_errors=True)
                return True
        return False

    def _kill(self) -> None:
        """End the case and whatever it started, groups of their own included."""
        for pid in [*_descendants(self.pid), self.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def report(self) -> dict[str, dict[str, int] | list[str]]:
        if self._hung:
            return {"failures": [f"not done after {self.seconds:.0f} s"], "counts": {}}
        try:
            return json.loads(self._content)
        except ValueError:
            return {"failures": ["the process that judged it died"], "counts": {}}


def _descendants(pid: int) -> list[int]:
    """List the living processes below `pid`, the deepest first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    below = parents.get(pid, [])
    return [each for child in below for each in [*_descendants(child), child]]
