"""Checkpoints survive failures: SIGKILL at any moment, disks that fill up or report errors, threads that raise."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core import checkpoint
from rlhf_core.checkpoint import Checkpoints
from rlhf_core.errors import RunError

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
checkpoint.ENCODED_AT_ONCE = int(sys.argv[2])
small, big = {"w": jnp.ones(8)}, {"w": jax.random.normal(jax.random.key(0), (2**20,))}
checkpoints = Checkpoints(sys.argv[1], keep=1)
checkpoints.save(1, small, host={}, block=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
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


def small() -> dict[str, jax.Array]:
    return {"w": jnp.arange(8.0)}


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


@pytest.mark.parametrize("encoded_at_once", [2**28, pytest.param(1, marks=pytest.mark.long)])
def test_a_file_that_cannot_grow_is_one_message(tmp_path: Path, encoded_at_once: int) -> None:
    """As on a disk that is full, whether it is waited for or closed."""
    command = [sys.executable, "-c", STARVED, str(tmp_path), str(encoded_at_once)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, second, steps, restored = done.stdout.splitlines()
    one, other = (re.sub(r"[\d.,]+ MiB free", "", said) for said in (first, second))
    assert one == other
    assert f"{tmp_path}/2" in first
    assert "no space left on the disk (" in first
    assert "MiB free)" in first
    assert (steps, restored) == ("[1]", "1 8.0")
    assert done.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    found = Checkpoints(tmp_path / "checkpoints", keep=None)
    yield found
    found.close()


def test_an_error_that_is_not_the_disks_is_raised_as_it_is(
    opened: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(checkpoint, "describe_files", broken)
    opened.save(1, small(), host={})
    with pytest.raises(ZeroDivisionError):
        opened.wait()
    monkeypatch.undo()
    opened.save(2, small(), host={}, block=True)
    assert opened.steps() == [2]


@pytest.mark.parametrize(
    ("number", "words"),
    [(5, "Input/output error"), (13, "Permission denied"), (28, "no space left on the disk")],
)
def test_what_tensorstore_says_of_the_disk_is_one_message(
    opened: Checkpoints, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    """Tensorstore raises ValueError for everything, with the file system's error number at the end."""
    opened.save(1, small(), host={}, block=True)

    class Failing:
        def result(self) -> None:
            raise ValueError(f"UNKNOWN: Failed writing: \"x/d/77\" [os_error_code='{number}']")

    with monkeypatch.context() as patched:
        patched.setattr("orbax.checkpoint.v1.save_async", lambda *_: Failing())
        opened.save(2, small(), host={})
        with pytest.raises(
            RunError, match=rf"^the checkpoint of step 2 could not be written to \S+/2: {words}"
        ):
            opened.wait()
    assert opened.steps() == [1]


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Checkpoints(tmp_path, keep=1)
    found.save(1, small(), host={}, block=True)
    plain = os.rename

    def rename(old: Any, new: Any) -> None:
        if Path(old).name == "1":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        plain(old, new)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", rename)
        found.save(2, small(), host={})
        with pytest.warns(
            UserWarning,
            match=r"step 1, which is no longer needed, could not be deleted .*Input/output error",
        ):
            found.wait()
    assert found.steps() == [1, 2]
    found.save(3, small(), host={})
    found.close()
    assert found.steps() == [3]


def test_one_that_may_not_be_read_is_an_error_not_an_older_state(
    opened: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        opened.save(step, small(), host={}, block=True)

    def refused(directory: Path, _: Any) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(directory / "host.json"))

    monkeypatch.setattr(checkpoint, "find_damage", refused)
    for step in (None, 2):
        with pytest.raises(RunError, match=r"/2/host\.json cannot be read: Permission denied"):
            opened.restore(small(), step)
    monkeypatch.undo()
    opened.save(3, small(), host={}, block=True)
    assert opened.steps() == [1, 2, 3]


def test_what_a_checkpoint_relies_on_is_on_the_disk_before_it(
    opened: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    plain = checkpoint.replace_directory

    def replace(new: Path, final: Path) -> None:
        calls.append(f"rename {final.name}")
        plain(new, final)

    monkeypatch.setattr(checkpoint, "replace_directory", replace)
    opened.save(1, small(), host={}, block=True, before=lambda: calls.append("rows"))
    assert calls == ["rows", "rename 1"]

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    opened.save(2, small(), host={}, before=full)
    with pytest.raises(RunError, match="no space left"):
        opened.wait()
    assert opened.steps() == [1]


def test_what_others_log_and_raise_is_said(
    opened: Checkpoints, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a thread of a save raises is raised by the save alone; messages of the same logger are kept."""
    shown: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    checkpoint._say_failures_once.cache_clear()
    opened.save(1, small(), host={}, block=True)
    logging.getLogger("absl").error("the %s thread", "other")
    assert caplog.messages == ["the other thread"]
    for message in ("Event loop is closed", "another"):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(message)))  # type: ignore[arg-type]
    assert [str(each.exc_value) for each in shown] == ["another"]
