"""Demonstrations, texts or conversations, with a weight per token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rlhf_core.data.columns as cells
from rlhf_core.config.options import format_value
from rlhf_core.data.cache import Arrays, flatten
from rlhf_core.data.examples import Examples, Limit, RowKind, encode, shared_start
from rlhf_core.data.parts import (
    Notes,
    Parser,
    Parts,
    Row,
    for_each,
    parse_rows,
    raise_problems,
    read_numbers,
    strip_prompt,
    usable_rows,
)
from rlhf_core.data.preferences import pair_parser
from rlhf_core.data.report import Problems
from rlhf_core.data.table import Records, Table
from rlhf_core.errors import InputError
from rlhf_core.tokenizer.chat_template import Rendered
from rlhf_core.tokenizer.encoding import (
    Encoder,
    Message,
    TextOptions,
    first_after,
    join,
    until_last_reply,
)

ACCEPTED = (
    "text; prompt + completion, as texts or conversations; messages; or preferences, whose chosen completion "
    "is learned"
)

FORMATS = (("prompt", "completion"), ("messages",), ("text",))
READ = (("messages",), ("prompt", "completion"), ("text",), ("chosen", "rejected"))
"""Columns in order of precedence: the first of which a table has all are read."""
NOTES = ("doubled", "after_reply", "left_out", "unlike", "unlearned")


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
) -> Examples:
    """Tokenise demonstrations. Which tokens are learned depends on the columns:

    text: all. prompt + completion: the completion's, in conversations only its replies. messages: every reply, as
    `ChatTemplate.locate_replies` finds them; none whose `weight` is 0. Preferences: like prompt + completion, with the
    chosen completion.

    max_length: tokens; longer rows are dropped ("filter") or cut ("truncate", by `truncation_mode`).
    chat_template: as in `template_text`, or all options as `TextOptions`.
    values: columns of numbers, one per text, which an objective reads as `batch.sequence_values[column]`.
    part: as in `examples.encode`.
    Raises InputError naming file and row of the first few problems, and if no text is left.
    """
    encoder = Encoder.of(tokenizer, chat_template)
    kind = RowKind(
        "texts",
        "texts",
        ("tokens",),
        1,
        NOTES,
        partial(_encode, encoder=encoder),
        partial(used_columns, values=values),
        dict.fromkeys(values),
    )
    return encode(records, encoder, kind, Limit(max_length, overlong, truncation_mode), part=part)


def usable_texts(table: Table, options: TextOptions, values: Sequence[str] = ()) -> NDArray[np.bool_]:
    """Check all rows as far as that needs no tokenizer; tell which could teach something, bool [rows].

    Raises InputError naming file and row of the first few problems.
    """
    problems = Problems()
    for column in values:
        read_numbers(table, column, problems)
    return usable_rows(table, text_parser(table, options), problems)


def read_columns(table: Table) -> tuple[str, ...]:
    """Choose the columns to read demonstrations from. Raises InputError if there are none."""
    columns = set(table.columns)
    names = next((names for names in READ if set(names) <= columns), None)
    if names is None:
        wanted = ("prompt", "completion") if columns & {"prompt", "completion"} else ("text",)
        raise cells.missing_columns(table, wanted, ACCEPTED, *FORMATS)
    return names


def used_columns(table: Table, values: Sequence[str] = ()) -> tuple[str, ...]:
    """List the columns that demonstrations are read from, those that only conversations have, and `values`."""
    names = read_columns(table)
    names = ("prompt", *names) if "chosen" in names else names
    chat = any(cells.is_chat(table, name) for name in names)
    return (*names, *(cells.FOR_TEMPLATES if chat else ()), *values)


def text_parser(table: Table, options: TextOptions, *, scored: bool = False) -> Parser:
    """Make the parser of a table's demonstrations: rows with a prompt, or none, and a completion.

    scored: rows are read to be scored: one may be blank, and one without a completion is left out. Preferences have two
    completions, of which the first is learned.
    """
    names = read_columns(table)
    if "chosen" in names:
        parse_pair = pair_parser(table, options, may_be_blank=True)

        def parse_chosen(row: Row) -> Parts | None:
            return _if_learned(parse_pair(row))

        return parse_chosen

    last = names[-1]  # the column of the completion
    chat = {name: name == "messages" or cells.is_chat(table, name) for name in names}
    if not scored:
        chat["text"] = False
    needs_reply = not (scored and options.read_at == "template")

    def parse(row: Row) -> Parts | None:
        if scored and last in row and row[last] is None:
            return None
        raise_problems([cells.cell_problem(row, name, chat[name]) for name in names])
        if needs_reply and not cells.is_answered(row[last]):
            if last == "completion" and not scored:
                raise_problems([cells.unanswered_problem(row, last, "learned")])
            return None
        prompt = row["prompt"] if "prompt" in names else None
        parts = _split(prompt, row[last], options.prompt_repeated)
        if not scored and _if_learned(parts) is None:
            return None
        return parts.with_template_values(row)

    return parse


def _split(prompt: Any, completion: Any, repeated: bool | None) -> Parts:
    if isinstance(prompt, str) and isinstance(completion, str):
        return Parts(prompt, *strip_prompt(prompt, [("completion", completion)], repeated))
    return Parts(prompt, (completion,))


def _if_learned(parts: Parts | None) -> Parts | None:
    """Return the parts of a row with something to learn in its first completion; else None."""
    if parts is None or cells.is_blank(until_last_reply(parts.completions[0])):
        return None
    return parts


def _encode(table: Table, notes: Notes, problems: Problems, *, encoder: Encoder) -> Arrays:
    """Tokenise every row and mask its learned tokens: a text after its prompt, or a conversation's replies."""
    rows = parse_rows(table, text_parser(table, encoder.options), problems)
    chats: dict[int, Rendered] = {}
    texts: dict[int, tuple[str, bool]] = {}
    openings: dict[int, tuple[str, bool]] = {}
    others: dict[int, tuple[str, bool]] = {}

    def write(i: int, parts: Parts) -> None:
        notes.add("doubled", i, parts.doubled)
        completion, *rejected = parts.completions
        turns = join(parts.prompt, completion)
        if isinstance(turns, str):
            texts[i] = encoder.text(turns)
            if parts.prompt is not None:
                openings[i] = encoder.prompt_text(parts.prompt, completion)
            elif rejected:  # two texts without a prompt: the completions start where they differ
                others[i] = encoder.text(rejected[0])
            return
        first = len(turns) - (1 if isinstance(completion, str) else len(completion))
        read = until_last_reply(turns)
        require_weights(read)
        chats[i] = encoder.locate_replies(read, tools=parts.tools, kwargs=parts.kwargs, first=first)
        notes.add_unwritten(i, encoder, read, chats[i].text, parts, learns=True)
        notes.add("after_reply", i, len(read) < len(turns))
        notes.add("unlike", i, not chats[i].follows)
        notes.add("unlearned", i, not chats[i].complete)

    for_each(table, rows, encoder, write)
    tokens: list[Any] = [None] * len(rows)
    learned: list[Any] = [None] * len(rows)
    before = dict(zip(openings, encoder.tokenize_open(list(openings.values())), strict=True))
    rejected = dict(
        zip(others, map(encoder.end_with_eos, encoder.tokenize(list(others.values()))), strict=True)
    )
    for i, ids in zip(texts, map(encoder.end_with_eos, encoder.tokenize(list(texts.values()))), strict=True):
        first = 0
        if i in before:
            first = first_after(before[i], ids)
        if i in rejected:
            first = shared_start(ids, rejected[i])
        tokens[i] = ids
        learned[i] = np.ones(len(ids), bool)
        learned[i][:first] = False
    for i, (ids, mask) in zip(chats, encoder.encode_replies(list(chats.values())), strict=True):
        tokens[i] = ids
        learned[i] = mask
    masks = flatten("learned", learned, np.bool_)
    return {**flatten("tokens", tokens), "learned": masks["learned"]}


def require_weights(turns: Sequence[Message]) -> None:
    """Raise InputError for a message's loss `weight` that is not 0 or 1."""
    for number, turn in enumerate(turns, 1):
        weight = turn.get("weight")
        if weight is not None and (isinstance(weight, bool | str) or weight not in (0, 1)):
            raise InputError(
                f"message {number}'s weight is {format_value(weight)}; a reply is learned (1) or not (0)"
            )
