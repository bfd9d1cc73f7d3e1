"""What a field of a config takes beside its type, and what is wrong with the rest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rlhf_core.config.problems import format_value
from rlhf_core.tokenizer.template_dates import parse_date
from rlhf_core.tokenizer.text_options import kwargs_problem

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}


def seconds(given: Any) -> Any:
    """A duration such as "2h30m", "1d" or "45s"; a plain number is in seconds."""
    if not isinstance(given, str):
        return given
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([dhms])", given.lower())
    if not parts or re.sub(r"(\d+(?:\.\d+)?)\s*([dhms])", "", given.lower()).strip():
        raise ValueError(
            f"expected seconds or a duration such as '2h30m', '1d' or '45s', got {format_value(given)}"
        )
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def constant(given: Any) -> Any:
    """EasyDeL's word for a constant learning rate is none."""
    return "constant" if given is None or given == "none" else given


def template_kwargs(given: dict[str, Any]) -> dict[str, Any]:
    if problem := kwargs_problem(given):
        raise ValueError(problem)
    return given


def day(given: str) -> str:
    try:
        parse_date(given)
    except ValueError:
        raise ValueError(f"{format_value(given)} is not a day such as '2026-01-31'") from None
    return given


def text(given: Any) -> Any:
    return str(given) if isinstance(given, Path) else given


def patterns(given: str | list[str]) -> str | list[str]:
    for pattern in [given] if isinstance(given, str) else given:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{format_value(pattern)} is not a regular expression: {error}") from None
    return given
