"""Call a reward function, and check what it returns. Worker processes import this module: it does not import jax."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

from rlhf_core.contracts import LARGEST_REWARD
from rlhf_core.errors import RunError, counted
from rlhf_core.hidden import scrub
from rlhf_core.workers.event_loop import awaited, run_async

LOG = "log_metric"
"""The argument that logs a metric; `**columns` does not get it."""
MEASURED = ("mean", "std", "failed", "unscored")
"""Last parts of the names of metrics that are measured of every reward."""
LONGEST = 200
"""Characters of a wrong value to show."""
Scored: TypeAlias = tuple[list[float | None], dict[str, list[float]]]
"""Values of completions, None where a reward does not apply, and {metric: the values that were logged}."""


class MetricLog:
    """The argument `log_metric` of a call: collects the metrics that a reward logs, {name: values}."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def __call__(self, name: str, value: Any) -> None:
        """Keep a value. Raises ValueError for a name that every reward's metrics have, and for what is no number."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"log_metric({name!r}, …): the name of a metric must be text")
        if name.rpartition("/")[2] in MEASURED:
            raise ValueError(
                f"log_metric({name!r}, …): this is reported for every reward; choose another name"
            )
        try:
            number = float("nan" if isinstance(value, str | bytes | bytearray) else value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(
                f"log_metric({name!r}, {value!r}): the value of a metric must be a finite number"
            )
        self.values.setdefault(scrub(name), []).append(number)


@dataclass(frozen=True)
class RewardCall:
    """A reward function, as it is called here or in a worker process.

    What it returns is checked where it is called: its own code, run by converting it, has the call's time limit.
    name: as messages begin. logs: whether the function takes `log_metric`.
    """

    function: Any
    name: str
    logs: bool = False

    def __call__(self, arguments: Mapping[str, Any], count: int) -> Scored:
        """Return the checked values of `count` completions, and the metrics that were logged."""
        log = MetricLog()
        values = self.function(**arguments, **({LOG: log} if self.logs else {}))
        if inspect.isawaitable(values):
            values = run_async(awaited(values))  # on the loop of the calls before
        return checked_values(self.name, values, count), log.values

    async def on_loop(self, arguments: Mapping[str, Any], count: int) -> Scored:
        """Do the same for an asynchronous function."""
        log = MetricLog()
        values = self.function(**arguments, **({LOG: log} if self.logs else {}))
        return checked_values(self.name, await awaited(values), count), log.values


def checked_values(reward: str, values: Any, count: int) -> list[float | None]:
    """Convert what a function returned to numbers, None where it does not apply; NaN stays.

    reward: as messages name it. Raises RunError for anything but a list of `count` finite numbers, NaNs and Nones.
    """
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str | bytes | bytearray | Mapping | Set) or not isinstance(values, Iterable):
        raise RunError(
            f"{reward} returned {type(values).__name__}; it must return a list of {count} numbers, one per "
            "completion"
        )
    values = list(values)
    if len(values) != count:
        raise RunError(
            f"{reward} returned {counted(len(values), 'values')} for {count} completions; it must return one "
            "each, None where it does not apply"
        )
    return [_checked_value(reward, value, i) for i, value in enumerate(values)]


def _checked_value(reward: str, value: Any, completion: int) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        text = scrub(repr(value))
        shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} characters)"
        raise RunError(
            f"{reward} returned {shown} for completion {completion}; expected a number or None"
        ) from None
    if abs(number) > LARGEST_REWARD:
        raise RunError(
            f"{reward} returned {number} for completion {completion}; rewards must be finite (float32, at most "
            f"{LARGEST_REWARD:.3g}), None where it does not apply"
        )
    return number
