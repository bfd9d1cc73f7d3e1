"""Durations, in seconds or in words such as "2h30m"."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

from rlhf_core.config.options import format_value

_UNITS = {
    "d day days": 86400.0,
    "h hr hrs hour hours": 3600.0,
    "m min mins minute minutes": 60.0,
    "s sec secs second seconds": 1.0,
}
_SECONDS = {name: seconds for names, seconds in _UNITS.items() for name in names.split()}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+),?\s*")


def to_seconds(value: Any) -> Any:
    """Parse a duration such as "2h30m", "90 min" or "45s" into seconds; leave a number unchanged."""
    if not isinstance(value, str):
        return value
    parts = [(float(number), _SECONDS.get(unit)) for number, unit in _PART.findall(value.lower())]
    if not parts or _PART.sub("", value.lower()) or any(seconds is None for _, seconds in parts):
        raise ValueError(
            f"expected seconds or a duration such as '2h30m', '1d' or '45s', got {format_value(value)}"
        )
    return sum(number * (seconds or 0.0) for number, seconds in parts)


def to_minutes(value: Any) -> Any:
    """Parse a duration as `to_seconds` does, into minutes; leave a number unchanged."""
    return to_seconds(value) / 60.0 if isinstance(value, str) else value


Seconds = Annotated[float, BeforeValidator(to_seconds)]
"""A number of seconds, or a text such as "90 min"."""
Minutes = Annotated[float, BeforeValidator(to_minutes)]
"""A number of minutes, or a text such as "90 min"."""
