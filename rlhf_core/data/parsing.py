"""Preferences before tokenisation: which layout a file has, and the prompt and completions of every row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlhf_core.data import conversations as cells
from rlhf_core.data.report import Problems
from rlhf_core.data.source import Source
from rlhf_core.encoding import Turns
from rlhf_core.errors import InputError

ACCEPTED = (
    "prompt + chosen + rejected, or chosen + rejected, as texts or conversations; or token ids: "
    "input_ids_chosen + input_ids_rejected, chosen_ids + rejected_ids, chosen_input_ids + rejected_input_ids"
)
FAMILIES = (
    ("input_ids_chosen", "input_ids_rejected"),
    ("chosen_ids", "rejected_ids"),
    ("chosen_input_ids", "rejected_input_ids"),
)


def margin_of(row: Mapping[str, Any], place: str, problems: Problems) -> float:
    """The row's margin in reward units, 0 where it has none; NaN where it is wrong, which `problems` then says."""
    return 0.0 if row.get("margin") in (None, "") else number_of(row, "margin", place, problems)


def number_of(row: Mapping[str, Any], column: str, place: str, problems: Problems) -> float:
    """The row's number in `column`; NaN where there is none, which `problems` then says."""
    value = row.get(column)
    try:
        number = math.nan if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) < 3e38:  # float32's largest; NaN too
        problems.add(f"{place}: '{column}' is {value!r}, not a finite number")
    return number


class Preference(NamedTuple):
    """A preference before tokenisation."""

    prompt: Turns | None
    """None: both sides hold it themselves."""
    chosen: Turns
    rejected: Turns
    doubled: bool = False
    """Whether a completion begins with the prompt that will be put before it."""


def parse(source: Source, problems: Problems) -> list[Preference]:
    """Prompt and completions of every row; rows that are wrong are added to `problems` and left out."""
    columns = set(source.columns)
    if not {"chosen", "rejected"} <= columns:
        raise cells.missing(source, ("chosen", "rejected"), ACCEPTED)
    names = [name for name in ("prompt", "chosen", "rejected") if name in columns]
    chat = {name: cells.is_chat(source, name) for name in names}
    if chat["chosen"] != chat["rejected"]:
        raise InputError(
            f"{source.where(0)}: one of 'chosen' and 'rejected' is a conversation, the other is not: make both "
            "texts or both lists of messages"
        )
    whole: list[Mapping[str, Any]] = []
    index: list[int] = []
    for i, row in enumerate(source.rows):
        found = [p for p in (cells.cell_problem(row, name, chat[name]) for name in names) if p]
        if not found and chat["chosen"]:
            found = [p for p in map(cells.unanswered, [row] * 2, ("chosen", "rejected")) if p]
        if found:
            problems.add(f"{source.where(i)}: {'; '.join(found)}")
        else:
            whole.append(row)
            index.append(i)
    if "prompt" not in columns:
        return [Preference(None, row["chosen"], row["rejected"]) for row in whole]
    if not chat["prompt"] and not chat["chosen"]:
        return _texts(source, whole, index, problems)
    parsed = []
    for i, row in zip(index, whole, strict=True):
        sides = [_completion(row["prompt"], row[name], name) for name in ("chosen", "rejected")]
        fine = [side for side in sides if not isinstance(side, _Misfit)]
        if misfits := [side.problem for side in sides if isinstance(side, _Misfit)]:
            problems.add(f"{source.where(i)}: {'; '.join(misfits)}")
        if len(fine) == 2 and fine[0][0] != fine[1][0]:
            problems.add(f"{source.where(i)}: 'chosen' and 'rejected' have different turns before the answer")
        elif len(fine) == 2:
            parsed.append(Preference(*fine[0], fine[1][1]))
    return parsed


def _texts(
    source: Source, rows: Sequence[Mapping[str, Any]], index: Sequence[int], problems: Problems
) -> list[Preference]:
    """Texts with a prompt: completions or, where most rows of a file do so, whole texts starting with it."""
    starts = [
        bool(row["prompt"])
        and row["chosen"].startswith(row["prompt"])
        and row["rejected"].startswith(row["prompt"])
        for row in rows
    ]
    repeated = sum(starts) * 2 > len(rows)
    if not repeated:
        parsed = [Preference(row["prompt"], row["chosen"], row["rejected"]) for row in rows]
        return [p._replace(doubled=begins_with(p.prompt, p.chosen, p.rejected)) for p in parsed]
    for i, row, start in zip(index, rows, starts, strict=True):
        if not start:
            side = "chosen" if not row["chosen"].startswith(row["prompt"]) else "rejected"
            problems.add(
                f"{source.where(i)}: 'prompt' is not the start of '{side}', as it is in most rows of the file"
            )
    return [
        Preference(row["prompt"], row["chosen"][len(row["prompt"]) :], row["rejected"][len(row["prompt"]) :])
        for row in rows
    ]


def begins_with(prompt: Turns | None, *completions: Turns) -> bool:
    """Whether one of the texts begins with the text of the prompt."""
    if not isinstance(prompt, str) or not prompt.strip():
        return False
    return any(isinstance(text, str) and text.lstrip().startswith(prompt.strip()) for text in completions)


@dataclass(frozen=True)
class _Misfit:
    problem: str


def _completion(prompt: Turns, side: Turns, name: str) -> tuple[Turns, Turns] | _Misfit:
    """(prompt, completion), where a side is the completion or a whole conversation that holds the prompt."""
    if isinstance(side, str):
        return prompt, side
    before = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(turn) for turn in prompt]
    )
    turns = [dict(turn) for turn in side]
    if len(turns) > len(before) and turns[: len(before)] == before:
        return before, turns[len(before) :]
    if turns[0]["role"] in ("assistant", "tool"):
        return before, turns
    if isinstance(prompt, str):  # the whole conversation may say more before the prompt
        asked = [
            k for k, turn in enumerate(turns[:-1]) if turn["role"] == "user" and turn["content"] == prompt
        ]
        if asked:
            return turns[: asked[-1] + 1], turns[asked[-1] + 1 :]
        return _Misfit(f"'prompt' is no user turn of '{name}', which is a whole conversation")
    return _Misfit(f"'prompt' is not the start of '{name}', which is a whole conversation")
