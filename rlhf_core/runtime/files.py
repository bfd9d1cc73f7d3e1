"""Write files and directories so that a power cut leaves them whole or absent, and say what a disk refuses."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rlhf_core.errors import InputError, RunError

T = TypeVar("T")
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
DISK = FULL | {errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}
"""Errors with which a file system refuses any write."""
INTACT = "Existing files are intact; rerun the same command to resume."
UNTOUCHED = "Existing files are unchanged; fix this and rerun the same command."
NO_SPACE = "no space left on the disk"
CHECKSUM = "checksum"
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # tensorstore raises ValueError for everything


def attempt(
    write: Callable[[], T], what: str, path: Path, *, leftover: Path | None = None, then: str = INTACT
) -> T:
    """Call `write`; if it fails, delete `leftover`, and raise RunError if the file system is to blame.

    A RunError of `write` itself names what failed inside it, and passes unchanged.
    then: the last sentence of the message: what state the failure leaves, and what to do.
    """
    try:
        return write()
    except BaseException as error:
        reason = disk_reason(error)
        if reason == NO_SPACE:
            reason += _free_space(path)  # before the deletion: the space left when it failed
        if leftover is not None:
            with suppress(OSError):  # what stopped the write may stop the deletion
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        if reason is None or isinstance(error, RunError):
            raise
        raise RunError(f"{what} could not be written to {path}: {reason}. {then}") from error


def disk_reason(error: BaseException) -> str | None:
    """Return the file system's reason in words; None for an error that is not the file system's."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            number = cause.errno
        else:
            match = _OS_ERROR.search(str(cause))
            number = int(match[1]) if match else None
        full = next((full for full in FULL if full == number or os.strerror(full) in str(cause)), None)
        if full is not None:
            return "disk quota exceeded" if full == errno.EDQUOT else NO_SPACE
        if isinstance(cause, OSError):
            return str(cause.strerror or cause)
        if number is not None:
            return os.strerror(number)
        cause = cause.__cause__
    return None


def disk_message(error: OSError) -> str:
    """Describe what the file system refused, where, and what to do about it."""
    file = error.filename
    if error.errno in FULL:
        return f"{disk_reason(error)}{f' while writing {file}' if file else ''}; free some,"
    return f"{f'{file}: ' if file else ''}{disk_reason(error)}; fix this"


def _free_space(path: Path) -> str:
    """Return ` (N MiB free)`, with the files that can still be made where few can; empty if it cannot be read."""
    try:
        figures = os.statvfs(next(folder for folder in (path, *path.parents) if folder.exists()))
    except (OSError, StopIteration):
        return ""
    few = figures.f_files and figures.f_favail < 100
    files = f", room for {figures.f_favail} more files" if few else ""
    return f" ({figures.f_bavail * figures.f_frsize / 2**20:,.1f} MiB free{files})"


def write_atomic(path: str | Path, content: bytes | str, *, private: bool = False) -> None:
    """Replace a file atomically: a reader, or a power cut, finds the whole old file or the whole new one.

    private: only the owner may read a new file.

    Makes missing parent directories. Follows a link and replaces its target; keeps the mode of an existing file.
    Writes directly into what is not a regular file, such as a pipe. Raises RunError if the disk is full or not
    writable.
    """
    path = Path(path)
    data = _encode(content) if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")

    def write() -> None:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        make_directory(target.parent)
        mode = 0o600 if private else None
        if target.exists():
            mode = stat.S_IMODE(target.stat().st_mode)
        # What is private must be private under its temporary name too.
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else 0o600
        )
        try:
            _write_all(descriptor, data)
            if mode is not None:
                os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, target)
        flush(target.parent)

    attempt(write, path.name, path, leftover=temporary, then=UNTOUCHED)


def open_stream(path: Path) -> TextIO | None:
    """Open what is not a regular file, such as a pipe, to write to it; None for any other path."""
    return open(path, "w", encoding="utf-8") if path.exists() and not path.is_file() else None


def _encode(text: str) -> bytes:
    """Encode as UTF-8, writing lone surrogates, which it lacks, as JSON escapes."""
    return text.encode(errors="backslashreplace")


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def append_line(path: str | Path, line: str, *, durable: bool = False) -> None:
    """Append `line` and a line end in one write; durable: return only when they are on disk.

    First ends a line that a killed process left unfinished. Makes missing parent directories. Raises RunError if the
    disk is full or not writable, leaving no part of the line behind.
    """
    path = Path(path)

    def write() -> None:
        make_directory(path.parent)
        new = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            try:
                _write_all(descriptor, _encode("\n" * torn + line + "\n"))
            except OSError:
                with suppress(OSError):
                    os.ftruncate(descriptor, size)
                raise
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if durable and new:
            flush(path.parent)

    attempt(write, path.name, path)


def make_directory(path: str | Path) -> None:
    """Make a directory and its missing parents, and flush each of them to disk."""
    path = Path(path)
    for directory in reversed([each for each in (path, *path.parents) if not each.is_dir()]):
        directory.mkdir(exist_ok=True)
        flush(directory.parent)


def flush(path: str | Path) -> None:
    """fsync a file or a directory. Raises OSError with its path, which `os.fsync` leaves out."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def flush_lines(path: Path) -> None:
    """Flush a file and its name to disk; do nothing if there is no such file."""

    def write() -> None:
        if path.exists():
            flush(path)
            flush(path.parent)

    attempt(write, path.name, path)


def replace_directory(new: Path, final: Path) -> None:
    """Rename `new` to `final`. An existing directory is moved aside first, put back if that fails, and deleted last."""
    aside = final.with_name(f".{final.name}.replaced")
    replaces = final.exists()
    if replaces:
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(final, aside)
    try:
        os.rename(new, final)
    except OSError:
        if replaces:
            os.rename(aside, final)
        raise
    flush(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def fill_directory(directory: Path, write: Callable[[Path], None], what: str) -> None:
    """Let `write` fill a new or empty directory: afterwards all of it is on disk, or, if it fails, nothing.

    A new directory gets its name only once it is whole. Raises RunError if the disk is full or not writable.
    """
    directory = Path(os.path.realpath(directory))
    # An empty one may be a mount point, which cannot be renamed.
    place = directory if directory.is_dir() else directory.with_name(f".{directory.name}.tmp")

    def fill() -> None:
        if place != directory:
            shutil.rmtree(place, ignore_errors=True)  # left by a call that was killed
        make_directory(place)
        write(place)
        for path in (*place.rglob("*"), place):
            flush(path)
        if place != directory:
            os.rename(place, directory)
        try:
            flush(directory.parent)
        except OSError:
            if place != directory:
                os.rename(directory, place)  # to be deleted with it
            raise

    then = "No partial file is left; fix this and rerun the same command."
    attempt(fill, what, directory, leftover=place, then=then)


def remove(path: Path) -> None:
    """Delete a file, if it is there, and flush the deletion to disk."""
    if path.exists():
        path.unlink(missing_ok=True)
        flush(path.parent)


def remove_leftovers(directory: Path) -> None:
    """Delete temporary files that killed calls of `write_atomic` left directly in a directory."""
    for path in directory.glob(".*.tmp"):
        if _LEFTOVER.fullmatch(path.name) and path.is_file():
            with suppress(OSError):
                path.unlink()


def seal(record: Mapping[str, Any]) -> str:
    """Write `record` as JSON with a checksum, by which `unseal` detects any changed bit."""
    return json.dumps({**record, CHECKSUM: checksum(record)}, indent=2, allow_nan=False) + "\n"


def unseal(content: bytes) -> dict[str, Any]:
    """Read the record that `seal` wrote. Raises ValueError, with the reason, for any other content."""
    try:
        record = json.loads(content)
        if not isinstance(record, dict):
            raise ValueError("it holds no JSON object")
        written = record.pop(CHECKSUM, None)
        if written is None:
            raise ValueError("it has no checksum")
        # Also compared as text: some changes to an escaped character leave its meaning as it was.
        if written != checksum(record) or seal(record).encode() != content:
            raise ValueError("its checksum does not match")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return record


def checksum(record: Mapping[str, Any]) -> str:
    """Hash a record as JSON, whatever the order of its names: 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(record, sort_keys=True, allow_nan=False).encode()).hexdigest()


def require_writable(output: Path | None, source: Path | None = None) -> None:
    """Raise InputError if the output file could not be written, or is its own source, before its rows are computed."""
    if output is None:
        return
    if source is not None and source.exists() and output.is_file() and output.samefile(source):
        raise InputError(f"-o {output}: is the input file; give another file")
    if output.suffix in (".gz", ".zst", ".bz2", ".xz", ".zip"):
        raise InputError(f"-o {output}: the output is not compressed; leave out {output.suffix}")
    there = next(folder for folder in output.absolute().parents if folder.exists())
    if output.is_dir():
        raise InputError(f"-o {output}: is a directory; give a file in it")
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        wrong = "no permission to write to" if there.is_dir() else "not a directory:"
        raise InputError(f"-o {output}: {wrong} {there}; give another file")
