"""Encode prompts for rollouts, with the columns for reward functions; or the rows that episodes begin with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import rlhf_core.data.columns as columns
from rlhf_core.contracts import REWARD
from rlhf_core.data.cache import Arrays, flatten
from rlhf_core.data.examples import Examples, Limit, RowKind, encode, require_vocabulary
from rlhf_core.data.parts import Notes, Parts, for_each, parse_rows, raise_problems
from rlhf_core.data.report import Problems, Report
from rlhf_core.data.source import Example, Source, State
from rlhf_core.data.table import Records, Table, View
from rlhf_core.errors import InputError
from rlhf_core.packing.trees import Tree
from rlhf_core.tokenizer.encoding import Encoder, TextOptions

FORMATS = (("prompt",), ("messages",))
ACCEPTED = (
    "prompt, as text or a conversation, or messages; every other column is passed to the reward functions"
)


def encode_prompts(
    records: Records,
    tokenizer: Any,
    *,
    max_prompt_length: int | None,
    overlong: str = "filter",
    truncation_mode: str = "keep_end",
    chat_template: str | TextOptions | None = None,
    part: bool = False,
) -> Examples:
    """Tokenise prompts; conversations end with an open assistant turn.

    Of rows with `messages` alone, the prompt is the conversation without the replies at its end, see `as_prompts`.
    chat_template: as in `template_text`, or all options as `TextOptions`.
    max_prompt_length: tokens; longer prompts are dropped ("filter") or cut by `truncation_mode` ("truncate").
    part: as in `examples.encode`.
    Raises InputError naming file and row of the first few problems, and if no prompt is left.
    """
    records = as_prompts(records)
    encoder = Encoder.of(tokenizer, chat_template)
    reserved = [name for name in REWARD.arguments if name in records.columns]
    if reserved:
        taken = ", ".join(map(repr, reserved))
        raise InputError(f"{records.name}: rename column {taken}: reward functions are called with that name")
    chat = [columns.is_chat(table, "prompt") for table in records.tables]
    if len(set(chat)) > 1:
        names = [records.tables[chat.index(kind)].name for kind in (True, False)]
        raise InputError(
            f"the prompts of {names[0]} are conversations and those of {names[1]} texts: use one kind"
        )
    limit = Limit(max_prompt_length, overlong, truncation_mode, "max_prompt_length")
    kind = RowKind(
        "prompts",
        "prompts",
        ("ids",),
        0,
        ("left_out",),
        partial(_encode, encoder=encoder, chat=chat[0]),
        used_columns,
        passes_others=True,
    )
    return encode(records, encoder, kind, limit, part=part)


def used_columns(table: Table) -> tuple[str, ...]:
    """List the columns that prompts are made of."""
    return ("prompt", *columns.FOR_TEMPLATES) if columns.is_chat(table, "prompt") else ("prompt",)


def _encode(table: Table, notes: Notes, problems: Problems, *, encoder: Encoder, chat: bool) -> Arrays:
    """Tokenise every row; an empty text has no ids if the tokenizer adds no special tokens."""
    if "prompt" not in table.columns:
        raise columns.missing_columns(table, ("prompt",), ACCEPTED, *FORMATS)
    texts: list[tuple[str, bool]] = []

    def parse(row: Mapping[str, Any]) -> Parts:
        raise_problems([columns.cell_problem(row, "prompt", chat)])
        return Parts(row["prompt"], ()).with_template_values(row)

    def write(i: int, parts: Parts) -> None:
        prompt: Any = parts.prompt
        texts.append(encoder.text(prompt, open_turn=True, tools=parts.tools, kwargs=parts.kwargs))
        if chat:
            notes.add_unwritten(i, encoder, prompt, texts[-1][0], parts)

    for_each(table, parse_rows(table, parse, problems), encoder, write)
    return flatten("ids", encoder.tokenize_open(texts))


def as_prompts(records: Records) -> Records:
    """Add a `prompt` to rows with `messages` only: the conversation without the assistant turns at its end.

    Raises InputError naming rows with invalid conversations, and those without a turn to reply to.
    """
    return Records([_add_prompts(table) for table in records.tables])


def _add_prompts(table: Table) -> Table:
    if "prompt" in table.columns or "messages" not in table.columns:
        return table
    problems = Problems()
    for i, row in enumerate(table.rows):
        problem = columns.cell_problem(row, "messages", chat=True)
        if problem or not without_last_replies(row["messages"]):
            wrong = problem or "'messages' has no turn to reply to"
            problems.add(f"{table.where(i)}: {wrong}")
    problems.raise_if_any()
    return table.changed(
        lambda row: {**row, "prompt": without_last_replies(row["messages"])},
        "messages",
        {**table.kinds, "prompt": table.kind("messages")},
    )


def without_last_replies(messages: Sequence[Any]) -> list[Any]:
    """Return a conversation without the assistant turns at its end."""
    turns = list(messages)
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    return turns


@dataclass(frozen=True)
class EpisodeRows:
    """Rows of a dataset in the place of encoded prompts: an environment makes each prompt when its episode begins.

    max_prompt_length: tokens; no prompt is longer.
    """

    records: Records
    max_prompt_length: int

    def __len__(self) -> int:
        return len(self.records)

    def where(self, i: int) -> str:
        """Name row `i`, such as "tasks.jsonl row 17"."""
        return self.records.where(i)

    def row(self, i: int) -> Mapping[str, Any]:
        """Return row `i` as in the data."""
        row: Mapping[str, Any] = self.records[i]
        return row

    @property
    def rows(self) -> NDArray[np.int64]:
        """int64 [rows]: index of each row in the records."""
        return np.arange(len(self))

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
        columns: dict[str, Sequence[Any]] = {name: self.records.column(name) for name in names}
        return {**columns, "environment_rewards": [None] * len(self)}

    chat = True
    """Completions are conversations."""

    @property
    def raw(self) -> Sequence[Any]:
        """Each row's prompt as messages, as an environment may begin with it."""
        return View.of(self.records).changed(self.raw_of)

    @staticmethod
    def raw_of(row: Mapping[str, Any]) -> Any:
        """Return a row's prompt as messages; a row without one gives an empty message."""
        prompt = row.get("prompt") or ""
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    @property
    def report(self) -> Report:
        return Report("rows", None, total=len(self), kept=len(self))

    def trees(self) -> list[Tree]:
        """Return a tree without tokens for each row."""
        return [Tree(np.zeros(0, np.int32), ())] * len(self)


def episode_rows(
    records: Records,
    tokenizer: Any,
    *,
    max_prompt_length: int,
    chat_template: TextOptions | None = None,
    part: bool = False,
) -> EpisodeRows:
    """Make `EpisodeRows` of rows, by the signature of `encode_prompts`."""
    return EpisodeRows(records, max_prompt_length)


@dataclass(frozen=True)
class UntokenizedPrompts:
    """Prompts whose tokenizer is not on this machine yet, with the fields that rewards use.

    records: None: of a stream, which is not read.
    """

    records: Records | None

    def __len__(self) -> int:
        """Return how many there are; 0 where that is not known."""
        return 0 if self.records is None else len(self.records)

    def where(self, i: int) -> str:
        """Name the row of prompt `i`, such as "prompts.jsonl row 17"."""
        assert self.records is not None
        return self.records.where(i)

    @cached_property
    def raw(self) -> Sequence[Any]:
        """Each prompt as in the data."""
        return self._cells("prompt")

    @property
    def chat(self) -> bool:
        """Whether the prompts are conversations."""
        tables = [] if self.records is None else self.records.tables
        return any(columns.is_chat(table, "prompt") for table in tables if "prompt" in table.columns)

    @cached_property
    def columns(self) -> dict[str, Sequence[Any]]:
        """The other columns."""
        names = () if self.records is None else self.records.columns
        return {name: self._cells(name) for name in names if name != "prompt"}

    def _cells(self, name: str) -> Sequence[Any]:
        assert self.records is not None
        return self.records.column(name)


class PromptStream:
    """Prompts, or rows of episodes, that are read in order, in the place of encoded prompts or `EpisodeRows`.

    Row i is the i-th of the stream that is used. Those of the sample stay in memory, and are counted and iterated; of
    later ones those from the newest `begin` on.
    """

    def __init__(self, source: Source, max_prompt_length: int) -> None:
        self._source, self.max_prompt_length = source, max_prompt_length
        self.sample: Examples | EpisodeRows = source.sample
        self._sampled = [each for each in source.first() if isinstance(each, Example)]
        self.chat = self.sample.chat
        self.vocabulary: int | None = None
        """Embeddings of the model, which later prompts are compared with."""
        self._start: tuple[int, State] = 0, source.state
        """A row, and the position of the stream before it."""
        self._read: list[tuple[State, Example]] = []
        """Positions with the rows after them, from the newest `begin` on."""
        self._lock = threading.RLock()  # rollouts that are sampled ahead read in threads of their own
        self.ids = _OfRows(self, lambda example: example.tree.prefix)
        raw_of = EpisodeRows.raw_of if isinstance(self.sample, EpisodeRows) else itemgetter("prompt")
        self.raw = _OfRows(self, lambda example: raw_of(example.columns))
        self.columns = {name: _OfRows(self, partial(_cell, name)) for name in self.sample.columns}

    def __len__(self) -> int:
        """Return the rows of the sample."""
        return len(self.sample)

    @property
    def report(self) -> str:
        """What is known of the rows."""
        return str(self._source.report)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """int64: tokens of the sample's prompts, and the most that a later one may have."""
        return np.append(self.sample.sizes, self.max_prompt_length)

    def where(self, i: int) -> str:
        """Name row `i`, such as "prompts.jsonl row 17"."""
        return self.example(i).where

    def row(self, i: int) -> Mapping[str, Any]:
        """Return row `i` as in the data."""
        return self.example(i).columns

    def example(self, i: int) -> Example:
        """Return row `i`, reading as far as it; one before the newest `begin` must be of the sample."""
        if i < len(self.sample):
            return self._sampled[i]
        with self._lock:
            first = self._start[0]
            while first + len(self._read) <= i:
                state = self._source.state
                self._read += [(state, example) for example in self._source.next(1)]
            example = self._read[i - first][1]
        if self.vocabulary is not None:
            require_vocabulary([example.tree], lambda _: example.where, self.vocabulary)
        return example

    def begin(self, i: int) -> None:
        """Forget the rows before row `i`, but for those of the sample."""
        if i < len(self.sample):
            return
        with self._lock:
            self.example(i)
            self._read = self._read[i - self._start[0] :]
            self._start = i, self._read[0][0]

    def snapshot(self) -> list[Any]:
        """Return the newest `begin`, with the position of the stream there, as JSON."""
        return list(self._start)

    def restore(self, saved: Sequence[Any]) -> None:
        """Continue from a `snapshot`."""
        row, position = saved
        self._source.restore(position or {"at": {}})  # none in an earlier version, at the start
        self._start, self._read = (row, self._source.state), []


class _OfRows(Sequence[Any]):
    """A value of each row of a stream."""

    def __init__(self, stream: PromptStream, of: Callable[[Example], Any]) -> None:
        self._stream, self._of = stream, of

    def __len__(self) -> int:
        return len(self._stream)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        return self._of(self._stream.example(int(i)))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))


def _cell(name: str, example: Example) -> Any:
    return example.columns.get(name)


AnyPrompts: TypeAlias = Examples | EpisodeRows | PromptStream
