"""Processes of one job wait for each other and end together; without jax, a long sleep stands for a collective."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.plugins import component
from rlhf_core.runtime import peers

processes: Any = component.load_file(Path(__file__).parents[1] / "shared" / "processes.py")

PROGRAM = """
import sys, time
from rlhf_core.cli import exits
from rlhf_core.runtime import launch, peers, signals
from rlhf_core.errors import InputError, RunError, Stopped
from rlhf_core.runtime.launch import Place
process, count, port, *what = sys.argv[1:]
peers.GRACE_SECONDS = 1.0
launch.TAKEN_PORT_SECONDS, launch.STRANGER_SECONDS, launch.ANSWER_SECONDS = 1.0, 2.0, 1.0
launch.WARN_AFTER_SECONDS = 1.5
place = Place(f"127.0.0.1:{port}", int(process), int(count))

def command():
    print("waits", flush=True)
    links = launch.gather(place) if place.process == 0 else {0: launch.reach(place)}
    peers.watch(place.process, place.count, links)
    print("joined", flush=True)
    with peers.joint_run():
        exec(what[0])

with signals.stop_signals():
    exits.run(command)
"""
WAITS = "time.sleep(60)"


class Job:
    """Several processes of one program, each running its own code."""

    def __init__(self) -> None:
        self.port = processes.free_port()
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *codes: str, count: int | None = None, first: int = 0) -> None:
        for process, code in enumerate(codes, first):
            command = [sys.executable, "-c", PROGRAM, str(process), str(count or len(codes)), str(self.port)]
            self.processes.append(
                subprocess.Popen(
                    [*command, code],
                    cwd=Path(__file__).parents[2],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def until(self, line: str) -> None:
        for each in self.processes:
            assert each.stdout is not None
            while (said := each.stdout.readline()) != f"{line}\n":
                assert said, f"it ended without the line '{line}'"

    def ended(self, within: float = 30.0) -> list[tuple[int, str]]:
        """Wait for every process; return the exit code and standard error of each."""
        until = time.monotonic() + within
        told = [each.communicate(timeout=max(until - time.monotonic(), 0.1))[1] for each in self.processes]
        return [(each.returncode, text) for each, text in zip(self.processes, told, strict=True)]


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    for each in made.processes:
        each.kill()
        each.communicate()


def test_all_end_well(job: Job) -> None:
    job.start("pass", "time.sleep(0.2)", "pass")
    assert job.ended() == [(0, ""), (0, ""), (0, "")]


@pytest.mark.parametrize("killed", [0, 1])
def test_one_is_killed(job: Job, killed: int) -> None:
    job.start(WAITS, WAITS, WAITS)
    job.until("joined")
    job.processes[killed].kill()
    for process, (code, said) in enumerate(job.ended(within=30)):
        if process == killed:
            assert code == -signal.SIGKILL
        else:
            assert code == 1
            assert said == (
                f"process {process} of 3 ends: process {killed} is gone without a word: killed, crashed or "
                "unreachable; the same command goes on from the newest checkpoint\n"
            )


@pytest.mark.parametrize(
    ("failing", "error", "code"),
    [
        (0, "RunError('no disk')", 1),
        pytest.param(2, "InputError('no file')", 2, marks=pytest.mark.long),
        pytest.param(0, "Stopped('no time')", 75, marks=pytest.mark.long),
        (2, "OSError(5)", 1),
    ],
)
def test_one_fails(job: Job, failing: int, error: str, code: int) -> None:
    codes = [WAITS] * 3
    codes[failing] = f"raise {error}"
    job.start(*codes)
    ended = job.ended()
    assert [each for each, _ in ended] == [code] * 3
    for process, (_, said) in enumerate(ended):
        how = "stopped by a signal" if code == 75 else "failed, and says why"
        told = f"process {process} of 3 ends: process {failing} {how}\n"
        assert (("Traceback" in said) == ("OSError" in error)) if process == failing else (said == told)


@pytest.mark.long
def test_a_stopped_process_ends_after_the_first_has_written(job: Job) -> None:
    """A launcher that kills the others when one of them ends would leave the newest checkpoint without its manifest."""
    writes = (
        "with peers.hold_end():\n    time.sleep(3); print('written', flush=True)\nraise Stopped('no time')"
    )
    job.start(writes, "raise Stopped('no time')", "raise Stopped('no time')")
    job.until("joined")
    first = job.processes[0]
    assert first.stdout is not None
    assert first.stdout.readline() == "written\n"
    assert [each.poll() for each in job.processes] == [None] * 3
    assert [code for code, _ in job.ended()] == [75] * 3


def test_what_all_raise_is_printed_once(job: Job) -> None:
    job.start(*["time.sleep(0.2); raise InputError('dir: in use')"] * 3)
    ended = job.ended()
    assert [code for code, _ in ended] == [2, 2, 2]
    assert "".join(said for _, said in ended).count("dir: in use") == 1


def test_it_is_printed_once_by_a_process_that_hears_first_that_another_failed(job: Job) -> None:
    slow = """
def slow(message, write=peers._print):
    time.sleep(1.5)
    write(message)
peers._print = slow
raise InputError('dir: in use')
"""
    job.start(slow, "time.sleep(0.5); raise InputError('dir: in use')")
    ended = job.ended()
    assert [code for code, _ in ended] == [2, 2]
    assert "".join(said for _, said in ended).count("dir: in use") == 1


@pytest.mark.long
def test_an_error_that_is_caught_ends_nobody(job: Job) -> None:
    """A script goes on if every process has left the run for the same reason."""
    code = """
peers._watch.running -= 1  # as in a script, outside of any run
for number in range(2):
    time.sleep(number * place.process)
    try:
        with peers.joint_run():
            raise InputError('wrong')
    except InputError:
        pass
time.sleep(3)
"""
    job.start(code, code)
    assert job.ended() == [(0, ""), (0, "")]


@pytest.mark.long
def test_files_are_written_before_an_end(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "written"
    writes = f"with peers.hold_end():\n time.sleep(4)\n open({str(file)!r}, 'w').close()\n{WAITS}"
    job.start(writes, "raise Stopped('no time')")
    assert [code for code, _ in job.ended()] == [75, 75]
    assert file.exists()


def test_a_signal_while_waiting_for_the_others(job: Job) -> None:
    job.start("pass", "pass", count=3)
    job.until("waits")
    time.sleep(0.5)
    job.processes[0].send_signal(signal.SIGTERM)
    (code, said), (other, line) = job.ended(within=30)
    assert code == other == 75
    announced, _, reason = said.partition("\n")
    assert announced.startswith("stopping (SIGTERM): ")
    assert reason.startswith("stopped by SIGTERM while process 0 of 3 waited for the others")
    assert line == "process 1 of 3 ends: process 0 stopped by a signal\n"


def test_one_does_not_come(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_JOIN_SECONDS", "2")
    job.start("pass", "pass", count=4)
    (code, said), (other, line) = job.ended(within=30)
    assert (code, other) == (1, 1)
    assert "those that process 0 names" in line
    line = line.splitlines()[-1]
    waits, _, said = said.partition("\n")
    assert waits == (
        f"warning: process 0 of 4 waits at 127.0.0.1:{job.port} for process 2, 3; at most 2 s (RLHF_JOIN_SECONDS)"
    )
    assert said == (
        f"process 0 of 4 has waited 2 s at 127.0.0.1:{job.port} for process 2, 3; see what became of it. "
        "RLHF_JOIN_SECONDS sets how long to wait\n"
    )
    assert line == "process 1 of 4 ends: process 0 failed, and says why"


@pytest.mark.long
def test_the_first_one_does_not_come(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_JOIN_SECONDS", "2")
    job.start("pass", count=2, first=1)
    ((code, said),) = job.ended(within=30)
    assert code == 1
    assert said.partition("\n")[2].startswith(
        f"process 1 of 2 has waited 2 s at 127.0.0.1:{job.port} for process 0, which is not there: "
    )


def test_numbers_that_do_not_fit(job: Job) -> None:
    job.start("pass", count=2)
    hello = b'{"rlhf": 1, "process": 2, "count": 2, "host": "node3"}\n'
    for _ in range(100):
        try:
            with socket.create_connection(("127.0.0.1", job.port)) as link:
                link.sendall(hello)
            break
        except OSError:
            time.sleep(0.1)
    ended = job.ended(within=30)
    assert ended[0][0] == 1
    assert "says that it is process 2 of 2; give all of them the same" in ended[0][1]


def test_what_others_say_at_once_is_not_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hears of a killed one ends, too; its own message may arrive before the next line is run."""
    watch = peers._Watch(process=0, count=3)
    answers = iter([{"ended": 1, "process": 2, "run": 0}])

    def answered(message: Any, but: int | None = None) -> None:
        for answer in answers:
            watch._handle(2, answer)

    monkeypatch.setattr(watch, "_send", answered)
    monkeypatch.setattr(watch, "_end", lambda cause: None)
    ours, theirs = socket.socketpair()
    theirs.close()
    watch._listen(1, ours)
    assert watch.cause is not None
    assert watch.cause.line(0, 3).startswith("process 0 of 3 ends: process 1 is gone without a word")


def test_one_comes_late(job: Job) -> None:
    job.start("pass", count=2, first=1)
    job.until("waits")
    job.start("pass", count=2)
    assert [code for code, _ in job.ended(within=30)] == [0, 0]


@pytest.mark.long
def test_a_port_that_is_taken(job: Job) -> None:
    with socket.create_server(("", job.port)):
        job.start("pass", "pass")
        (code, said), (other, line) = job.ended(within=60)
    assert (code, other) == (1, 1)
    assert said.startswith(f"process 0 of 2: port {job.port} of ")
    assert line.partition("\n")[2].startswith(
        f"process 1 of 2: what answers at 127.0.0.1:{job.port} is not process 0"
    )
