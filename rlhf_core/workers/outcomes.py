"""The ways in which a call in a worker process ends other than with a value."""

from __future__ import annotations


class TooSlowError(Exception):
    """The call used up its own limit, of CPU time or of the clock, and its process was ended."""


class DiedError(Exception):
    """The process ended for another reason, on every attempt: no memory, a crash, a signal."""


class RaisedError(Exception):
    """The function raised. The text says what and where; `type_name` is the exception's class."""

    def __init__(self, text: str, type_name: str = "") -> None:
        super().__init__(text)
        self.type_name = type_name


class UnsendableError(Exception):
    """The function cannot be found again in another process. The text says why."""
