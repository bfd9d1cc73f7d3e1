"""Turn errors of the file system into messages that say what to do."""

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
"""Errors with which a file system refuses any write."""
GOES_ON = "What was written before is whole; the same command goes on from there."
NO_SPACE = "no space left on the disk"
QUOTA = "disk quota exceeded"
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # tensorstore raises ValueError for everything


def attempt(
    write: Callable[[], T], what: str, path: Path, *, leftover: Path | None = None, then: str = GOES_ON
) -> T:
    """Call `write`; if it fails, delete `leftover`, and raise RunError if the file system is to blame.

    then: the last sentence of the message: what state the failure leaves, and what to do.
    """
    try:
        return write()
    except BaseException as error:
        free = _free_space(path)  # before the deletion: the space left when it failed
        if leftover is not None:
            with suppress(OSError):  # what stopped the write may stop the deletion
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        reason = disk_reason(error)
        if reason is None:
            raise
        elsewhere = _file_elsewhere(error, path, leftover or path)
        raise RunError(
            f"{what} could not be written to {path}: {reason}{elsewhere}{free if reason == NO_SPACE else ''}. {then}"
        ) from error


def disk_reason(error: BaseException) -> str | None:
    """Return the file system's reason in words; None for an error that is not the file system's."""
    for cause in _walk_causes(error):
        match = _OS_ERROR.search(str(cause))
        number = cause.errno if isinstance(cause, OSError) else int(match[1]) if match else None
        full = next((full for full in FULL if full == number or os.strerror(full) in str(cause)), None)
        if full is not None:
            return QUOTA if full == errno.EDQUOT else NO_SPACE
        if isinstance(cause, OSError):
            return str(cause.strerror or cause)
        if number is not None:
            return os.strerror(number)
    return None


def disk_message(error: OSError) -> str:
    """Describe what the file system refused, where, and what to do about it."""
    file = error.filename
    if error.errno in FULL:
        return f"{disk_reason(error)}{f' while writing {file}' if file else ''}; free some,"
    return f"{f'{file}: ' if file else ''}{disk_reason(error)}; mend that"


def _walk_causes(error: BaseException) -> Iterator[BaseException]:
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__


def _file_elsewhere(error: BaseException, *places: Path) -> str:
    """Return ` (FILE)` for the file that failed; empty if it is unknown, or above, at or below one of the places."""
    for cause in _walk_causes(error):
        if isinstance(cause, OSError) and isinstance(cause.filename, str | os.PathLike):
            file = Path(cause.filename)
            near = any(place in (file, *file.parents) or file in place.parents for place in places)
            return "" if near else f" ({file})"
    return ""


def _free_space(path: Path) -> str:
    """Return ` (N MiB free)`, with the files that can still be made where few can; empty if it cannot be read."""
    try:
        figures = os.statvfs(next(folder for folder in (path, *path.parents) if folder.exists()))
        files = (
            f", room for {figures.f_favail} more files" if figures.f_files and figures.f_favail < 100 else ""
        )
        return f" ({figures.f_bavail * figures.f_frsize / 2**20:,.1f} MiB free{files})"
    except (OSError, StopIteration):
        return ""
