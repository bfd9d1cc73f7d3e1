"""Files and directories that survive a power cut, whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_core.errors import InputError
from rlhf_core.runtime.disk_errors import GOES_ON, attempt

CHECKSUM = "checksum"
UNTOUCHED = "What was there before is untouched; mend that and give the same command again."
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


def write_atomic(path: str | Path, content: bytes | str, *, private: bool = False) -> None:
    """Write a file so that a reader, or a power cut, finds the whole of the old or of the new one.

    private: a new file is its owner's alone to read.

    Makes missing parent directories. A link stays, and what it points to is replaced; a file that is there keeps its
    mode and owner. What is no regular file, such as a pipe or /dev/stdout, is written to. Raises RunError where the
    disk is full or not writable.
    """
    path = Path(path)
    data = _bytes(content) if isinstance(content, str) else content
    # Cut: a name may have 255 bytes.
    name = path.name.encode()[:100].decode(errors="ignore")
    beside = Path(os.path.realpath(path)).with_name(f".{name}.{secrets.token_hex(4)}.tmp")

    def write() -> None:
        try:
            before = os.stat(path)
        except FileNotFoundError:
            before = None
        if before is not None and (stream := _open_already(before)) is not None:
            sys.stdout.flush()
            _write_all(stream, data)
        elif before is not None and not stat.S_ISREG(before.st_mode):
            with open(path, "wb", buffering=0) as file:
                _write_all(file.fileno(), data)
        else:
            _replace(beside, Path(os.path.realpath(path)), data, before, private)

    attempt(write, path.name, path, leftover=beside, then=UNTOUCHED)


def _replace(beside: Path, target: Path, data: bytes, before: os.stat_result | None, private: bool) -> None:
    make_directory(target.parent)
    # A file that others may not read is never there for them, not even under its other name.
    mode = 0o666 if before is None and not private else 0o600
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        _write_all(descriptor, data)
        if before is not None:
            with suppress(PermissionError):
                os.fchown(descriptor, before.st_uid, before.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(beside, target)
    flush(target.parent)


def _open_already(file: os.stat_result) -> int | None:
    """The descriptor of this process's stdout or stderr where `file` is one of them."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), file):
                return descriptor
    return None


def _bytes(text: str) -> bytes:
    """UTF-8, which has no lone surrogates: they become what JSON writes for them."""
    return text.encode(errors="backslashreplace")


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def append_line(path: str | Path, line: str, *, durable: bool = False) -> None:
    """Append `line` and its end in one write; durable: it is on the disk when this returns.

    A line that a killed process tore is ended first. Makes missing parent directories. Raises RunError where the disk
    is full or not writable, with nothing of the line left behind.
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
                _write_all(descriptor, _bytes("\n" * torn + line + "\n"))
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

    attempt(write, path.name, path, then=GOES_ON)


def make_directory(path: str | Path) -> None:
    """Make a directory and its missing parents, each of them on the disk when this returns."""
    path = Path(path)
    missing: list[Path] = []
    for each in (path, *path.parents):
        if each.is_dir():
            break
        missing.append(each)
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        flush(each.parent)


def flush(path: str | Path) -> None:
    """fsync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_lines(path: Path) -> None:
    """Bring what was appended to a file, and its name, to the disk; nothing where there is no such file."""

    def write() -> None:
        if path.exists():
            flush(path)
            flush(path.parent)

    attempt(write, path.name, path)


def flush_tree(directory: Path) -> None:
    """fsync every file and directory below `directory`, itself included, and its name."""
    for path in directory.rglob("*"):
        flush(path)
    flush(directory)
    flush(directory.parent)


def replace_directory(new: Path, final: Path) -> None:
    """Rename `new` to `final`. A directory that is there already is moved aside first and deleted last."""
    aside = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(aside, ignore_errors=True)
    if final.exists():
        os.rename(final, aside)
    os.rename(new, final)
    flush(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def fill_directory(directory: Path, write: Callable[[Path], None], what: str) -> None:
    """Let `write` fill a new or an empty directory: all of it is on the disk then, or, where that fails, nothing.

    A new one has its name only when it is whole. Raises RunError where the disk is full or not writable.
    """
    directory = Path(os.path.realpath(directory))
    empty = directory.is_dir()  # perhaps where a disk is mounted, so it stays
    name = directory.name.encode()[:100].decode(errors="ignore")
    place = directory if empty else directory.with_name(f".{name}.{secrets.token_hex(4)}.tmp")

    def fill() -> None:
        make_directory(place)
        write(place)
        flush_tree(place)
        if not empty:
            os.rename(place, directory)
            flush(directory.parent)

    then = "Nothing of it is left there; mend that and give the same command again."
    try:
        attempt(fill, what, directory, leftover=None if empty else place, then=then)
    except BaseException:
        for path in directory.iterdir() if empty else ():
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def remove(path: Path) -> None:
    """Delete a file for good, one that is not there too."""
    if path.exists():
        path.unlink(missing_ok=True)
        flush(path.parent)


def remove_leftovers(directory: Path) -> None:
    """Delete what `write_atomic` left in a directory, not below it, in processes that were killed."""
    with suppress(OSError):
        for path in directory.iterdir():
            if _LEFTOVER.fullmatch(path.name) and path.is_file():
                with suppress(OSError):
                    path.unlink()


def seal(record: Mapping[str, Any]) -> str:
    """The text of a JSON file that holds `record` and a checksum of it, by which `unseal` finds any changed bit."""
    return _text({**record, CHECKSUM: _checksum(record)})


def unseal(content: bytes) -> dict[str, Any]:
    """The record in what `seal` made. Raises ValueError, with the reason, for content that is not that."""
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    said = found.pop(CHECKSUM, None)
    if said is None:
        raise ValueError("it has no checksum")
    # Compared as text too: some changes of an escaped character leave its meaning.
    if said != _checksum(found) or _text({**found, CHECKSUM: said}).encode() != content:
        raise ValueError("its checksum is of other content")
    return found


def _checksum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=2, allow_nan=False) + "\n"


def require_writable(output: Path | None) -> None:
    """Raise InputError where the rows could not be written, before they are computed."""
    if output is None:
        return
    there = next(folder for folder in output.absolute().parents if folder.exists())
    if output.is_dir():
        raise InputError(f"-o {output}: is a directory; give the file to write in it")
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        wrong = "no permission to write to" if there.is_dir() else "not a directory:"
        raise InputError(f"-o {output}: {wrong} {there}; give another file")
