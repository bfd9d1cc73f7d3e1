"""Demonstrations: texts and conversations, with a weight on every token that is to be learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data import conversations as cells
from rlhf_core.data.cache import Arrays, Tokens, flat, ragged
from rlhf_core.data.notes import Notes
from rlhf_core.data.parsing import begins_with, number_of, parse, without_prompts
from rlhf_core.data.report import Problems, Report
from rlhf_core.data.source import Records, Source
from rlhf_core.data.tokens import Seen, combined, digest64, digest_ids
from rlhf_core.encoding import Encoder, Ints, TextOptions, Turns, first_after, join, replied
from rlhf_core.errors import InputError
from rlhf_core.rows import Tree, shared_prefix
from rlhf_core.templates import Written

ACCEPTED = (
    "text; prompt + completion, as texts or conversations; messages; or preferences, of which the chosen "
    "completion is learned"
)


NOTES = ("doubled", "after_reply", "left_out", "unlike", "unlearned")
"""The lists of a `Report` that say what is particular about rows that are kept."""


class Text(NamedTuple):
    """One demonstration."""

    tokens: Ints
    """int32 [n], EOS last."""
    weights: NDArray[np.float32]
    """float32 [n]: 1 where the token is learned, 0 in prompts."""


@dataclass(frozen=True)
class Texts:
    """Encoded demonstrations."""

    texts: list[Text]
    report: Report
    places: list[str]
    values: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """{column: float32 [texts]}: the columns of numbers that were asked for."""

    def __len__(self) -> int:
        return len(self.texts)

    def where(self, i: int) -> str:
        """Names the row of text `i`, such as "corpus.jsonl row 17"."""
        return self.places[i]

    def trees(self) -> list[Tree]:
        """Each text as a tree of one branch; `values` are the values of its sequence."""
        return [
            Tree(
                tokens[:0], (tokens,), (weights,), sequence_values={n: v[[i]] for n, v in self.values.items()}
            )
            for i, (tokens, weights) in enumerate(self.texts)
        ]

    @property
    def fingerprint(self) -> str:
        """Of what is trained on: tokens, weights and values, in order."""
        weights = (text.weights for text in self.texts)
        return digest_ids([text.tokens for text in self.texts], *weights, *self.values.values())

    def row_digests(self) -> NDArray[np.uint64]:
        """uint64 [texts]: of what is trained on in each row: its tokens, which of them are learned, and its values."""
        tokens = np.array([digest64(text.tokens) for text in self.texts], np.uint64)
        learned = np.array([digest64((text.weights != 0).astype(np.uint8)) for text in self.texts], np.uint64)
        return combined(tokens, learned, *(values.astype(np.float64) for values in self.values.values()))


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
    `rlhf_core.templates` finds them. Preferences: as prompt + completion with the chosen one.

    max_length: tokens; longer rows are dropped ("filter") or cut ("truncate", by `truncation_mode`).
    chat_template: as in `template_text`, or all options of `TextOptions`.
    values: columns of numbers, one a text, which an objective reads as `batch.sequence_values[column]`.
    Raises InputError naming file and row of the first few problems, and where no text is left.
    """
    cells.check_overlong(overlong)
    problems = Problems()
    numbers: dict[str, list[float]] = {column: [] for column in values}
    encoder = Encoder(tokenizer, chat_template)
    report = Report("texts", max_length)
    known, seen = Tokens("texts", encoder), Seen(report, tokenizer)
    texts: list[Text] = []
    places: list[str] = []
    lengths: list[int] = []
    for source in records.sources:
        encoded = known.of(source, partial(_encode, source, encoder))
        notes = Notes.of(encoded, NOTES)
        columns = read_columns(source)
        untemplated = len(columns) > 1 and cells.skips_template(source, encoder, *columns)
        for i, text in enumerate(map(Text, ragged(encoded, "tokens"), ragged(encoded, "weights"))):
            report.total += 1
            place = source.where(i)
            if not text.weights[1:].any():
                report.empty.append(place)
                continue
            lengths.append(len(text.tokens))
            if max_length is not None and len(text.tokens) > max_length:
                if overlong == "truncate":
                    text = Text(
                        cells.cut(text.tokens, max_length, truncation_mode),
                        cells.cut(text.weights, max_length, truncation_mode),
                    )
                if overlong == "filter" or not text.weights[1:].any():
                    report.filtered.append(place)
                    continue
                report.truncated.append(place)
            notes.tell(i, place, report)
            report.untemplated += [place] * untemplated
            seen.note(place, text.tokens)
            texts.append(text)
            places.append(place)
            for column, found in numbers.items():
                found.append(number_of(source.rows[i], column, place, problems))
    problems.stop()
    report.kept = len(texts)
    report.require_some(records.name, lengths, "max_sequence_length")
    return Texts(
        texts, report, places, {name: np.array(found, np.float32) for name, found in numbers.items()}
    )


def _encode(source: Source, encoder: Encoder) -> Arrays:
    """Tokens and weights of every row, none where there is nothing to learn; the rows that something is said of."""
    notes = Notes(NOTES)
    texts = _READERS[read_columns(source)](source, encoder, notes)
    return {
        **flat("tokens", [None if text is None else text.tokens for text in texts]),
        **flat("weights", [None if text is None else text.weights for text in texts], np.float32),
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
