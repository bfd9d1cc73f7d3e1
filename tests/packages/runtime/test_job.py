"""Processes of one job find each other and end together; a long sleep stands for a collective that never returns."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import InputError
from rlhf_core.runtime.job import find_launcher
from tests.shared import processes

GIVEN = {"JAX_COORDINATOR_ADDRESS": "node1:8476", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_NAMESPACE": "prterun-node1-4711@1",
}
OPEN_MPI_4 = OPEN_MPI_5 | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.0.0.1:45513"}
PROGRAM = """
import signal, time
from pathlib import Path
from rlhf_core.cli import exits
from rlhf_core.errors import InputError, RunError, Stopped
from rlhf_core.runtime import job, signals
job.GRACE_SECONDS, job.WARN_AFTER_SECONDS, job.PORT_SECONDS = 1.0, 1.5, 0.5
(what,) = arguments

def command():
    Path(f"began{os.environ['JAX_PROCESS_ID']}").touch()
    job.join()
    Path(f"joined{os.environ['JAX_PROCESS_ID']}").touch()
    with job.joint_run():
        exec(what)

with signals.stop_signals():
    exits.run(command)
"""
WAITS = "time.sleep(600)"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "node1"}, "write HOST:PORT"),
        ({"JAX_COORDINATOR_ADDRESS": "node1:99999"}, "write HOST:PORT"),
        ({"JAX_PROCESS_ID": "4"}, "it is one of 0 … 3"),
        ({"JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID: '-1' is not a number"),
        ({"JAX_NUM_PROCESSES": ""}, "JAX_NUM_PROCESSES: missing"),
    ],
)
def test_variables_that_cannot_be_right(change: dict[str, str], named: str) -> None:
    with pytest.raises(InputError, match=named):
        find_launcher(GIVEN | change)


def test_open_mpi_5_on_one_machine() -> None:
    given, first = find_launcher(OPEN_MPI_5), find_launcher(OPEN_MPI_5 | {"OMPI_COMM_WORLD_RANK": "0"})
    assert given is not None
    assert first is not None
    assert (given["process_id"], given["num_processes"], given["local_device_ids"]) == (1, 2, [1])
    assert given["coordinator_address"] == first["coordinator_address"]
    other = find_launcher(OPEN_MPI_5 | {"PMIX_NAMESPACE": "prterun-node1-4712@1"})
    assert other is not None
    assert other["coordinator_address"] != given["coordinator_address"]


def test_open_mpi_5_on_several_machines() -> None:
    several = OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(InputError, match="mpirun -x JAX_COORDINATOR_ADDRESS=HOST:8476"):
        find_launcher(several)
    given = find_launcher(several | {"JAX_COORDINATOR_ADDRESS": "node1:9000"})
    assert given is not None
    assert (given["coordinator_address"], given["local_device_ids"]) == ("node1:9000", [0])


class Job:
    """Several processes of one program, each running its own code."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = processes.free_port()
        self.processes: list[Any] = []

    def start(self, *codes: str, count: int | None = None, first: int = 0, **environment: str) -> None:
        for process, code in enumerate(codes, first):
            variables = {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{self.port}",
                "JAX_NUM_PROCESSES": str(count or len(codes)),
                "JAX_PROCESS_ID": str(process),
                "JAX_NUM_CPU_DEVICES": "1",
                **environment,
            }
            program = "import os, sys\narguments = sys.argv[1:]\n" + PROGRAM
            self.processes.append(processes.Process(program, [code], self.directory, variables))

    def until(self, file: str, count: int) -> None:
        ends = time.monotonic() + 60
        while len([*self.directory.glob(f"{file}*")]) < count:
            assert time.monotonic() < ends
            time.sleep(0.05)

    def ended(self, within: float = 300.0) -> list[tuple[int, str]]:
        """Wait for every process; return the exit code and standard error of each."""
        until = time.monotonic() + within
        told = [each.communicate(timeout=max(until - time.monotonic(), 0.1))[1] for each in self.processes]
        return [(each.returncode, text) for each, text in zip(self.processes, told, strict=True)]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for each in made.processes:
        each.kill()


def test_a_killed_process_ends_the_others(job: Job) -> None:
    job.start(WAITS, WAITS, WAITS)
    job.until("joined", 3)
    job.processes[1].kill()
    for process, (code, said) in enumerate(job.ended(within=90)):
        if process == 1:
            assert code == -signal.SIGKILL
        else:
            assert code == 1
            assert said == (
                f"process {process} of 3 ends: process 1 has disappeared: killed, crashed or unreachable; "
                f"the same command resumes from the newest checkpoint\n"
            )


def test_the_first_one_is_killed(job: Job) -> None:
    """jax's service is gone with it, for which jax aborts the others: a little later than they end themselves."""
    job.start(WAITS, WAITS)
    job.until("joined", 2)
    job.processes[0].kill()
    _, (code, said) = job.ended(within=90)
    assert code == 1, said
    assert "resumes from the newest checkpoint\n" in said  # jax may report its service after it
    assert said.count("process 1 of 2 ends: process 0 has disappeared") == 1


@pytest.mark.parametrize(
    ("failing", "error", "code"),
    [
        pytest.param(0, "RunError('no disk')", 1, marks=pytest.mark.long),
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
        how = "stopped by a signal" if code == 75 else "failed; see its output"
        told = f"process {process} of 3 ends: process {failing} {how}\n"
        assert (("Traceback" in said) == ("OSError" in error)) if process == failing else (said == told)


@pytest.mark.long
def test_a_stopped_process_ends_after_the_first_has_written(job: Job) -> None:
    """A launcher that kills the others when one of them ends would leave the newest checkpoint without its manifest."""
    writes = "with job.hold_end():\n    time.sleep(3); Path('written').touch()\nraise Stopped('no time')"
    job.start(writes, "raise Stopped('no time')", "raise Stopped('no time')")
    assert [code for code, _ in job.ended()] == [75] * 3
    written = (job.directory / "written").stat().st_mtime
    assert written <= min(each.ended_at for each in job.processes)


def test_what_all_raise_is_printed_once(job: Job) -> None:
    job.start(*["time.sleep(0.2); raise InputError('dir: in use')"] * 3)
    ended = job.ended()
    assert [code for code, _ in ended] == [2, 2, 2]
    assert "".join(said for _, said in ended).count("dir: in use") == 1


@pytest.mark.long
def test_an_error_that_is_caught_ends_nobody(job: Job) -> None:
    """A script goes on if every process has left the run for the same reason."""
    code = """
job._job.running -= 1  # as in a script, outside of any run
for number in range(2):
    time.sleep(number * job._job.process)
    try:
        with job.joint_run():
            raise InputError('wrong')
    except InputError:
        pass
time.sleep(3)
job._job.running += 1
"""
    job.start(code, code)
    assert [each for each, _ in job.ended()] == [0, 0]


@pytest.mark.long
def test_files_are_written_before_an_end(job: Job) -> None:
    writes = f"with job.hold_end():\n time.sleep(4)\n Path('written').touch()\n{WAITS}"
    job.start(writes, "raise Stopped('no time')")
    assert [code for code, _ in job.ended()] == [75, 75]
    assert (job.directory / "written").exists()


def test_a_signal_while_waiting_for_the_others(job: Job) -> None:
    job.start("pass", count=2)
    job.until("began", 1)
    time.sleep(0.5)
    os.kill(job.processes[0].pid, signal.SIGTERM)
    ((code, said),) = job.ended()
    assert code == 75
    announced, _, reason = said.partition("\n")
    assert announced.startswith("stopping (SIGTERM): ")
    assert reason.startswith("stopped by SIGTERM while process 0 of 2 (127.0.0.1:")


def test_one_does_not_come(job: Job) -> None:
    job.start("pass", count=2, RLHF_JOIN_SECONDS="2")
    ((code, said),) = job.ended()
    assert code == 1
    who = f"process 0 of 2 (127.0.0.1:{job.port})"
    assert f"warning: {who} waits for the others, at most 2 s (RLHF_JOIN_SECONDS)\n" in said
    assert f"{who} has waited 2 s for the others; check them." in said


def test_one_comes_late(job: Job) -> None:
    """All end with 0, also the one that has less to do."""
    job.start("pass", count=2, first=1)
    job.until("began", 1)
    time.sleep(1)
    job.start("time.sleep(0.2)", count=2)
    assert [code for code, _ in job.ended()] == [0, 0]


def test_a_port_that_is_taken(job: Job) -> None:
    with socket.create_server(("", job.port)):
        job.start("pass", count=2)
        ((code, said),) = job.ended()
    assert code == 1
    assert said.startswith(f"port {job.port} of ")


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, None),
        (GIVEN, {"coordinator_address": "node1:8476", "num_processes": 4, "process_id": 3}),
        ({"SLURM_STEP_NUM_TASKS": "2"}, {}),  # jax reads the variables of SLURM and of Open MPI 4
        (OPEN_MPI_4, {}),
    ],
    ids=["alone", "one process", "three variables", "SLURM", "Open MPI 4"],
)
def test_who_has_started_the_processes(variables: dict[str, str], found: dict[str, Any] | None) -> None:
    assert find_launcher(variables) == found
