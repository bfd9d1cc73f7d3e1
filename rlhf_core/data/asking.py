"""Prompts from rows that were made for something else: conversations whose last reply is to be written anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_core.data import conversations as cells
from rlhf_core.data.report import Problems
from rlhf_core.data.source import Records, Source, digest


def as_prompts(records: Records) -> Records:
    """Rows with `messages` and no `prompt` get one: their conversation without the replies at its end.

    Raises InputError, naming the rows, for conversations that are none, and for those that nobody asks anything in.
    """
    return Records([_asked(source) for source in records.sources])


def _asked(source: Source) -> Source:
    if "prompt" in source.columns or "messages" not in source.columns:
        return source
    problems = Problems()
    rows: list[Mapping[str, Any]] = []
    for i, row in enumerate(source.rows):
        problem = cells.cell_problem(row, "messages", chat=True)
        turns = [] if problem else list(row["messages"])
        while turns and turns[-1]["role"] == "assistant":
            turns.pop()
        if problem or not turns:
            wrong = problem or "'messages' has no turn to reply to"
            problems.add(f"{source.where(i)}: {wrong}")
        rows.append({**row, "prompt": turns})
    problems.stop()
    return replace(source, rows=rows, fingerprint=digest(source.fingerprint, "messages"))
