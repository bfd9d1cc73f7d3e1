"""Programs in several processes of one job, on this machine, which `jax.distributed` joins before their first line."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

JOIN = """
import sys
import jax
process, count, devices, port = map(int, sys.argv[1:5])
arguments = sys.argv[5:]
jax.config.update("jax_num_cpu_devices", devices)
if count > 1:
    jax.distributed.initialize(f"localhost:{port}", num_processes=count, process_id=process)
"""
"""In front of every program, which finds its own `arguments`, and which `process` of how many (`count`) it is."""
DEVICES = "JAX_NUM_CPU_DEVICES"
"""Of the environment, which would give a process other devices."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """A forked process. pid: its id, and that of its group. returncode: as of `subprocess.Popen`, once it has ended."""

    def __init__(
        self, program: str, arguments: Sequence[object], cwd: Path | None, environment: dict[str, str]
    ) -> None:
        self._ended = Path(tempfile.mkdtemp()) / "ended"
        self.returncode: int | None = None
        job = {
            "program": program,
            "arguments": [str(each) for each in arguments],
            "cwd": str(cwd or Path.cwd()),
            "environment": environment,
            "ended": str(self._ended),
        }
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        self.pid = int(server.stdout.readline())

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Wait for its end; what it wrote on standard output, and on the other."""
        until = time.monotonic() + timeout
        while not self._ended.exists():
            assert time.monotonic() < until, "it does not end"
            time.sleep(0.01)
        self.returncode, out, errors = json.loads(self._ended.read_text())
        return out, errors

    @property
    def ended_at(self) -> float:
        """The time at which it ended, in seconds since the epoch, once it has."""
        return self._ended.stat().st_mtime

    def kill(self) -> None:
        if not self._ended.exists():
            os.kill(self.pid, signal.SIGKILL)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that the others are forked from; it ends with this one."""
    inherited = {name: value for name, value in os.environ.items() if name != DEVICES}
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [root, inherited.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("forks.py"))],
        env={**inherited, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def start(
    program: str,
    process: int,
    count: int,
    port: int,
    *arguments: object,
    devices: int,
    cwd: Path | None = None,
) -> Process:
    """One of `count` processes, with so many devices of its own."""
    return Process(JOIN + program, [process, count, devices, port, *arguments], cwd, {})


def finish(running: Sequence[Process], timeout: float = 300) -> list[str]:
    """What each wrote on its standard output; each must have ended well."""
    said = []
    try:
        for each in running:
            out, errors = each.communicate(timeout=timeout)
            assert each.returncode == 0, out + errors
            said.append(out)
    finally:
        for each in running:
            each.kill()
    return said


def alone_and_in_two(
    program: str, arguments: Callable[[int, int], Sequence[object]], devices: int = 4
) -> None:
    """The program in one process, and at the same time in two, with as many devices in all.

    arguments: of process i of n.
    """
    port = free_port()
    finish(
        [
            start(program, i, n, port, *arguments(i, n), devices=devices // n)
            for i, n in ((0, 1), (0, 2), (1, 2))
        ]
    )
