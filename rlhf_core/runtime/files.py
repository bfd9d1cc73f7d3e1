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
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rlhf_core.errors import InputError, RunError

T = TypeVar("T")
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
DISK = FULL | {errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}
"""Errors with which a file system refuses any write."""
INTACT = "Existing files are intact; rerun the same command to resume."
UNTOUCHED = "What was there before is untouched; fix that and rerun the same command."
NO_SPACE = "no space left on the disk"
CHECKSUM = "checksum"
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # tensorstore raises ValueError for everything


def attempt(
    write: Callable[[], T], what: str, path: Path, *, leftover: Path | None = None, then: str = INTACT
) -> T:
    """Call `write`; if it fails, delete `leftover`, and raise RunError if the file system is to blame.

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
        if reason is None:
            raise
        elsewhere = _file_elsewhere(error, path, leftover or path)
        raise RunError(f"{what} could not be written to {path}: {reason}{elsewhere}. {then}") from error


def disk_reason(error: BaseException) -> str | None:
    """Return the file system's reason in words; None for an error that is not the file system's."""
    for cause in _walk_causes(error):
        match = _OS_ERROR.search(str(cause))
        number = cause.errno if isinstance(cause, OSError) else int(match[1]) if match else None
        full = next((full for full in FULL if full == number or os.strerror(full) in str(cause)), None)
        if full is not None:
            return "disk quota exceeded" if full == errno.EDQUOT else NO_SPACE
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
    return f"{f'{file}: ' if file else ''}{disk_reason(error)}; fix that"


def _walk_causes(error: BaseException) -> Iterator[BaseException]:
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__


def _file_elsewhere(error: BaseException, *places: Path) -> str:
    """Return ` (FILE)` for the file that failed; empty if it is unknown, or above, at or below one of the places."""
    names = [each.filename for each in _walk_causes(error) if isinstance(each, OSError) and each.filename]
    file = Path(os.fsdecode(names[0])) if names and not isinstance(names[0], int) else None
    if file is None or any(place in (file, *file.parents) or file in place.parents for place in places):
        return ""
    return f" ({file})"


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

    Makes missing parent directories. Follows a link and replaces its target; keeps the mode and owner of an existing
    file. Writes directly into what is not a regular file, such as a pipe or /dev/stdout. Raises RunError if the disk is
    full or not writable.
    """
    path = Path(path)
    data = _encode(content) if isinstance(content, str) else content
    name = path.name.encode()[:100].decode(errors="ignore")  # a name may have 255
    temporary = Path(os.path.realpath(path)).with_name(f".{name}.{secrets.token_hex(4)}.tmp")

    def write() -> None:
        try:
            before = os.stat(path)
        except FileNotFoundError:
            before = None
        if before is not None and (stream := _standard_stream(before)) is not None:
            sys.stdout.flush()
            _write_all(stream, data)
        elif before is not None and not stat.S_ISREG(before.st_mode):
            with open(path, "wb", buffering=0) as file:
                _write_all(file.fileno(), data)
        else:
            _replace(temporary, Path(os.path.realpath(path)), data, before, private)

    attempt(write, path.name, path, leftover=temporary, then=UNTOUCHED)


def _replace(
    temporary: Path, target: Path, data: bytes, before: os.stat_result | None, private: bool
) -> None:
    make_directory(target.parent)
    # A private file must be private under its temporary name too.
    mode = 0o666 if before is None and not private else 0o600
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        _write_all(descriptor, data)
        if before is not None:
            with suppress(PermissionError):
                os.fchown(descriptor, before.st_uid, before.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, target)
    flush(target.parent)


def open_stream(path: Path) -> TextIO | None:
    """Open what is not a regular file, such as a pipe or /dev/stdout, to write to it; None for any other path."""
    if not path.exists():
        return None
    status = os.stat(path)
    if (stream := _standard_stream(status)) is not None:
        sys.stdout.flush()
        return open(os.dup(stream), "w", encoding="utf-8")
    return None if stat.S_ISREG(status.st_mode) else open(path, "w", encoding="utf-8")


def _standard_stream(file: os.stat_result) -> int | None:
    """Return the descriptor of this process's stdout or stderr if `file` is one of them, else None."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), file):
                return descriptor
    return None


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

    attempt(write, path.name, path, then=INTACT)


def make_directory(path: str | Path) -> None:
    """Make a directory and its missing parents, and flush each of them to disk."""
    path = Path(path)
    missing: list[Path] = []
    for directory in (path, *path.parents):
        if directory.is_dir():
            break
        missing.append(directory)
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        flush(directory.parent)


def flush_names(directory: Path) -> None:
    """Flush the names of a directory and of its parents, which a process killed just after making them did not."""
    for parent in directory.absolute().parents:
        with suppress(
            OSError
        ):  # most were there long before, perhaps where this user, or a file system, cannot flush
            flush(parent)


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


def flush_tree(directory: Path) -> None:
    """Flush every file and directory below `directory`, the directory itself and its name to disk."""
    for path in directory.rglob("*"):
        flush(path)
    flush(directory)
    flush(directory.parent)


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
    empty = directory.is_dir()  # perhaps a mount point, so it stays
    name = directory.name.encode()[:100].decode(errors="ignore")
    place = directory if empty else directory.with_name(f".{name}.{secrets.token_hex(4)}.tmp")

    def fill() -> None:
        if not empty:
            _remove_killed(directory.parent, name)
        make_directory(place)
        write(place)
        flush_tree(place)
        if not empty:
            os.rename(place, directory)
            try:
                flush(directory.parent)
            except OSError:
                os.rename(directory, place)  # to be deleted with it
                raise

    then = "Nothing of it is left there; fix that and rerun the same command."
    try:
        attempt(fill, what, directory, leftover=None if empty else place, then=then)
    except BaseException:
        for path in directory.iterdir() if empty else ():
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def _remove_killed(parent: Path, name: str) -> None:
    """Delete the directories that killed calls of `fill_directory` left for this name."""
    killed = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{8}}\.tmp")
    for path in parent.iterdir() if parent.is_dir() else ():
        if killed.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a file, if it is there, and flush the deletion to disk."""
    if path.exists():
        path.unlink(missing_ok=True)
        flush(path.parent)


def remove_leftovers(directory: Path) -> None:
    """Delete temporary files that killed calls of `write_atomic` left directly in a directory."""
    with suppress(OSError):
        for path in directory.iterdir():
            if _LEFTOVER.fullmatch(path.name) and path.is_file():
                with suppress(OSError):
                    path.unlink()


def seal(record: Mapping[str, Any]) -> str:
    """Write `record` as JSON with a checksum, by which `unseal` detects any changed bit."""
    return _to_json({**record, CHECKSUM: _checksum(record)})


def unseal(content: bytes) -> dict[str, Any]:
    """Read the record that `seal` wrote. Raises ValueError, with the reason, for any other content."""
    try:
        record = json.loads(content)
        if not isinstance(record, dict):
            raise ValueError("it holds no JSON object")
        checksum = record.pop(CHECKSUM, None)
        if checksum is None:
            raise ValueError("it has no checksum")
        # Also compared as text: some changes to an escaped character leave its meaning as it was.
        if checksum != _checksum(record) or _to_json({**record, CHECKSUM: checksum}).encode() != content:
            raise ValueError("its checksum is of other content")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return record


def _checksum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _to_json(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=2, allow_nan=False) + "\n"


def require_writable(output: Path | None, source: Path | None = None) -> None:
    """Raise InputError if the output file could not be written, or is its own source, before its rows are computed."""
    if output is None:
        return
    if source is not None and source.exists() and output.is_file() and output.samefile(source):
        raise InputError(f"-o {output}: is the file that is read; give another file")
    if output.suffix in (".gz", ".zst", ".bz2", ".xz", ".zip"):
        raise InputError(f"-o {output}: what is written is not compressed; leave out {output.suffix}")
    there = next(folder for folder in output.absolute().parents if folder.exists())
    if output.is_dir():
        raise InputError(f"-o {output}: is a directory; give the file to write in it")
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        wrong = "no permission to write to" if there.is_dir() else "not a directory:"
        raise InputError(f"-o {output}: {wrong} {there}; give another file")
