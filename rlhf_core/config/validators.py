"""Parse and check the values of configuration fields beyond what their types do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rlhf_core.config.problems import format_value
from rlhf_core.tokenizer.options import kwargs_problem, parse_date

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}


def to_seconds(value: Any) -> Any:
    """Parse a duration such as "2h30m", "1d" or "45s" into seconds; leave a number as it is."""
    if not isinstance(value, str):
        return value
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([dhms])", value.lower())
    if not parts or re.sub(r"(\d+(?:\.\d+)?)\s*([dhms])", "", value.lower()).strip():
        raise ValueError(
            f"expected seconds or a duration such as '2h30m', '1d' or '45s', got {format_value(value)}"
        )
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def constant(value: Any) -> Any:
    """Read none as constant, which is what EasyDeL calls it."""
    return "constant" if value is None or value == "none" else value


def check_kwargs(value: dict[str, Any]) -> dict[str, Any]:
    if problem := kwargs_problem(value):
        raise ValueError(problem)
    return value


def check_day(value: str) -> str:
    try:
        parse_date(value)
    except ValueError:
        raise ValueError(f"{format_value(value)} is not a day such as '2026-01-31'") from None
    return value


def path_text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def check_regex(value: str | list[str]) -> str | list[str]:
    for pattern in [value] if isinstance(value, str) else value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{format_value(pattern)} is not a regular expression: {error}") from None
    return value
