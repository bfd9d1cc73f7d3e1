"""Preferences before tokenisation: which layout a file has, and the prompt and completions of every row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from rlhf_core.data import conversations as cells
from rlhf_core.data.report import Problems, shorten
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
    except (TypeError, ValueError, OverflowError):
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


def parse(source: Source, problems: Problems, prompt_repeated: bool | None = None) -> list[Preference]:
    """Prompt and completions of every row; rows that are wrong are added to `problems` and left out.

    prompt_repeated: as in `TextOptions`, of texts; whether a conversation holds its prompt is seen by its turns.
    """
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
        texts = [(row["prompt"], row["chosen"], row["rejected"]) for row in whole]
        split = without_prompts(source, index, texts, ("chosen", "rejected"), prompt_repeated, problems)
        return [Preference(*each, doubled=not prompt_repeated and begins_with(*each)) for each in split]
    parsed: list[Preference] = []
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


T = TypeVar("T", bound=tuple[str, ...])


def without_prompts(
    source: Source,
    index: Sequence[int],
    rows: Sequence[T],
    names: Sequence[str],
    repeated: bool | None,
    problems: Problems,
) -> list[T]:
    """Rows of texts, a prompt and its completions, without the prompt at the start of these where `repeated`.

    index: the rows' places in the source. names: the columns of the completions. repeated: as
    `TextOptions.prompt_repeated`; a row that does not begin so is then added to `problems`.
    """
    if not repeated:
        return list(rows)
    for i, (prompt, *sides) in zip(index, rows, strict=True):
        odd = [name for name, side in zip(names, sides, strict=True) if not side.startswith(prompt)]
        if odd:
            problems.add(
                f"{source.where(i)}: 'prompt' is not the start of '{odd[0]}', as prompt_repeated = true says"
            )
    return [(row[0], *(side[len(row[0]) :] for side in row[1:])) for row in rows]  # type: ignore[misc]


def require_said(source: Source, doubled: Sequence[int], repeated: bool | None) -> None:
    """Raise InputError where most rows of a source have a completion that begins with its prompt, and nobody said
    whether that prompt is to be read twice. doubled: these rows. repeated: as `TextOptions.prompt_repeated`.
    """
    if repeated is None and len(doubled) * 2 > len(source.rows):
        rows = shorten([source.where(i) for i in doubled])
        raise InputError(
            f"{source.name}: in {len(doubled):,} of {len(source.rows):,} rows a completion begins with the text of its "
            f"prompt ({rows}): set prompt_repeated = true to take it off, or prompt_repeated = false where the model "
            "shall read it twice"
        )


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
