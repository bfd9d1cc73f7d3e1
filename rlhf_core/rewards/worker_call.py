"""Call a reward function in a worker process, and make plain numbers of what it returns."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from rlhf_core.hidden import scrub
from rlhf_core.workers import awaited, run_async

MEASURED = ("mean", "std", "failed", "unscored")
"""Last parts of the names of metrics that are measured of every reward."""
LONGEST = 200
"""Characters of a wrong value to show."""


@dataclass(frozen=True)
class NotNumeric:
    """A value that is no number, or that is no list of them, as messages name it."""

    type_name: str
    text: str = ""


class MetricLog:
    """The argument `log_metric` of a call: collects the metrics that a reward logs, {name: values}."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def __call__(self, name: str, value: Any) -> None:
        """Keep a value. Raises ValueError for a name that every reward's metrics have, and for what is no number."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"log_metric({name!r}, …): the name of a metric is a text")
        if name.rpartition("/")[2] in MEASURED:
            raise ValueError(f"log_metric({name!r}, …): this is measured of every reward; give another name")
        try:
            number = float("nan" if isinstance(value, str | bytes | bytearray) else value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}, {value!r}): the value of a metric is a finite number")
        self.values.setdefault(scrub(name), []).append(number)


@dataclass(frozen=True)
class WorkerCall:
    """Call a function and return its values as plain numbers, with the metrics that it logs.

    The values' own code, which converting and unpickling them would run, stays within the time limit of the call.
    logs: whether the function takes `log_metric`.
    """

    function: Any
    logs: bool = False

    def __call__(
        self, **arguments: Any
    ) -> tuple[list[float | NotNumeric | None] | NotNumeric, dict[str, list[float]]]:
        log = MetricLog()
        values = self.function(**arguments, **({"log_metric": log} if self.logs else {}))
        if inspect.isawaitable(values):
            values = run_async(awaited(values))  # on the loop of the calls before
        return plain_values(values), log.values


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
            text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} characters)",
        )
