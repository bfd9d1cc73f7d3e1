"""Problems of a configuration, as lines: where, what was wrong, what to type instead."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from rlhf_core.errors import InputError, suggest

MOST_LISTED = 25
"""Known names that a message lists."""


class Problem(NamedTuple):
    """path: dotted, such as `rewards[0].weight`. message: the rest of the line. fatal: False for a warning."""

    path: str
    message: str
    fatal: bool = True


def problem_lines(problems: Iterable[Problem], where: str) -> list[str]:
    """Write one line per problem, `where.path: message`, dropping duplicates."""
    return list(dict.fromkeys(f"{join(where, path)}: {message}" for path, message, _ in problems))


def raise_or_warn(problems: Sequence[Problem], where: str) -> None:
    """Raise InputError with every fatal problem; if there is none, warn of each of the others."""
    fatal = [problem for problem in problems if problem.fatal]
    if fatal:
        raise InputError(*problem_lines(fatal, where))
    for line in problem_lines(problems, where):
        warnings.warn(line, stacklevel=3)


def join(path: str, key: str | int) -> str:
    """Extend a dotted path: `a` and `b` give `a.b`, `a` and 0 give `a[0]`; an empty side changes nothing."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path and key else path or key


def format_value(value: Any) -> str:
    """Write a value as a file would, cut to 60 characters."""
    text = str(value).lower() if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def unknown_name(name: str, known: Iterable[str], what: str) -> str:
    """Write `unknown WHAT.` with the closest known name, or with all of them, of many the nearest, if none is close."""
    names = sorted(set(known))
    if hint := suggest(name, names):
        return f"unknown {what}.{hint}"
    if len(names) > MOST_LISTED:
        nearest = get_close_matches(name, names, 5, 0.0)
        return f"unknown {what}. Nearest of {len(names)}: {', '.join(nearest)}."
    return f"unknown {what}." + (f" Known: {', '.join(names)}." if names else " It has none.")
