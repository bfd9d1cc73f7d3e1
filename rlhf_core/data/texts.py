"""Demonstrations: texts and conversations, with a weight on every token that is to be learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data import conversations as cells
from rlhf_core.data.cache import Arrays, Tokens, flat, ragged
from rlhf_core.data.parsing import begins_with, parse
from rlhf_core.data.report import Problems, Report
from rlhf_core.data.source import Records, Source
from rlhf_core.data.tokens import Seen, digest_ids
from rlhf_core.encoding import Encoder, Ints, Message, Turns, join
from rlhf_core.errors import InputError
from rlhf_core.rows import Tree, shared_prefix

ACCEPTED = (
    "text; prompt + completion, as texts or conversations; messages; or preferences, of which the chosen "
    "completion is learned"
)


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

    def __len__(self) -> int:
        return len(self.texts)

    def where(self, i: int) -> str:
        """Names the row of text `i`, such as "corpus.jsonl row 17"."""
        return self.places[i]

    def trees(self) -> list[Tree]:
        """Each text as a tree of one branch."""
        return [Tree(tokens[:0], (tokens,), (weights,)) for tokens, weights in self.texts]

    @property
    def fingerprint(self) -> str:
        """Of what is trained on: tokens and weights, in order."""
        return digest_ids([text.tokens for text in self.texts], *(text.weights for text in self.texts))


def encode_texts(
    records: Records,
    tokenizer: Any,
    *,
    max_length: int | None,
    overlong: str = "filter",
    truncation_mode: str = "keep_end",
    chat_template: str | None = None,
) -> Texts:
    """Tokenise demonstrations. Which tokens are learned depends on the columns:

    text: all. prompt + completion: the completion's. messages: what the assistant wrote, in every turn where
    the chat template has {% generation %} marks (as "plain" has), else in the last. Preferences: as prompt +
    completion with the chosen one.

    max_length: tokens; longer rows are dropped ("filter") or cut ("truncate", by `truncation_mode`).
    Raises InputError naming file and row of the first few problems, and where no text is left.
    """
    cells.check_overlong(overlong)
    encoder = Encoder(tokenizer, chat_template)
    report = Report("texts", max_length)
    known, seen = Tokens("texts", encoder), Seen(report)
    texts: list[Text] = []
    places: list[str] = []
    lengths: list[int] = []
    for source in records.sources:
        encoded = known.of(source, partial(_arrays, source, encoder))
        doubled = set(encoded["doubled"].tolist())
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
            if i in doubled:
                report.doubled.append(place)
            seen.note(place, text.tokens)
            texts.append(text)
            places.append(place)
    report.kept = len(texts)
    report.require_some(records.name, lengths, "max_sequence_length")
    return Texts(texts, report, places)


def _arrays(source: Source, encoder: Encoder) -> Arrays:
    """Tokens and weights of every row, none where there is nothing to learn; the doubled rows."""
    texts = _encode(source, encoder)
    rows = source.rows if read_columns(source) == ("prompt", "completion") else ()
    return {
        **flat("tokens", [None if text is None else text.tokens for text in texts]),
        **flat("weights", [None if text is None else text.weights for text in texts], np.float32),
        "doubled": np.flatnonzero([begins_with(row["prompt"], row["completion"]) for row in rows]),
    }


def _encode(source: Source, encoder: Encoder) -> list[Text | None]:
    """A text for every row, None where there is nothing to learn."""
    return _READERS[read_columns(source)](source, encoder)


def read_columns(source: Source) -> tuple[str, ...]:
    """The columns that demonstrations are read from. Raises InputError where there are none."""
    columns = set(source.columns)
    found = next((names for names in _READERS if set(names) <= columns), None)
    if found is None:
        wanted = ("prompt", "completion") if columns & {"prompt", "completion"} else ("text",)
        raise cells.missing(source, wanted, ACCEPTED)
    return found


def _plain_texts(source: Source, encoder: Encoder) -> list[Text | None]:
    values = _checked(source, {"text": False})
    used = [i for i, (text,) in enumerate(values) if text.strip()]
    out: list[Text | None] = [None] * len(values)
    ids = encoder.whole([None] * len(used), [values[i][0] for i in used])
    for i, tokens in zip(used, ids, strict=True):
        out[i] = Text(tokens, np.ones(len(tokens), np.float32))
    return out


def _completions(source: Source, encoder: Encoder) -> list[Text | None]:
    chat = {name: cells.is_chat(source, name) for name in ("prompt", "completion")}
    if any(chat.values()):
        cells.require_template(source, encoder)
    return _learn_completions(source, encoder, list(_checked(source, chat)))


def _chosen(source: Source, encoder: Encoder) -> list[Text | None]:
    problems = Problems()
    parsed = parse(source, problems)
    problems.stop()
    if any(not isinstance(p.chosen, str) for p in parsed):
        cells.require_template(source, encoder)
    if all(p.prompt is not None for p in parsed):
        return _learn_completions(source, encoder, [(p.prompt, p.chosen) for p in parsed])
    if not isinstance(parsed[0].chosen, str):
        return _learn_turns(source, encoder, [p.chosen for p in parsed if not isinstance(p.chosen, str)])
    # Two texts and no word on where the answer starts: it is where they part.
    none = [None] * len(parsed)
    chosen = encoder.whole(none, [p.chosen for p in parsed])
    rejected = encoder.whole(none, [p.rejected for p in parsed])
    return [_from(a, shared_prefix((a, b))) for a, b in zip(chosen, rejected, strict=True)]


def _conversations(source: Source, encoder: Encoder) -> list[Text | None]:
    cells.require_template(source, encoder)
    return _learn_turns(source, encoder, [messages for (messages,) in _checked(source, {"messages": True})])


def _learn_turns(
    source: Source, encoder: Encoder, conversations: Sequence[Sequence[Message]]
) -> list[Text | None]:
    """What the assistant wrote; turns after its last one are left out."""
    ended: list[Sequence[Message]] = []
    for turns in conversations:
        wrote = [k for k, turn in enumerate(turns) if turn["role"] == "assistant"]
        ended.append(list(turns[: wrote[-1] + 1]) if wrote else [])
    if not encoder.marks_turns:
        return _learn_completions(source, encoder, [(turns[:-1], turns[-1:]) for turns in ended])
    out: list[Text | None] = [None] * len(ended)
    problems = Problems()
    for i, turns in enumerate(ended):
        if not turns or cells.is_blank(turns):
            continue
        try:
            tokens, written = encoder.marked(turns, cells.tools_of(source.rows[i]))
        except InputError as error:
            problems.add(f"{source.where(i)}: {error}")
            continue
        out[i] = Text(tokens, written.astype(np.float32))
    problems.stop()
    return out


def _learn_completions(
    source: Source, encoder: Encoder, pairs: Sequence[tuple[Turns | None, Turns]]
) -> list[Text | None]:
    """Whole sequences of which the tokens after those of the prompt are learned."""
    problems = Problems()
    prompts: list[tuple[str, bool]] = []
    whole: list[tuple[str, bool]] = []
    used: list[int] = []
    for i, (prompt, completion) in enumerate(pairs):
        if cells.is_blank(completion):
            continue
        try:
            tools = cells.tools_of(source.rows[i])
            joined = encoder.text(join(prompt, completion), tools=tools)
            chat = not isinstance(join(prompt, completion), str)
            opened = [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt
            prompts.append(encoder.text(opened, open_turn=True, tools=tools) if opened else ("", joined[1]))
            whole.append(joined)
            used.append(i)
        except InputError as error:
            problems.add(f"{source.where(i)}: {error}")
    problems.stop()
    out: list[Text | None] = [None] * len(pairs)
    before, after = encoder.opened(prompts), [encoder.ended(ids) for ids in encoder.tokenize(whole)]
    for i, start, tokens in zip(used, before, after, strict=True):
        out[i] = _from(tokens, shared_prefix((np.append(start, np.int32(-1)), tokens)))
    return out


def _from(tokens: Ints, first: int) -> Text:
    weights = np.ones(len(tokens), np.float32)
    weights[:first] = 0.0
    return Text(tokens, weights)


def _checked(source: Source, columns: Mapping[str, bool]) -> list[tuple[Any, ...]]:
    """The columns' values of every row. columns: {name: whether it holds conversations}."""
    problems = Problems()
    for i, row in enumerate(source.rows):
        for column, chat in columns.items():
            if problem := cells.cell_problem(row, column, chat):
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
