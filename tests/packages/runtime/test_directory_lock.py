"""The lock of a run directory: held by one process, released when it ends, and not inherited."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_core.errors import InputError
from rlhf_core.runtime import directory_lock

PARENT = """
import os, subprocess, sys, time
from pathlib import Path
from rlhf_core.runtime.directory_lock import lock
with lock(Path(sys.argv[1])):
    START
    os.write(1, f"{child}\\n".encode())
    time.sleep(60)
"""
FORKS = """child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)"""
STARTS = (
    'child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False).pid'
)


def start(program: str, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(directory)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("how", [FORKS, STARTS], ids=["forked", "started"])
def test_a_worker_does_not_keep_the_lock_of_a_run_that_was_killed(tmp_path: Path, how: str) -> None:
    parent = start(PARENT.replace("START", how), tmp_path)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        time.sleep(0.5)  # until the worker runs
        parent.kill()
        parent.wait()
        os.kill(child, 0)  # it outlives the run
        with directory_lock.lock(tmp_path):
            pass
    finally:
        os.kill(child, 9)


def test_directories_that_a_killed_process_made_are_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(directory_lock, "flush", lambda path: flushed.append(Path(path)))
    (tmp_path / "runs" / "first").mkdir(parents=True)
    with directory_lock.lock(tmp_path / "runs" / "first"):
        assert flushed[:2] == [tmp_path / "runs", tmp_path]


@pytest.mark.parametrize("field", ["dir", "save_directory"])
def test_what_cannot_be_a_directory_is_reported_by_its_field(tmp_path: Path, field: str) -> None:
    (tmp_path / "file").write_text("")
    other = "--dir" if field == "dir" else field
    told = rf"^{field}: .* is not a directory; give another {other}"
    with pytest.raises(InputError, match=told), directory_lock.lock(tmp_path / "file", field):
        pass


def test_a_disk_that_cannot_hold_the_process_number_can_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", write)
    with (
        directory_lock.lock(tmp_path),
        pytest.raises(InputError, match="in use by another run; wait"),
        directory_lock.lock(tmp_path),
    ):
        pass
