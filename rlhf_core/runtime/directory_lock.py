"""Lock a run directory, so that only one run at a time writes to it, and all processes of a job to the same one."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import jax

from rlhf_core.errors import InputError, disk_full
from rlhf_core.runtime.agreement import broadcast_text, gather_texts, raise_together, wait_for_all
from rlhf_core.runtime.files import flush, make_directory

FILE = ".lock"
LOOK_SECONDS = 0.2
"""How long a lock may be held by `rlhf_core.runs`, which looks whether a run is at work."""
SHARED_SECONDS = 5.0
"""How long a network disk may take to show a file that another host has just written."""


@contextmanager
def lock(directory: Path, field: str = "dir") -> Iterator[None]:
    """Hold DIRECTORY/.lock, which the kernel releases when the first process of the job ends, however it ends.

    field: the name of the directory in messages. Raises InputError, on every process, if another run holds the lock,
    the directory cannot be made, or a process does not see it.
    """
    with ExitStack() as held:
        with raise_together():
            if jax.process_index() == 0:
                held.enter_context(_locked(directory, field))
        _require_shared(directory, field)
        yield


@contextmanager
def _locked(directory: Path, field: str) -> Iterator[None]:
    path = directory / FILE
    other = "--dir" if field == "dir" else field
    try:
        make_directory(directory)
        for (
            parent
        ) in directory.absolute().parents:  # a killed process may have made them and not flushed them
            with suppress(OSError):  # most were there long before, perhaps where this user cannot flush
                flush(parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{field}: {directory} is not a directory; give another {other}") from None
    except PermissionError:
        raise InputError(f"{field}: no permission to write to {directory}; give another {other}") from None
    except (OSError, ValueError) as error:
        if disk_full(error):
            raise
        why = error.strerror if isinstance(error, OSError) else error  # a name may be too long or have a NUL
        raise InputError(f"{field}: {directory} cannot be made ({why}); give another {other}") from None
    with os.fdopen(descriptor, "r+") as file:
        os.register_at_fork(
            after_in_child=file.close
        )  # a worker that outlives the run must not keep the lock
        if not _taken(file):
            process, _, host = file.read(512).strip().partition("\n")
            holder = f" (process {process} on {host})" if process and host else ""
            raise InputError(
                f"{field}: {directory} is in use by another run{holder}; wait for it to end, or give another {other}"
            )
        with suppress(OSError):  # who holds the lock is only said in messages
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n{socket.gethostname()}\n".encode())
        try:
            yield
        finally:
            with suppress(ValueError):  # in a forked process, where the file is closed
                fcntl.flock(file, fcntl.LOCK_UN)  # even while a program being started still has a copy


def _taken(file: IO[str]) -> bool:
    """Take the lock, and return whether that could be done. Who looks whether a run is at work holds it a moment."""
    until = time.monotonic() + LOOK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        else:
            return True


def _require_shared(directory: Path, field: str) -> None:
    """Raise InputError on every process unless all of them find a file that the first one writes in `directory`."""
    if jax.process_count() == 1:
        return
    shared = directory / f".shared-{broadcast_text(secrets.token_hex(8))}"
    if jax.process_index() == 0:
        shared.touch()
    wait_for_all("the shared directory")
    until = time.monotonic() + SHARED_SECONDS
    while not shared.exists() and time.monotonic() < until:
        time.sleep(0.1)
    here = f"{directory} on {socket.gethostname()}"
    views = gather_texts("" if shared.exists() else here)
    first = broadcast_text(here)
    if jax.process_index() == 0:
        shared.unlink(missing_ok=True)
    problems = [
        f"{field}: process {number} does not find in {view} what process 0 wrote to {first}; give a run directory "
        "that all processes share, under the same path"
        for number, view in enumerate(views)
        if view
    ]
    if problems:
        raise InputError(*problems)
