"""Why a job of several processes ends, and with which exit code."""

from __future__ import annotations

from rlhf_core.errors import InputError, Stopped
from rlhf_core.runtime import signals

_CODES = (1, 2, 75)


def code_of(error: BaseException) -> int:
    """The exit code that tells how a run ended."""
    if isinstance(error, InputError):
        return 2
    return 75 if isinstance(error, Stopped) else 1


class Cause:
    """Why the job ends: the process it began with, the exit code of all, and whether that process could not say why.

    run: which of that process's runs it was, counted from 1; 0 before the first.
    """

    def __init__(self, process: int, code: int, run: int = 0, *, killed: bool = False) -> None:
        self.process, self.run, self.killed = process, run, killed
        self.code = code if code in _CODES else 1
        if killed and signals.stop_requested():
            self.code = 75

    def line(self, me: int, count: int) -> str:
        """Say it, as process `me`."""
        how = "stopped by a signal" if self.code == 75 else "failed, and says why"
        how = "is gone without a word: killed, crashed or unreachable" if self.killed else how
        rest = "; the same command goes on from the newest checkpoint" if self.killed else ""
        return f"process {me} of {count} ends: process {self.process} {how}{rest}"
