"""Call a reward function in a worker process, and make plain numbers of what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from rlhf_core.hidden import scrub
from rlhf_core.workers import awaited, run_async

SHOWN = 200
"""Characters of a wrong value to show."""


@dataclass(frozen=True)
class NotNumeric:
    """A value that is no number, or that is no list of them, as messages name it."""

    type_name: str
    text: str = ""


@dataclass(frozen=True)
class WorkerCall:
    """Call a function and return its values as plain numbers.

    The values' own code, which converting and unpickling them would run, stays within the time limit of the call.
    """

    function: Any

    def __call__(self, **arguments: Any) -> list[float | NotNumeric | None] | NotNumeric:
        values = self.function(**arguments)
        if inspect.isawaitable(values):
            values = run_async(awaited(values))  # on the loop of the calls before
        return plain_values(values)


def plain_values(values: Any) -> list[float | NotNumeric | None] | NotNumeric:
    """Convert what a function returned to numbers, None where it does not apply; never raises for a wrong type."""
    if isinstance(values, NotNumeric):
        return values
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str | bytes | bytearray | Mapping | Set) or not isinstance(values, Iterable):
        return NotNumeric(type(values).__name__)
    return [_plain_value(value) for value in values]


def _plain_value(value: Any) -> float | NotNumeric | None:
    if value is None or isinstance(value, NotNumeric):
        return value
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        text = scrub(repr(value))
        return NotNumeric(
            type(value).__name__,
            text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text):,} characters)",
        )
