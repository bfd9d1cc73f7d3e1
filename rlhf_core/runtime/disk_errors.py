"""What a file system refuses, in words."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from rlhf_core.errors import RunError

T = TypeVar("T")
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
DISK = FULL | {errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}
"""Errors by which a file system refuses to be written to, whoever asks."""
GOES_ON = "What was written before is whole; the same command goes on from there."
NO_SPACE = "no space left on the disk"
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # tensorstore raises ValueError for everything


def attempt(
    write: Callable[[], T], what: str, path: Path, *, leftover: Path | None = None, then: str = GOES_ON
) -> T:
    """Call `write`; where it fails, delete `leftover`, and raise RunError if the file system is to blame.

    then: what holds after the failure, and what to do, the last sentence of the message.
    """
    try:
        return write()
    except BaseException as error:
        free = _free(path)  # before the deletion: the space there was when it failed
        if leftover is not None:
            with suppress(OSError):  # what stopped the writing may stop the deletion
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        reason = disk_reason(error)
        if reason is None:
            raise
        raise RunError(
            f"{what} could not be written to {path}: {reason}{free if reason == NO_SPACE else ''}. {then}"
        ) from error


def disk_reason(error: BaseException) -> str | None:
    """What the file system said, in words; None where the error is not the file system's."""
    for cause in _causes(error):
        found = _OS_ERROR.search(str(cause))
        number = cause.errno if isinstance(cause, OSError) else int(found[1]) if found else None
        if number in FULL or any(os.strerror(each) in str(cause) for each in FULL):
            return NO_SPACE
        if isinstance(cause, OSError):
            return str(cause.strerror or cause)
        if number is not None:
            return os.strerror(number)
    return None


def disk_message(error: OSError) -> str:
    """Say what the file system refused, where, and what to do about it."""
    file = error.filename
    if error.errno in FULL:
        return f"{NO_SPACE}{f' while writing {file}' if file else ''}; free some,"
    return f"{f'{file}: ' if file else ''}{disk_reason(error)}; mend that"


def _causes(error: BaseException) -> Iterator[BaseException]:
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__


def _free(path: Path) -> str:
    """` (N MiB free)`, empty where the disk does not even say that."""
    try:
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        return f" ({shutil.disk_usage(there).free / 2**20:,.1f} MiB free)"
    except (OSError, StopIteration):
        return ""
