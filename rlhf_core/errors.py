"""The three ways a command ends other than well, each with its exit code."""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path


class InputError(Exception):
    """Bad input or configuration (exit code 2). The message stands alone: what, where, what to type next.

    `problems` holds every problem found at once, one line each.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class RunError(Exception):
    """The run failed for a reason the message explains in full (exit code 1, no traceback)."""


class Stopped(Exception):
    """A signal or time limit ended the run after its state was saved (exit code 75)."""


def near(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the closest of `known`, else an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{match[0]}'?" if match else ""


def near_file(path: Path) -> str:
    """As `near`, of what stands beside a file that is missing; else which directory is missing too."""
    try:
        return near(path.name, [entry.name for entry in path.parent.iterdir()])
    except OSError:
        return f" There is no directory {path.parent} either." if not path.parent.exists() else ""


def raised(error: BaseException, *callers: str) -> str:
    """What a component raised, in one line, with the place in its own code.

    callers: files and directories that it was called from: like Python's and the libraries', none of its own.
    """
    others = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<", *callers)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(others)]
    at = f" ({frames[-1].filename} line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"raised {type(error).__name__}: {text[:300]}{at}"
