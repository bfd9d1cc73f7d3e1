"""Check rows that list the chosen and the rejected completions of a prompt, as best-of-n benchmarks do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

import rlhf_core.data.columns as cells
from rlhf_core.data.table import Table

SIDES = ("chosen", "rejected")


def completion_lists(table: Table) -> Literal["texts", "conversations"] | None:
    """Say what lists of completions hold; None for pairs, in which a list is one conversation's messages."""
    if not any(cells.is_chat(table, name) for name in SIDES):
        return None
    for part in table.parts():
        for row in part.rows:
            for item in (item for name in SIDES if _is_list(row.get(name)) for item in row[name]):
                if isinstance(item, str) or _is_list(item):
                    return "texts" if isinstance(item, str) else "conversations"
                if isinstance(item, Mapping):
                    return None
    return None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def list_problem(row: Mapping[str, Any], name: str) -> str | None:
    """Describe what is wrong with a list of completions, or return None."""
    if name not in row:
        return cells.cell_problem(row, name, chat=True)
    value = row[name]
    if not _is_list(value):
        return f"'{name}' is {cells.type_name(value)}, not a list of completions"
    if not len(value):
        return f"'{name}' is an empty list: at least one chosen and one rejected completion are compared"
    for number, item in enumerate(value, 1):
        problem = _completion_problem(item)
        if problem:
            return f"completion {number} of '{name}' {problem}"
    return None


def _completion_problem(item: Any) -> str | None:
    if isinstance(item, str):
        return None
    if not _is_list(item):
        return f"is {cells.type_name(item)}, neither a text nor a list of messages"
    return cells.message_problem(item) or (None if cells.is_answered(item) else "has no assistant turn")


def mixture(row: Mapping[str, Any]) -> str | None:
    """Describe completions of different kinds in one row, or return None."""
    texts = [isinstance(item, str) for name in SIDES for item in row[name]]
    if any(texts) and not all(texts):
        return "some completions are texts and some are conversations: make all of them the same"
    return None
