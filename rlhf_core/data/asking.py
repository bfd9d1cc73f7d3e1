"""Prompts from rows that were made for something else: conversations whose last reply is to be written anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_core.data import conversations as cells
from rlhf_core.data.report import Problems
from rlhf_core.data.source import Records, Source, digest
from rlhf_core.data.views import Changed


def as_prompts(records: Records) -> Records:
    """Rows with `messages` and no `prompt` get one: their conversation without the replies at its end.

    Raises InputError, naming the rows, for conversations that are none, and for those that nobody asks anything in.
    """
    return Records([_asked(source) for source in records.sources])


def _asked(source: Source) -> Source:
    if "prompt" in source.columns or "messages" not in source.columns:
        return source
    problems = Problems()
    for i, row in enumerate(source.rows):
        problem = cells.cell_problem(row, "messages", chat=True)
        if problem or not _question(row):
            wrong = problem or "'messages' has no turn to reply to"
            problems.add(f"{source.where(i)}: {wrong}")
    problems.stop()
    return replace(
        source,
        rows=Changed(source.rows, lambda row: {**row, "prompt": _question(row)}),
        fingerprint=digest(source.fingerprint, "messages"),
        known={**source.kinds, "prompt": source.kind("messages")},
        origin=source.source,
    )


def _question(row: Mapping[str, Any]) -> list[Any]:
    """The row's conversation without the replies at its end."""
    turns = list(row["messages"])
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    return turns
