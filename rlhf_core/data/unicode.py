"""Half surrogates: what JSON's escapes can write and no text may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.tokenizer.text_options import text_problem as text_problem


def bad_text(row: Mapping[Any, Any]) -> str | None:
    """The first column that holds such a text, at any depth, and what is wrong with it; None where none does."""
    for name, value in row.items():
        if isinstance(name, str) and (problem := text_problem(name)):
            return f"the name of column {name!r} {problem}"
        if problem := _within(value):
            return f"'{name}' {problem}"
    return None


def _within(value: Any) -> str | None:
    if isinstance(value, str):
        return text_problem(value)
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        return next((problem for problem in map(_within, value) if problem), None)
    return None
