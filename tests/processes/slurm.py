"""A SLURM cluster on this machine: munged, slurmctld, and two slurmd that act as two nodes of eight GPUs."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=10
CryptoType=crypto/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 Gres=gpu:8
NodeName={host}z NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# The first node's name must resolve, as the job's processes meet there. A requeued job is held for `cred_expire`.


def missing() -> list[str]:
    """List the programs that are not installed."""
    return [name for name in (*DAEMONS, "sbatch", "srun") if find(name) is None]


def find(name: str) -> str | None:
    """Find a program, also where only administrators look."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[Mapping[str, str]]:
    """Run a cluster with its files in a directory; yield the variable by which its commands find it."""
    for each in (directory, directory.parent):
        each.chmod(0o755)  # else munged refuses to put its socket there
    host, configuration = socket.gethostname(), directory / "slurm.conf"
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [probe.getsockname()[1] for probe in probes]
    configuration.write_text(
        CONFIGURATION.format(host=host, user=getpass.getuser(), directory=directory, ports=ports)
    )
    (directory / "state").mkdir()
    for number in range(8):
        (directory / f"gpu{number}").touch()
    (directory / "gres.conf").write_text(f"NodeName={host},{host}z Name=gpu File={directory}/gpu[0-7]\n")
    key = directory / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    munge = [f"--key-file={key}", f"--socket={directory}/munge.socket", f"--seed-file={directory}/munge.seed"]
    munge += [f"--pid-file={directory}/munged.pid", f"--log-file={directory}/munged.log"]
    variable = {"SLURM_CONF": str(configuration)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_daemon(directory, "munged", "-F", *munge))
        _wait(lambda: (directory / "munge.socket").exists(), "munged makes no socket", directory)
        stack.enter_context(_daemon(directory, "slurmctld", "-D", "-f", str(configuration)))
        for node in (host, f"{host}z"):
            stack.enter_context(_daemon(directory, "slurmd", "-D", "-N", node, "-f", str(configuration)))
        _wait(lambda: _idle(variable) == 2, "the two nodes do not become idle", directory)
        yield variable


@contextlib.contextmanager
def _daemon(directory: Path, name: str, *arguments: str) -> Iterator[None]:
    program = find(name)
    assert program is not None
    with open(directory / f"{name}.out", "a") as log:
        process = subprocess.Popen([program, *arguments], stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _idle(variable: Mapping[str, str]) -> int:
    nodes = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"],
        env={**os.environ, **variable},
        capture_output=True,
        text=True,
        check=False,
    )
    return nodes.stdout.split().count("idle")


def _wait(condition: object, problem: str, directory: Path) -> None:
    assert callable(condition)
    until = time.monotonic() + 60
    while not condition():
        if time.monotonic() > until:
            logs = "\n".join(path.read_text()[-1500:] for path in directory.glob("*.out"))
            raise RuntimeError(f"{problem}\n{logs}")
        time.sleep(0.5)
