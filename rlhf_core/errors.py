"""The three ways a command ends other than well, each with its exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
