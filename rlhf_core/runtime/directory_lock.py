"""Lock a run directory, so that only one run at a time writes to it."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf_core.errors import InputError
from rlhf_core.runtime.files import flush_names, make_directory

FILE = ".lock"
_held: set[int] = set()


@functools.cache
def _watch_forks() -> None:
    """Close locks in forked processes, so that a worker that outlives the run does not keep its directory locked."""

    def close() -> None:
        while _held:
            with suppress(OSError):
                os.close(_held.pop())

    os.register_at_fork(after_in_child=close)


@contextmanager
def lock(directory: Path, field: str = "dir") -> Iterator[None]:
    """Hold DIRECTORY/.lock, which the kernel releases when this process ends, however it ends.

    field: the name of the directory in messages. Raises InputError if another process holds the lock or the directory
    cannot be made.
    """
    path, other = directory / FILE, "--dir" if field == "dir" else field
    try:
        make_directory(directory)
        flush_names(directory)
        # Closed on exec, so that no program started here inherits it.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{field}: {directory} is not a directory; give another {other}") from None
    except PermissionError:
        raise InputError(f"{field}: no permission to write to {directory}; give another {other}") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(
            f"{field}: {directory} cannot be made ({error.strerror}); give another {other}"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        process, _, host = os.read(descriptor, 512).decode(errors="replace").strip().partition("\n")
        os.close(descriptor)
        holder = f" (process {process} on {host})" if process and host else ""
        raise InputError(
            f"{field}: {directory} is in use by another run{holder}; wait for it to end, or give another {other}"
        ) from None
    except OSError:
        os.close(descriptor)
        raise
    _watch_forks()
    _held.add(descriptor)
    try:
        with suppress(OSError):  # who holds the lock is only said in messages
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n{socket.gethostname()}\n".encode())
        yield
    finally:
        if descriptor in _held:  # in a forked child it was closed, and its number may be another file's
            _held.discard(descriptor)
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # even while a program being started still has a copy
            os.close(descriptor)
