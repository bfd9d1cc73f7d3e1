"""Demonstrations: texts and conversations, with a weight on every token that is to be learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data import conversations as cells
from rlhf_core.data.cache import ROWS, Arrays, Tokens, flat
from rlhf_core.data.encoded import Text as Text
from rlhf_core.data.encoded import Texts as Texts
from rlhf_core.data.preferences import begins_with, number_of, parse, require_said, without_prompts
from rlhf_core.data.report import Problems, Report
from rlhf_core.data.row_selection import Notes, Selection, check, finished, sequences, together
from rlhf_core.data.source import Records, Source
from rlhf_core.data.token_ids import facts, unknown_id
from rlhf_core.errors import InputError
from rlhf_core.packing.rows import shared_prefix
from rlhf_core.tokenizer.chat_template import Written
from rlhf_core.tokenizer.encoding import Encoder, Ints, TextOptions, Turns, first_after, join, replied

ACCEPTED = (
    "text; prompt + completion, as texts or conversations; messages; or preferences, of which the chosen "
    "completion is learned"
)


NOTES = ("doubled", "after_reply", "left_out", "unlike", "unlearned")
"""The lists of a `Report` that say what is particular about rows that are kept."""


def encode_texts(
    records: Records,
    tokenizer: Any,
    *,
    max_length: int | None,
    overlong: str = "filter",
    truncation_mode: str = "keep_end",
    chat_template: str | TextOptions | None = None,
    values: Sequence[str] = (),
) -> Texts:
    """Tokenise demonstrations. Which tokens are learned depends on the columns:

    text: all. prompt + completion: the completion's, of conversations the replies in it. messages: every reply, as
    `rlhf_core.tokenizer.chat_template` finds them. Preferences: as prompt + completion with the chosen one.

    max_length: tokens; longer rows are dropped ("filter") or cut ("truncate", by `truncation_mode`).
    chat_template: as in `template_text`, or all options of `TextOptions`.
    values: columns of numbers, one a text, which an objective reads as `batch.sequence_values[column]`.
    Raises InputError naming file and row of the first few problems, and where no text is left.
    """
    check(overlong, truncation_mode)
    problems = Problems()
    encoder = Encoder(tokenizer, chat_template)
    report = Report("texts", max_length, read_as=records.remarks)
    known, unknown = Tokens("texts", encoder), unknown_id(tokenizer)
    selections: list[Selection] = []
    lengths: list[NDArray[np.int64]] = []
    trained: list[NDArray[np.int64]] = []
    numbers: dict[str, list[float]] = {column: [] for column in values}
    for source, offset in zip(records.sources, records.offsets(), strict=True):
        rows = Selection(
            source, offset, known.of(source, partial(_with_facts, encoder=encoder)), ("tokens",), report
        )
        require_said(source, rows.arrays[f"doubled{ROWS}"].tolist(), encoder.options.prompt_repeated)
        counts = np.array(rows.arrays["trained"], np.int64)
        rows.drop(counts == 0, report.empty)
        lengths.append(rows.longest[rows.used])
        over = rows.over(max_length)
        if max_length is not None and overlong == "truncate":
            rows.cut(max_length, truncation_mode)
            rows.reread(over, unknown)
            for i in np.flatnonzero(over).tolist():
                learned = rows.arrays["learned"][rows.starts["tokens"][i] : rows.stops["tokens"][i]]
                counts[i] = np.count_nonzero(learned[1:])
            rows.drop(counts == 0, report.filtered)
            rows.tell(over & rows.used, report.truncated)
        else:
            rows.drop(over, report.filtered)
        rows.tell_notes(NOTES)
        columns = read_columns(source)
        if len(columns) > 1 and cells.skips_template(source, encoder, *columns):
            rows.tell(rows.used, report.untemplated)
        for column, found in numbers.items():
            found += [
                number_of(source.rows[i], column, source.where(i), problems) for i in rows.index.tolist()
            ]
        selections.append(rows)
        trained.append(counts)
    problems.stop()
    places, digests = finished(records, selections, lengths, "max_sequence_length")
    return Texts(
        sequences(selections, "tokens"),
        sequences(selections, "tokens", "learned"),
        together(selections, trained),
        digests,
        report,
        places,
        {name: np.array(found, np.float32) for name, found in numbers.items()},
    )


def _with_facts(source: Source, encoder: Encoder) -> Arrays:
    """What `_encode` gives, and `facts` of the tokens; of each row the number of tokens that are trained on."""
    arrays = _encode(source, encoder)
    starts = np.concatenate([[0], arrays["tokens_ends"][:-1]]).tolist()
    trained = [
        np.count_nonzero(arrays["learned"][start + 1 : stop])
        for start, stop in zip(starts, arrays["tokens_ends"].tolist(), strict=True)
    ]
    more = facts(arrays, ("tokens",), unknown_id(encoder.tokenizer))
    return {**arrays, **more, "trained": np.array(trained, np.int64)}


def _encode(source: Source, encoder: Encoder) -> Arrays:
    """Tokens of every row and which are learned, none where there is nothing to learn; the rows that something is said
    of.
    """
    notes = Notes(NOTES)
    texts = _READERS[read_columns(source)](source, encoder, notes)
    return {
        **flat("tokens", [None if text is None else text.tokens for text in texts]),
        "learned": flat("learned", [None if text is None else text.weights != 0 for text in texts], np.bool_)[
            "learned"
        ],
        **notes.arrays(),
    }


def read_columns(source: Source) -> tuple[str, ...]:
    """The columns that demonstrations are read from. Raises InputError where there are none."""
    columns = set(source.columns)
    found = next((names for names in _READERS if set(names) <= columns), None)
    if found is None:
        wanted = ("prompt", "completion") if columns & {"prompt", "completion"} else ("text",)
        raise cells.missing(source, wanted, ACCEPTED)
    return found


def _plain_texts(source: Source, encoder: Encoder, notes: Notes) -> list[Text | None]:
    values = _checked(source, {"text": False})
    used = [i for i, (text,) in enumerate(values) if text.strip()]
    out: list[Text | None] = [None] * len(values)
    ids = encoder.whole([None] * len(used), [values[i][0] for i in used])
    for i, tokens in zip(used, ids, strict=True):
        out[i] = Text(tokens, np.ones(len(tokens), np.float32))
    return out


def _completions(source: Source, encoder: Encoder, notes: Notes) -> list[Text | None]:
    chat = {name: cells.is_chat(source, name) for name in ("prompt", "completion")}
    if any(chat.values()):
        cells.require_template(source, encoder)
    rows = list(_checked(source, chat, answered="completion" if chat["completion"] else None))
    repeated = encoder.options.prompt_repeated
    if not any(chat.values()):
        problems = Problems()
        rows = without_prompts(source, range(len(rows)), rows, ["completion"], repeated, problems)
        problems.stop()
    notes.rows["doubled"] = {i for i, row in enumerate(rows) if not repeated and begins_with(*row)}
    return _learn(source, encoder, rows, notes)


def _chosen(source: Source, encoder: Encoder, notes: Notes) -> list[Text | None]:
    problems = Problems()
    parsed = parse(source, problems, encoder.options.prompt_repeated)
    problems.stop()
    notes.rows["doubled"] = {i for i, p in enumerate(parsed) if p.doubled}
    if any(not isinstance(p.chosen, str) for p in parsed):
        cells.require_template(source, encoder)
    if all(p.prompt is not None for p in parsed) or not isinstance(parsed[0].chosen, str):
        return _learn(source, encoder, [(p.prompt, p.chosen) for p in parsed], notes)
    # Two texts and no word on where the answer starts: it is where they part.
    none = [None] * len(parsed)
    chosen = encoder.whole(none, [p.chosen for p in parsed])
    rejected = encoder.whole(none, [p.rejected for p in parsed])
    return [_from(a, shared_prefix((a, b))) for a, b in zip(chosen, rejected, strict=True)]


def _conversations(source: Source, encoder: Encoder, notes: Notes) -> list[Text | None]:
    cells.require_template(source, encoder)
    rows = [messages for (messages,) in _checked(source, {"messages": True})]
    answered = [messages if cells.is_answered(messages) else [] for messages in rows]
    return _learn(source, encoder, [(None, messages) for messages in answered], notes)


def _learn(
    source: Source, encoder: Encoder, pairs: Sequence[tuple[Turns | None, Turns]], notes: Notes
) -> list[Text | None]:
    """Whole sequences: of texts, the tokens after those of the prompt are learned, of conversations the replies."""
    problems = Problems()
    texts: dict[int, tuple[tuple[str, bool], tuple[str, bool]]] = {}
    chats: dict[int, Written] = {}
    for i, (prompt, completion) in enumerate(pairs):
        if cells.is_blank(replied(completion)):
            continue
        turns = join(prompt, completion)
        if isinstance(turns, str):
            texts[i] = encoder.opening(prompt, completion), encoder.text(turns)
            continue
        first = len(turns) - (1 if isinstance(completion, str) else len(completion))
        try:
            tools, kept = cells.tools_of(source.rows[i]), replied(turns)
            kwargs = cells.kwargs_of(source.rows[i])
            chats[i] = encoder.replies(kept, tools=tools, kwargs=kwargs, first=first)
            notes.add("left_out", i, encoder.chat.leaves_out(kept, chats[i].text, tools))
        except InputError as error:
            problems.add(f"{source.where(i)}: {error}")
            continue
        notes.add("after_reply", i, len(kept) < len(turns))
        notes.add("unlike", i, not chats[i].follows)
        notes.add("unlearned", i, not chats[i].complete)
    problems.stop()
    out: list[Text | None] = [None] * len(pairs)
    before = encoder.opened([opening for opening, _ in texts.values()])
    whole = encoder.tokenize([text for _, text in texts.values()])
    for i, start, ids in zip(texts, before, whole, strict=True):
        tokens = encoder.ended(ids)
        out[i] = _from(tokens, first_after(start, tokens))
    for i, (tokens, learned) in zip(chats, encoder.learned(list(chats.values())), strict=True):
        out[i] = Text(tokens, learned.astype(np.float32))
    return out


def _from(tokens: Ints, first: int) -> Text:
    weights = np.ones(len(tokens), np.float32)
    weights[:first] = 0.0
    return Text(tokens, weights)


def _checked(
    source: Source, columns: Mapping[str, bool], answered: str | None = None
) -> list[tuple[Any, ...]]:
    """The columns' values of every row. columns: {name: whether it holds conversations}. answered: one of them that
    has to have a reply.
    """
    problems = Problems()
    for i, row in enumerate(source.rows):
        for column, chat in columns.items():
            problem = cells.cell_problem(row, column, chat)
            if problem is None and column == answered:
                problem = cells.unanswered(row, column, "learned")
            if problem:
                problems.add(f"{source.where(i)}: {problem}")
    problems.stop()
    return [tuple(row[column] for column in columns) for row in source.rows]


_READERS = {
    ("messages",): _conversations,
    ("prompt", "completion"): _completions,
    ("text",): _plain_texts,
    ("chosen", "rejected"): _chosen,
}
"""In this order: the first whose columns are all there reads the source."""
