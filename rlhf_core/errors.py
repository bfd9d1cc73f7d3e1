"""Exceptions that end a command, each with its exit code, and the wording of their messages."""

from __future__ import annotations

import difflib
import errno
import functools
import inspect
import json
import os
import sys
import sysconfig
import textwrap
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rlhf_core.hidden import scrub

BETWEEN = ("flax", "jax", "jaxlib", "numpy", "optax", "pluggy", "pydantic")
"""Libraries that call components, whose frames are therefore not a component's own."""

LONGEST_NAME = 1000
"""Characters of a name that others are compared with, which takes memory and time for each."""

MOST_BYTES = 2**28
"""Bytes of a file that is read as a whole."""

SHOWN = 5
"""Rows or problems that a message lists; it counts the others."""

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading a damaged JSON file raises where its fields are used unchecked: for files that can be done without."""


_INSIDE = (*BETWEEN, "concurrent", "contextlib", "functools", "threading")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of something, with the line outside the suite that led here as its place; without one, the caller's."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None:
        top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if not top.startswith("rlhf_") and top not in _INSIDE:
            break
        level = level + 1
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=2 if frame is None else level)


class InputError(Exception):
    """Bad input or configuration (exit code 2). The message stands alone: what, where, what to type next.

    `problems` holds every problem that was found, one line each.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Damaged(InputError):
    """A file of a run that cannot be read, or does not hold what was written to it.

    path: of the file. why: what is wrong with it. fix: what to do. lines: of a file of rows, how many are damaged.
    """

    def __init__(
        self, path: Path, why: str, fix: str = "restore it, or delete it", *, lines: int = 0
    ) -> None:
        super().__init__(f"{path} is damaged ({why}): {fix}")
        self.path, self.why, self.lines = path, why, lines


class RunError(Exception):
    """The run failed for a reason the message explains in full (exit code 1, no traceback)."""


class SequenceError(RunError):
    """What was computed from one of several sequences is wrong. sequence: its number."""

    def __init__(self, message: str, sequence: int) -> None:
        super().__init__(message)
        self.sequence = sequence


class NonFiniteError(SequenceError):
    """An output of a model is not finite. sequence: the number of the one that it was computed from."""


class Stopped(Exception):
    """A signal or time limit ended the run after its state was saved (exit code 75)."""


@contextmanager
def collected(problems: list[str], where: str = "") -> Iterator[None]:
    """Add the problems of an InputError raised in the block to `problems`, behind `where`, and continue after it."""
    try:
        yield
    except InputError as error:
        problems += [f"{where}{problem}" for problem in error.problems]


def counted(number: int, nouns: str) -> str:
    """Return a number and what it counts: `1 prompt`, `1,234 prompts`. nouns: in the plural, which ends in an s."""
    return f"{number:,} {nouns.removesuffix('s') if number == 1 else nouns}"


def suggest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ` Did you mean 'x'?` for the closest name in `known`, or an empty string if none is close."""
    if len(name) > LONGEST_NAME:
        return ""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean '{match[0]}'?" if match else ""


def suggest_file(path: Path) -> str:
    """Suggest the closest name in the directory of a missing file, or report that its directory is missing too."""
    try:
        return suggest(path.name, [entry.name for entry in path.parent.iterdir()])
    except OSError:
        return f" There is no directory {path.parent} either." if not exists(path.parent) else ""


def suggest_model(directory: Path) -> str:
    """Name the model below a directory that is none itself, such as that of a stage or a run; "" if none is found."""
    files = ("config.json", "adapter_config.json")
    models = [
        path
        for pattern in ("*", "artifacts/*", "*/artifacts/*")
        for path in sorted(directory.glob(pattern))
        if any((path / name).is_file() for name in files)
    ]
    if not models:
        return ""
    more = f" (or {', '.join(map(str, models[1:4]))})" if len(models) > 1 else ""
    return f" Did you mean {models[0]}?{more}"


def name_too_long(error: OSError) -> str:
    """Describe an error of number ENAMETOOLONG: a file's name that no disk takes, often a text in a path's place."""
    name = str(error.filename)
    return f"{name[:80]}…: is too long to be the name of a file ({len(name):,} characters)"


def exists(path: Path) -> bool:
    """Check whether there is a file or directory at `path`.

    Returns False where `Path.exists` raises: for a path that is too long or has a NUL byte.
    """
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def disk_full(error: BaseException) -> bool:
    """Check whether the disk was full, which no component is to blame for; the command reports it."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def said_by(error: BaseException) -> str:
    """Return an exception's text; "" where its own code for that fails."""
    try:
        return str(error)
    except Exception:
        return ""


def error_line(error: BaseException, *callers: str) -> str:
    """Describe in one line what a component raised, with its `code_location`."""
    text = textwrap.shorten(scrub(said_by(error)), 300, placeholder=" …")
    return f"raised {type(error).__name__}{f': {text}' if text else ''}{code_location(error, *callers)}"


def defined_at(function: Any) -> str:
    """Return ` (FILE line N)`, where a function or an object's class is defined, or an empty string if not known."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        code = inspect.unwrap(function if hasattr(function, "__qualname__") else type(function))
        return f" ({inspect.getsourcefile(code)} line {inspect.getsourcelines(code)[1]})"
    except (OSError, TypeError, ValueError):
        return ""


def code_location(error: BaseException, *callers: str) -> str:
    """Return ` (FILE line N)`, the place in a component's own code that raised, or an empty string if none did.

    callers: files and directories that called the component, which do not count as its own code.
    """
    site = os.path.join(sysconfig.get_path("purelib"), "")
    python = sysconfig.get_path("stdlib")
    foreign = ("<", *callers, *(os.path.join(site, name) for name in BETWEEN))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(foreign)
        and (frame.filename.startswith(site) or not frame.filename.startswith(python))
    ]
    local = [frame for frame in frames if not frame.filename.startswith(site)]
    if frames and not local:  # the component is installed, as are the libraries it calls
        package = Path(frames[0].filename).relative_to(site).parts[0]
        local = [frame for frame in frames if Path(frame.filename).relative_to(site).parts[0] == package]
    return f" ({local[-1].filename} line {local[-1].lineno})" if local else ""


@contextmanager
def reading(file: str | Path, fix: str = "") -> Iterator[None]:
    """Turn any error of a library that reads a user's file into one InputError that names the file.

    fix: what to do about it, appended after "; ". InputError, Stopped, KeyboardInterrupt and SystemExit pass unchanged.
    """
    try:
        yield
    except (InputError, Stopped):
        raise
    except FileNotFoundError as error:
        raise InputError(f"{file}: no such file{f'; {fix}' if fix else ''}") from error
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise InputError(
            f"{file}: cannot be read: {library_words(error)}{f'; {fix}' if fix else ''}"
        ) from error


def is_library_error(error: BaseException) -> bool:
    """Check that a library raised this, not Ctrl-C or an exit. Rust panics are not an Exception: go by their name."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def read_limited(file: str | Path, most: int = MOST_BYTES) -> bytes:
    """Read a file that people or the suite write, and that is small. Raises ValueError where it is not."""
    with open(file, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        content = opened.read(size + 1) if size <= most else b""
        if len(content) > size:  # it grows, or has no size, as a pipe
            content += opened.read(most + 1 - len(content))
    if max(size, len(content)) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content


def limited_lines(file: str | Path) -> Iterator[bytes]:
    """Read a file line by line, their ends included. Raises ValueError for a line that no row needs."""
    with open(file, "rb") as opened:
        while line := opened.readline(MOST_BYTES + 1):
            if len(line) > MOST_BYTES:
                raise ValueError(f"it has a line of more than {MOST_BYTES:,} bytes")
            yield line


def read_json_object(file: str | Path, fix: str = "") -> dict[str, Any]:
    """Read the object in a user's JSON file. Raises InputError, naming the file, if it holds anything else."""
    with reading(file, fix):
        content = json.loads(read_limited(file))
    if not isinstance(content, dict):
        raise InputError(f"{file}: must hold a JSON object{f'; {fix}' if fix else ''}")
    return content


def library_words(error: BaseException) -> str:
    """Return the first line of a library's error, reworded where the library gives no readable text."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return (
            f"not valid JSON: {error}" if isinstance(error, json.JSONDecodeError) else "it is not UTF-8 text"
        )
    if isinstance(error, UnicodeEncodeError):
        return "a text in it has an unpaired surrogate"
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, TypeError | AttributeError):
        return "it is not of the expected form"
    if "integer string conversion" in str(error):
        return "a number in it has thousands of digits"
    lines = scrub(str(error)).strip().splitlines()
    return textwrap.shorten(lines[0], 300, placeholder=" …") if lines else type(error).__name__
