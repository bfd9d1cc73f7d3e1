"""Encode prompts for rollouts, with the columns for reward functions; or the rows that episodes begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.contracts import REWARD
from rlhf_core.data import columns
from rlhf_core.data.cache import Arrays, Ragged, TokenCache, flatten
from rlhf_core.data.encoded import Form, Limit, Notes, select
from rlhf_core.data.report import Problems, Report
from rlhf_core.data.source import Places, Records, Source, cells, mapped
from rlhf_core.errors import InputError
from rlhf_core.tokenizer.encoding import Encoder, TextOptions, Turns

NOTES = ("left_out",)
FORMATS = (("prompt",), ("messages",))
ACCEPTED = (
    "prompt, as text or a conversation, or messages; every other column is passed to the reward functions"
)


@dataclass(frozen=True)
class Prompts:
    """Encoded prompts; their texts and other columns are read on access."""

    ids: Ragged
    """int32 [n] each: the tokens that a completion continues."""
    raw: Sequence[Turns]
    """Each prompt as in the data: a text, or a list of messages."""
    chat: bool
    """Whether the prompts are conversations; reward functions then get completions as messages."""
    columns: dict[str, Sequence[Any]]
    """The other columns, one value per prompt, None where a row lacks it."""
    digests: NDArray[np.uint64]
    """[prompts, 1]: digest of each prompt's tokens."""
    report: Report
    places: Places

    def __len__(self) -> int:
        return len(self.ids)

    def where(self, i: int) -> str:
        """Name the row of prompt `i`, such as "prompts.jsonl row 17"."""
        return self.places[i]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """int64 [prompts]: tokens of each prompt."""
        return np.asarray(self.ids.lengths, np.int64)

    def row(self, i: int) -> Mapping[str, Any]:
        """Return the row of prompt `i`, as in the data."""
        row: Mapping[str, Any] = self.places.records[int(self.rows[i])]
        return row

    @property
    def rows(self) -> NDArray[np.int64]:
        """int64 [prompts]: index of each prompt's row in the records."""
        return self.places.rows


def encode_prompts(
    records: Records,
    tokenizer: Any,
    *,
    max_prompt_length: int | None,
    overlong: str = "filter",
    truncation_mode: str = "keep_end",
    chat_template: str | TextOptions | None = None,
) -> Prompts:
    """Tokenise prompts; conversations end with an open assistant turn.

    Of rows with `messages` alone, the prompt is the conversation without the replies at its end, see `as_prompts`.
    chat_template: as in `template_text`, or all options as `TextOptions`.
    max_prompt_length: tokens; longer prompts are dropped ("filter") or cut by `truncation_mode` ("truncate").
    Raises InputError naming file and row of the first few problems, and if no prompt is left.
    """
    records = as_prompts(records)
    encoder = Encoder(tokenizer, chat_template)
    reserved = [name for name in REWARD.arguments if name in records.columns]
    if reserved:
        taken = ", ".join(map(repr, reserved))
        raise InputError(f"{records.name}: rename column {taken}: reward functions are called with that name")
    chat = [columns.is_chat(source, "prompt") for source in records.sources]
    if len(set(chat)) > 1:
        names = [records.sources[chat.index(kind)].name for kind in (True, False)]
        raise InputError(
            f"the prompts of {names[0]} are conversations and those of {names[1]} texts: use one kind"
        )
    encode = partial(_encode, encoder=encoder, chat=chat[0])
    form = Form("prompts", ("ids",), NOTES, encode, lambda rows: rows.longest > 0, lambda source: ("prompt",))
    limit = Limit(max_prompt_length, overlong, truncation_mode, "max_prompt_length")
    chosen = select(records, TokenCache("prompts", encoder), form, limit)
    rows = chosen.places.rows
    return Prompts(
        chosen.sequences("ids"),
        cells(records, rows, "prompt"),
        chat[0],
        {name: cells(records, rows, name) for name in records.columns if name != "prompt"},
        chosen.digests,
        chosen.report,
        chosen.places,
    )


def _encode(source: Source, encoder: Encoder, chat: bool) -> Arrays:
    """Tokenise every row; an empty text has no ids if the tokenizer adds no special tokens."""
    if "prompt" not in source.columns:
        raise columns.missing_columns(source, ("prompt",), ACCEPTED, *FORMATS)
    if chat:
        columns.require_template(source, encoder)
    problems = Problems()
    texts: list[tuple[str, bool]] = []
    notes = Notes(NOTES)
    for i, row in enumerate(source.rows):
        if problem := columns.cell_problem(row, "prompt", chat):
            problems.add(f"{source.where(i)}: {problem}")
            continue
        try:
            tools, kwargs = columns.tools_of(row), columns.kwargs_of(row)
            texts.append(encoder.text(row["prompt"], open_turn=True, tools=tools, kwargs=kwargs))
            if chat:
                notes.add_unwritten(i, encoder, row["prompt"], texts[-1][0], tools, kwargs)
        except InputError as error:
            problems.add(f"{source.where(i)}: {error}")
    problems.raise_if_any()
    return {**flatten("ids", encoder.tokenize_open(texts)), **notes.arrays()}


def as_prompts(records: Records) -> Records:
    """Add a `prompt` to rows with `messages` only: the conversation without the assistant turns at its end.

    Raises InputError naming rows with invalid conversations, and those without a turn to reply to.
    """
    return Records([_add_prompts(source) for source in records.sources])


def _add_prompts(source: Source) -> Source:
    if "prompt" in source.columns or "messages" not in source.columns:
        return source
    problems = Problems()
    for i, row in enumerate(source.rows):
        problem = columns.cell_problem(row, "messages", chat=True)
        if problem or not _without_last_replies(row):
            wrong = problem or "'messages' has no turn to reply to"
            problems.add(f"{source.where(i)}: {wrong}")
    problems.raise_if_any()
    rows = mapped(source.rows, lambda row: {**row, "prompt": _without_last_replies(row)})
    return source.derived(rows, "messages", {**source.kinds, "prompt": source.kind("messages")})


def _without_last_replies(row: Mapping[str, Any]) -> list[Any]:
    """Return the row's conversation without the assistant turns at its end."""
    return without_last_replies(row["messages"])


def without_last_replies(messages: Sequence[Any]) -> list[Any]:
    """Return a conversation without the assistant turns at its end."""
    turns = list(messages)
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    return turns


@dataclass(frozen=True)
class EpisodeRows:
    """Rows of a dataset in the place of `Prompts`: an environment makes each prompt when its episode begins.

    max_prompt_length: tokens; no prompt is longer.
    """

    records: Records
    max_prompt_length: int

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def places(self) -> Places:
        return Places(self.records, np.arange(len(self)))

    def where(self, i: int) -> str:
        """Name row `i`, such as "tasks.jsonl row 17"."""
        return self.places[i]

    def row(self, i: int) -> Mapping[str, Any]:
        """Return row `i` as in the data."""
        row: Mapping[str, Any] = self.records[i]
        return row

    @property
    def rows(self) -> NDArray[np.int64]:
        """int64 [rows]: index of each row in the records."""
        return self.places.rows

    @property
    def sizes(self) -> NDArray[np.int64]:
        """int64 [rows]: the most tokens that each prompt may have."""
        return np.full(len(self), self.max_prompt_length, np.int64)

    @cached_property
    def columns(self) -> dict[str, Sequence[Any]]:
        """Every column but `prompt`, for the reward functions, one value per row, None where a row lacks it; and
        `environment_rewards`, all None before the episodes.
        """
        names = [name for name in self.records.columns if name != "prompt"]
        columns: dict[str, Sequence[Any]] = {name: cells(self.records, self.rows, name) for name in names}
        return {**columns, "environment_rewards": [None] * len(self)}

    chat = True
    """Completions are conversations."""

    @property
    def raw(self) -> Sequence[Any]:
        """Each row's prompt as messages, as an environment may begin with it."""
        return mapped(self.records, _as_turns)


def _as_turns(row: Mapping[str, Any]) -> Any:
    """Return a row's prompt as messages; a row without one gives an empty message."""
    prompt = row.get("prompt") or ""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
