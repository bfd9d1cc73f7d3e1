"""Checkpoints survive real failures: SIGKILL at any moment, and a disk that fills up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core.checkpoint import Checkpoints

SAVER = """
import sys, jax, jax.numpy as jnp, numpy as np
from rlhf_core.checkpoint import Checkpoints
noise = np.random.default_rng(0).normal(size=(2**19,)).astype(np.float32)
state = lambda i: {"w": jnp.asarray(noise + i), "key": jax.random.key(i)}
checkpoints = Checkpoints(sys.argv[1], keep=2)
for i in range(1, 1000):
    checkpoints.save(i, state(i), host={"i": i}, arrays={"i": np.full(i, i)})
    print(i, flush=True)  # the save before this one is on disk
"""
STARVED = """
import sys, resource, jax, jax.numpy as jnp, numpy as np
from rlhf_core import checkpoint
from rlhf_core.checkpoint import Checkpoints
from rlhf_core.errors import RunError
checkpoint.ENCODED_AT_ONCE = int(sys.argv[3])
small, big = {"w": jnp.ones(8)}, {"w": jax.random.normal(jax.random.key(0), (2**20,))}
checkpoints = Checkpoints(sys.argv[1], keep=1)
checkpoints.save(1, small, host={}, block=True)
if int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
for wait in (checkpoints.wait, checkpoints.close):
    try:
        checkpoints.save(2, big, host={})
        wait()
    except RunError as error:
        print(error)
print(checkpoints.steps())
restored = checkpoints.restore(small)
print(restored.step, float(restored.state["w"].sum()))
"""


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("delay", [pytest.param(0.005, marks=pytest.mark.long), 0.11])
def test_kill_9_leaves_a_whole_checkpoint(tmp_path: Path, delay: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines = [process.stdout.readline(), process.stdout.readline()]
    assert lines == ["1\n", "2\n"]
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    rest = process.stdout.read()
    process.wait()
    started = int(([2, *map(int, rest.split())])[-1])

    noise = np.random.default_rng(0).normal(size=(2**19,)).astype(np.float32)
    checkpoints = Checkpoints(tmp_path, keep=2)
    found = checkpoints.restore({"w": jnp.asarray(noise), "key": jax.random.key(0)})
    assert found is not None
    assert started - 1 <= found.step <= started + 1
    np.testing.assert_array_equal(found.state["w"], noise + np.float32(found.step))
    assert (found.state["key"] == jax.random.key(found.step)).all()
    assert found.host == {"i": found.step}
    np.testing.assert_array_equal(found.arrays["i"], np.full(found.step, found.step))
    checkpoints.save(found.step + 1, found.state, host={}, block=True)
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir() if not path.name.isdecimal()] == []


def check_starved(done: subprocess.CompletedProcess[str], directory: Path) -> None:
    assert done.returncode == 0, done.stderr
    first, second, steps, restored = done.stdout.splitlines()
    one, other = (re.sub(r"[\d.,]+ MiB free", "", said) for said in (first, second))
    assert one == other
    assert f"{directory}/2" in first
    assert "no space left on the disk (" in first
    assert "MiB free)" in first
    assert (steps, restored) == ("[1]", "1 8.0")
    assert done.stderr == ""
    assert [path.name for path in directory.iterdir()] == ["1"]


@pytest.mark.parametrize("encoded_at_once", [2**28, pytest.param(1, marks=pytest.mark.long)])
def test_a_file_that_cannot_grow_is_one_message(tmp_path: Path, encoded_at_once: int) -> None:
    check_starved(run(STARVED, tmp_path, 2**20, encoded_at_once), tmp_path)


@pytest.mark.long
def test_a_full_disk_is_one_message(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(
            "mounting a small file system takes root; the test with a file size limit covers the same code"
        )
    try:
        check_starved(run(STARVED, mount / "checkpoints", 0, 2**28), mount / "checkpoints")
    finally:
        subprocess.run(["umount", str(mount)], check=True)
