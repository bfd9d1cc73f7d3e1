"""Encode demonstrations, texts or conversations, with a weight per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rlhf_core.data.columns as cells
from rlhf_core.config.options import format_value
from rlhf_core.data.cache import Arrays, TokenCache, flatten
from rlhf_core.data.encoded import Limit, Notes, RowForm, Selection, list_unread_columns, select
from rlhf_core.data.encoded import Text as Text
from rlhf_core.data.encoded import Texts as Texts
from rlhf_core.data.preferences import parse_pairs, read_number, repeats_prompt, strip_prompts
from rlhf_core.data.report import Problems
from rlhf_core.data.table import Records, Table
from rlhf_core.errors import InputError
from rlhf_core.packing.rows import shared_prefix
from rlhf_core.tokenizer.chat_template import Rendered
from rlhf_core.tokenizer.encoding import (
    Encoder,
    Ints,
    Message,
    TextOptions,
    Turns,
    first_after,
    join,
    until_last_reply,
)

ACCEPTED = (
    "text; prompt + completion, as texts or conversations; messages; or preferences, whose chosen completion "
    "is learned"
)

FORMATS = (("prompt", "completion"), ("messages",), ("text",))
NOTES = ("doubled", "after_reply", "left_out", "unlike", "unlearned")
"""Lists of `Report` for unusual rows that are kept."""


def encode_texts(
    records: Records,
    tokenizer: Any,
    *,
    max_length: int | None,
    overlong: str = "filter",
    truncation_mode: str = "keep_end",
    chat_template: str | TextOptions | None = None,
    values: Sequence[str] = (),
    part: bool = False,
) -> Texts:
    """Tokenise demonstrations. Which tokens are learned depends on the columns:

    text: all. prompt + completion: the completion's, in conversations only its replies. messages: every reply, as
    `ChatTemplate.locate_replies` finds them; none whose `weight` is 0. Preferences: like prompt + completion, with the
    chosen completion.

    max_length: tokens; longer rows are dropped ("filter") or cut ("truncate", by `truncation_mode`).
    chat_template: as in `template_text`, or all options as `TextOptions`.
    values: columns of numbers, one per text, which an objective reads as `batch.sequence_values[column]`.
    part: as in `select`.
    Raises InputError naming file and row of the first few problems, and if no text is left.
    """
    encoder = Encoder.of(tokenizer, chat_template)

    def trained(rows: Selection) -> NDArray[np.int64]:
        """Count the learned tokens of each row, int64 [rows]; the first token never counts."""
        counts = np.concatenate([[0], np.cumsum(rows.arrays["learned"])])
        starts, stops = rows.starts["tokens"], rows.stops["tokens"]
        return np.asarray(counts[stops] - counts[np.minimum(starts + 1, stops)])

    encode = partial(_encode, encoder=encoder)
    form = RowForm("texts", ("tokens",), NOTES, encode, lambda rows: trained(rows) > 0, _text_columns)
    limit = Limit(max_length, overlong, truncation_mode)
    chosen = select(records, TokenCache("texts", encoder), form, limit, part=part)
    problems = Problems()
    numbers = {
        column: [
            read_number(rows.table.rows[i], column, rows.table.where(i), problems)
            for rows in chosen.parts
            for i in np.flatnonzero(rows.used).tolist()
        ]
        for column in values
    }
    problems.raise_if_any()
    if not part:
        list_unread_columns(chosen.report, records, lambda table: (*used_columns(table), *values))
    return Texts(
        chosen.sequences("tokens"),
        chosen.sequences("tokens", "learned"),
        chosen.values(trained),
        chosen.digests,
        chosen.report,
        chosen.places,
        {name: np.array(column, np.float32) for name, column in numbers.items()},
    )


def usable_texts(table: Table, options: TextOptions, values: Sequence[str] = ()) -> NDArray[np.bool_]:
    """Check all rows as far as that needs no tokenizer; tell which could teach something, bool [rows].

    Raises InputError naming file and row of the first few problems.
    """
    problems = Problems()
    for column in values:
        for i, row in enumerate(table.rows):
            read_number(row, column, table.where(i), problems)
    columns = read_columns(table)
    if "chosen" in columns:
        completions: list[Turns] = [p.chosen for p in parse_pairs(table, problems, options.prompt_repeated)]
        problems.raise_if_any()
    else:
        chat = {name: name == "messages" or cells.is_chat(table, name) for name in columns}
        chat |= {"text": False} if "text" in columns else {}
        answered = "completion" if chat.get("completion") else None
        completions = [row[-1] for row in _read_values(table, chat, answered)]
        problems.raise_if_any()
    return np.array(
        [cells.is_answered(turns) and not cells.is_blank(until_last_reply(turns)) for turns in completions],
        bool,
    )


def _text_columns(table: Table) -> tuple[str, ...]:
    columns = read_columns(table)
    return columns if len(columns) > 1 else ()


def _encode(table: Table, encoder: Encoder) -> Arrays:
    """Tokenise every row, with masks of learned tokens and notes; rows with nothing to learn have no tokens."""
    notes = Notes(NOTES)
    texts = _READERS[read_columns(table)](table, encoder, notes)
    return {
        **flatten("tokens", [None if text is None else text.tokens for text in texts]),
        "learned": flatten(
            "learned", [None if text is None else text.weights != 0 for text in texts], np.bool_
        )["learned"],
        **notes.arrays(),
    }


def read_columns(table: Table) -> tuple[str, ...]:
    """Choose the columns to read demonstrations from. Raises InputError if there are none."""
    columns = set(table.columns)
    names = next((names for names in _READERS if set(names) <= columns), None)
    if names is None:
        wanted = ("prompt", "completion") if columns & {"prompt", "completion"} else ("text",)
        raise cells.missing_columns(table, wanted, ACCEPTED, *FORMATS)
    return names


def used_columns(table: Table) -> tuple[str, ...]:
    """List the columns that demonstrations are read from, and those that only conversations have."""
    names = read_columns(table)
    names = ("prompt", *names) if "chosen" in names else names
    chat = any(cells.is_chat(table, name) for name in names)
    return (*names, *cells.FOR_TEMPLATES) if chat else names


def _encode_plain(table: Table, encoder: Encoder, notes: Notes) -> list[Text | None]:
    values = _read_values(table, {"text": False})
    used = [i for i, (text,) in enumerate(values) if text.strip()]
    encoded: list[Text | None] = [None] * len(values)
    ids = encoder.whole([None] * len(used), [values[i][0] for i in used])
    for i, tokens in zip(used, ids, strict=True):
        encoded[i] = Text(tokens, np.ones(len(tokens), np.float32))
    return encoded


def _encode_completions(table: Table, encoder: Encoder, notes: Notes) -> list[Text | None]:
    chat = {name: cells.is_chat(table, name) for name in ("prompt", "completion")}
    if any(chat.values()):
        cells.require_template(table, encoder)
    rows = list(_read_values(table, chat, answered="completion" if chat["completion"] else None))
    repeated = encoder.options.prompt_repeated
    if not any(chat.values()):
        problems = Problems()
        rows = strip_prompts(table, range(len(rows)), rows, repeated, problems)
        problems.raise_if_any()
    notes.rows["doubled"] = {i for i, row in enumerate(rows) if not repeated and repeats_prompt(*row)}
    return _encode_learned(table, encoder, rows, notes)


def _encode_chosen(table: Table, encoder: Encoder, notes: Notes) -> list[Text | None]:
    problems = Problems()
    parsed = parse_pairs(table, problems, encoder.options.prompt_repeated)
    problems.raise_if_any()
    notes.rows["doubled"] = {i for i, p in enumerate(parsed) if p.doubled}
    if any(not isinstance(p.chosen, str) for p in parsed):
        cells.require_template(table, encoder)
    if all(p.prompt is not None for p in parsed) or not isinstance(parsed[0].chosen, str):
        return _encode_learned(table, encoder, [(p.prompt, p.chosen) for p in parsed], notes)
    # Two texts without a prompt: the completions start where they differ.
    no_prompts = [None] * len(parsed)
    chosen = encoder.whole(no_prompts, [p.chosen for p in parsed])
    rejected = encoder.whole(no_prompts, [p.rejected for p in parsed])
    return [_learned_from(a, shared_prefix((a, b))) for a, b in zip(chosen, rejected, strict=True)]


def _encode_conversations(table: Table, encoder: Encoder, notes: Notes) -> list[Text | None]:
    cells.require_template(table, encoder)
    rows = [messages for (messages,) in _read_values(table, {"messages": True})]
    answered = [messages if cells.is_answered(messages) else [] for messages in rows]
    return _encode_learned(table, encoder, [(None, messages) for messages in answered], notes)


def _encode_learned(
    table: Table, encoder: Encoder, pairs: Sequence[tuple[Turns | None, Turns]], notes: Notes
) -> list[Text | None]:
    """Encode prompts with completions; learn the tokens after a text prompt, or a conversation's replies."""
    problems = Problems()
    texts: dict[int, tuple[tuple[str, bool], tuple[str, bool]]] = {}
    chats: dict[int, Rendered] = {}
    for i, (prompt, completion) in enumerate(pairs):
        if cells.is_blank(until_last_reply(completion)):
            continue
        turns = join(prompt, completion)
        if isinstance(turns, str):
            texts[i] = encoder.prompt_text(prompt, completion), encoder.text(turns)
            continue
        first = len(turns) - (1 if isinstance(completion, str) else len(completion))
        try:
            tools, read = cells.tools_of(table.rows[i]), until_last_reply(turns)
            kwargs = cells.kwargs_of(table.rows[i])
            require_weights(read)
            chats[i] = encoder.locate_replies(read, tools=tools, kwargs=kwargs, first=first)
            notes.add_unwritten(i, encoder, read, chats[i].text, tools, kwargs, learns=True)
        except InputError as error:
            problems.add(f"{table.where(i)}: {error}")
            continue
        notes.add("after_reply", i, len(read) < len(turns))
        notes.add("unlike", i, not chats[i].follows)
        notes.add("unlearned", i, not chats[i].complete)
    problems.raise_if_any()
    encoded: list[Text | None] = [None] * len(pairs)
    before = encoder.tokenize_open([opening for opening, _ in texts.values()])
    whole = encoder.tokenize([text for _, text in texts.values()])
    for i, start, ids in zip(texts, before, whole, strict=True):
        tokens = encoder.end_with_eos(ids)
        encoded[i] = _learned_from(tokens, first_after(start, tokens))
    for i, (tokens, learned) in zip(chats, encoder.encode_replies(list(chats.values())), strict=True):
        encoded[i] = Text(tokens, learned.astype(np.float32))
    return encoded


def require_weights(turns: Sequence[Message]) -> None:
    """Raise InputError for a message's loss `weight` that is not 0 or 1."""
    for number, turn in enumerate(turns, 1):
        weight = turn.get("weight")
        if weight is not None and (isinstance(weight, bool | str) or weight not in (0, 1)):
            raise InputError(
                f"message {number}'s weight is {format_value(weight)}; a reply is learned (1) or not (0)"
            )


def _learned_from(tokens: Ints, first: int) -> Text:
    weights = np.ones(len(tokens), np.float32)
    weights[:first] = 0.0
    return Text(tokens, weights)


def _read_values(
    table: Table, columns: Mapping[str, bool], answered: str | None = None
) -> list[tuple[Any, ...]]:
    """Check and return the columns' values of every row.

    columns: {name: whether it holds conversations}. answered: the column that must contain a reply.
    """
    problems = Problems()
    for i, row in enumerate(table.rows):
        for column, chat in columns.items():
            problem = cells.cell_problem(row, column, chat)
            if problem is None and column == answered:
                problem = cells.unanswered_problem(row, column, "learned")
            if problem:
                problems.add(f"{table.where(i)}: {problem}")
    problems.raise_if_any()
    return [tuple(row[column] for column in columns) for row in table.rows]


_READERS = {
    ("messages",): _encode_conversations,
    ("prompt", "completion"): _encode_completions,
    ("text",): _encode_plain,
    ("chosen", "rejected"): _encode_chosen,
}
"""In order of precedence: the first entry whose columns all exist reads the table."""
