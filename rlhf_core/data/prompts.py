"""Encode prompts for rollouts, with the columns for reward functions; or the rows that episodes begin with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import rlhf_core.data.columns as columns
from rlhf_core.contracts import REWARD
from rlhf_core.data.cache import Arrays, Ragged, TokenCache, flatten
from rlhf_core.data.encoded import Limit, Notes, RowForm, require_vocabulary, select
from rlhf_core.data.report import Problems, Report
from rlhf_core.data.source import Example, Source, State
from rlhf_core.data.table import Places, Records, Table, cells, mapped
from rlhf_core.errors import InputError
from rlhf_core.packing.trees import Tree
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

    def trees(self) -> list[Tree]:
        """Return each prompt as a tree without branches."""
        return [Tree(ids, ()) for ids in self.ids]

    @staticmethod
    def raw_of(row: Mapping[str, Any]) -> Turns:
        """Return the prompt of a row, as in the data."""
        prompt: Turns = row["prompt"]
        return prompt


def encode_prompts(
    records: Records,
    tokenizer: Any,
    *,
    max_prompt_length: int | None,
    overlong: str = "filter",
    truncation_mode: str = "keep_end",
    chat_template: str | TextOptions | None = None,
    part: bool = False,
) -> Prompts:
    """Tokenise prompts; conversations end with an open assistant turn.

    Of rows with `messages` alone, the prompt is the conversation without the replies at its end, see `as_prompts`.
    chat_template: as in `template_text`, or all options as `TextOptions`.
    max_prompt_length: tokens; longer prompts are dropped ("filter") or cut by `truncation_mode` ("truncate").
    part: as in `select`.
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
    encode = partial(_encode, encoder=encoder, chat=chat[0])
    form = RowForm(
        "prompts", ("ids",), NOTES, encode, lambda rows: rows.longest > 0, lambda table: ("prompt",)
    )
    limit = Limit(max_prompt_length, overlong, truncation_mode, "max_prompt_length")
    chosen = select(records, TokenCache("prompts", encoder), form, limit, part=part)
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


def _encode(table: Table, encoder: Encoder, chat: bool) -> Arrays:
    """Tokenise every row; an empty text has no ids if the tokenizer adds no special tokens."""
    if "prompt" not in table.columns:
        raise columns.missing_columns(table, ("prompt",), ACCEPTED, *FORMATS)
    if chat:
        columns.require_template(table, encoder)
    problems = Problems()
    texts: list[tuple[str, bool]] = []
    notes = Notes(NOTES)
    for i, row in enumerate(table.rows):
        if problem := columns.cell_problem(row, "prompt", chat):
            problems.add(f"{table.where(i)}: {problem}")
            continue
        try:
            tools, kwargs = columns.tools_of(row), columns.kwargs_of(row)
            texts.append(encoder.text(row["prompt"], open_turn=True, tools=tools, kwargs=kwargs))
            if chat:
                notes.add_unwritten(i, encoder, row["prompt"], texts[-1][0], tools, kwargs)
        except InputError as error:
            problems.add(f"{table.where(i)}: {error}")
    problems.raise_if_any()
    return {**flatten("ids", encoder.tokenize_open(texts)), **notes.arrays()}


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
        if problem or not _without_last_replies(row):
            wrong = problem or "'messages' has no turn to reply to"
            problems.add(f"{table.where(i)}: {wrong}")
    problems.raise_if_any()
    rows = mapped(table.rows, lambda row: {**row, "prompt": _without_last_replies(row)})
    return table.derived(rows, "messages", {**table.kinds, "prompt": table.kind("messages")})


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
        return mapped(self.records, self.raw_of)

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
        return cells(self.records, np.arange(len(self.records)), name)


class PromptStream:
    """Prompts, or rows of episodes, that are read in order, in the place of `Prompts` or `EpisodeRows`.

    Row i is the i-th of the stream that is used. Those of the sample stay in memory, and are counted and iterated; of
    later ones those from the newest `begin` on.
    """

    def __init__(self, source: Source, max_prompt_length: int) -> None:
        self._source, self.max_prompt_length = source, max_prompt_length
        self.sample: Prompts | EpisodeRows = source.sample
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
        self.raw = _OfRows(self, lambda example: self.sample.raw_of(example.columns))
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


AnyPrompts: TypeAlias = Prompts | EpisodeRows | PromptStream
