"""Programs in several processes of one job, on this machine, which `jax.distributed` joins before their first line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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


def start(
    program: str,
    process: int,
    count: int,
    port: int,
    *arguments: object,
    devices: int,
    environment: dict[str, str] | None = None,
    **pipes: Any,
) -> subprocess.Popen[str]:
    """One of `count` processes, with so many devices of its own. pipes: of Popen, where output is not to be read."""
    command = [sys.executable, "-c", JOIN + program, *map(str, (process, count, devices, port, *arguments))]
    inherited = {name: value for name, value in os.environ.items() if name != DEVICES}
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(
        command,
        env={**inherited, "PYTHONPATH": root, **(environment or {})},
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **pipes},
    )


def finish(running: Sequence[subprocess.Popen[str]], timeout: float = 300) -> list[str]:
    """What each wrote on its standard output; each must have ended well."""
    said = []
    try:
        for each in running:
            out, errors = each.communicate(timeout=timeout)
            assert each.returncode == 0, out + (errors or "")
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
