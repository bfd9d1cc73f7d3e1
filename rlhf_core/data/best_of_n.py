"""Parse rows that list the chosen and the rejected completions of a prompt, as best-of-n benchmarks do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from rlhf_core.data import columns as cells
from rlhf_core.data.preferences import SIDES, Misfit, repeats_prompt, split_prompt, strip_prompts
from rlhf_core.data.report import Problems
from rlhf_core.data.source import Source
from rlhf_core.tokenizer.encoding import Turns


class Candidates(NamedTuple):
    """The completions of one prompt."""

    row: int
    """Index of the row in its source."""
    completions: list[tuple[Turns | None, Turns]]
    """(prompt, completion), those of `chosen` first; the prompt is None if the completion contains it."""
    doubled: bool
    """Whether a completion repeats the prompt, which will be put before it."""


def completion_lists(source: Source) -> Literal["texts", "conversations"] | None:
    """Say what lists of completions hold; None for pairs, in which a list is one conversation's messages."""
    if not any(cells.is_chat(source, name) for name in SIDES):
        return None
    for part in source.parts():
        for row in part.rows:
            for item in (item for name in SIDES if _is_list(row.get(name)) for item in row[name]):
                if isinstance(item, str) or _is_list(item):
                    return "texts" if isinstance(item, str) else "conversations"
                if isinstance(item, Mapping):
                    return None
    return None


def parse_candidates(
    source: Source, problems: Problems, prompt_repeated: bool | None = None
) -> list[Candidates]:
    """Parse every row with lists of completions; add invalid rows to `problems` and leave them out.

    Leaves out rows whose `chosen` or `rejected` is null, too. prompt_repeated: as in `TextOptions`, for texts.
    """
    prompted = "prompt" in source.columns
    chat_prompt = cells.is_chat(source, "prompt")
    parsed: list[Candidates] = []
    for i, row in enumerate(source.rows):
        if any(name in row and row[name] is None for name in SIDES):
            continue
        where = source.where(i)
        row_problems = [cells.cell_problem(row, "prompt", chat_prompt)] if prompted else []
        row_problems += [_list_problem(row, name) for name in SIDES]
        found = [problem for problem in row_problems if problem]
        if mixture := None if found else _mixture(row):
            found = [mixture]
        if found:
            problems.add(f"{where}: {'; '.join(found)}")
            continue
        sides = [(name, completion) for name in SIDES for completion in row[name]]
        names, completions = [name for name, _ in sides], [completion for _, completion in sides]
        prompt = row["prompt"] if prompted else None
        if prompt is None:
            parsed.append(Candidates(i, [(None, completion) for completion in completions], False))
        elif isinstance(prompt, str) and isinstance(completions[0], str):
            stripped = strip_prompts(source, [i], [(prompt, *completions)], names, prompt_repeated, problems)
            doubled = not prompt_repeated and repeats_prompt(prompt, *completions)
            parsed.append(Candidates(i, [(prompt, text) for text in stripped[0][1:]], doubled))
        else:
            splits = [split_prompt(prompt, completion, name) for name, completion in sides]
            fine = [split for split in splits if not isinstance(split, Misfit)]
            misfit = next((split.problem for split in splits if isinstance(split, Misfit)), None)
            if misfit is None and any(before != fine[0][0] for before, _ in fine):
                misfit = "the completions have different turns before the answer"
            if misfit is None:
                parsed.append(Candidates(i, list(fine), False))
            else:
                problems.add(f"{where}: {misfit}")
    return parsed


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def _list_problem(row: Mapping[str, Any], name: str) -> str | None:
    """Describe what is wrong with a list of completions, or return None."""
    if name not in row:
        return cells.cell_problem(row, name, chat=True)
    value = row[name]
    if not _is_list(value):
        return f"'{name}' is {cells.type_name(value)}, not a list of completions"
    if not len(value):
        return f"'{name}' is an empty list: at least one chosen and one rejected completion are compared"
    for number, item in enumerate(value, 1):
        if problem := _completion_problem(item):
            return f"completion {number} of '{name}' {problem}"
    return None


def _completion_problem(item: Any) -> str | None:
    if isinstance(item, str):
        return None
    if not _is_list(item):
        return f"is {cells.type_name(item)}, neither a text nor a list of messages"
    return cells.message_problem(item) or (None if cells.is_answered(item) else "has no assistant turn")


def _mixture(row: Mapping[str, Any]) -> str | None:
    texts = [isinstance(item, str) for name in SIDES for item in row[name]]
    if any(texts) and not all(texts):
        return "some completions are texts and some are conversations: make all of them the same"
    return None
