"""Numbered rows of one file or dataset with counts of what their columns hold, and of several as one sequence."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.runtime.signals import stop_if_asked
from rlhf_core.tokenizer.options import is_parts

CHUNK = 2048
"""Rows in memory as objects at a time, while a table is encoded."""


@dataclass(frozen=True)
class Table:
    """The rows of one file or dataset."""

    name: str
    """What messages call it."""
    rows: Sequence[Mapping[str, Any]]
    """Read on access, unless they are a list."""
    numbers: Sequence[int] | NDArray[np.int64]
    """From 1, of each row: its line in jsonl and txt files, else its place among the rows, after the header of a csv;
    repeated rows repeat their number."""
    fingerprint: str
    """Hash of the content; empty: not known, and token ids are not cached."""
    known_kinds: Kinds | None = None
    """`kinds`, if they are known already."""
    remarks: tuple[str, ...] = field(default=())
    """Descriptions of columns that are renamed or converted on reading."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """{column: what the data call it}, of columns that are renamed."""
    origin: str = ""
    """Fingerprint of the data that these rows were derived from; empty if they are the original."""

    @property
    def original(self) -> str:
        return self.origin or self.fingerprint

    @cached_property
    def kinds(self) -> Kinds:
        """Counts of what each column holds, over all rows."""
        if self.known_kinds is not None:
            return self.known_kinds
        return count_kinds(row for _, chunk in self.chunks(self.rows) for row in chunk)

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that any row has, in order of appearance."""
        return tuple(self.kinds)

    def kind(self, column: str) -> ColumnKind:
        return self.kinds.get(column) or ColumnKind()

    def where(self, i: int) -> str:
        return f"{self.name} row {self.numbers[i]}"

    def take(self, indices: Sequence[int] | NDArray[np.int64], how: str) -> Table:
        """Select rows, in this order and with repeats. how: describes the selection in the fingerprint."""
        which = np.asarray(indices, np.int64)
        has_all = len(np.unique(which)) == len(self.rows)
        numbers = np.asarray(self.numbers, np.int64)[which]
        kinds = self.kinds if has_all else None
        return self.derived(View.of(self.rows).chosen(which), how, kinds, numbers)

    def changed(
        self, change: Callable[[Mapping[str, Any]], Mapping[str, Any]], how: str, kinds: Kinds
    ) -> Table:
        """Change every row by a function on access. how: as of `derived`. kinds: of the changed rows."""
        return self.derived(View.of(self.rows).changed(change), how, kinds)

    def part(self, start: int, stop: int) -> Table:
        """Read a range of rows into memory; the part keeps the columns of the whole table."""
        return self.derived(self.rows[start:stop], f"{start}:{stop}", self.kinds, self.numbers[start:stop])

    def derived(self, rows: Sequence[Any], how: str, kinds: Kinds | None, numbers: Any = None) -> Table:
        """Make a table of rows derived from these. how: describes what was done, for the fingerprint.

        kinds: as of `known_kinds`. numbers: of the rows; None: as here.
        """
        return replace(
            self,
            rows=rows,
            numbers=self.numbers if numbers is None else numbers,
            fingerprint=digest(self.fingerprint, how),
            known_kinds=kinds,
            origin=self.original,
        )

    def parts(self, size: int = CHUNK) -> Iterator[Table]:
        """Yield all rows in parts of `size`."""
        for start in range(0, len(self.rows), size):
            yield self.part(start, start + size)

    @staticmethod
    def chunks(rows: Sequence[Any]) -> Iterator[tuple[int, Sequence[Any]]]:
        """Yield (start, rows) in chunks. Raises Stopped between chunks if the run was asked to stop."""
        for start in range(0, len(rows), CHUNK):
            stop_if_asked("while data was read")
            yield start, rows[start : start + CHUNK]


class Records(Sequence[Mapping[str, Any]]):
    """The rows of several tables as one sequence."""

    def __init__(self, tables: Sequence[Table]) -> None:
        """Number tables that share a name but hold different data: "dataset 2"."""
        self.tables = tuple(_number_same_names(tables))
        self._ends = list(itertools.accumulate(len(table.rows) for table in self.tables))

    @property
    def name(self) -> str:
        return ", ".join(dict.fromkeys(table.name for table in self.tables))

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that any row has."""
        return tuple(dict.fromkeys(itertools.chain.from_iterable(s.columns for s in self.tables)))

    @property
    def fingerprint(self) -> str:
        """Hash of the content of all tables, in order."""
        return digest(*(table.fingerprint for table in self.tables))

    @property
    def remarks(self) -> list[str]:
        """Descriptions of columns that are renamed or converted on reading."""
        return [f"{table.name}: {remark}" for table in self.tables for remark in table.remarks]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        table, k = self.find(range(len(self))[i])
        return table.rows[k]

    def where(self, i: int) -> str:
        """Name row `i`, such as "prefs.jsonl row 17"."""
        table, k = self.find(range(len(self))[i])
        return table.where(k)

    def column(self, name: str, rows: NDArray[np.int64] | None = None) -> View:
        """View a column, read on access; None where a row lacks it. rows: int64 [n], indices; None: all rows."""
        cells = View(len(self), lambda which: [self[i].get(name) for i in which])
        return cells if rows is None else cells.chosen(rows)

    def offsets(self) -> list[int]:
        """Return the index of each table's first row."""
        return [0, *self._ends[:-1]]

    def identities(self) -> NDArray[np.int64]:
        """Give each row a number that is the same for the same name, int64 [rows]."""
        names: dict[str, int] = {}
        numbers = [
            np.asarray(table.numbers, np.int64) + (names.setdefault(table.name, len(names)) << 40)
            for table in self.tables
        ]
        whole: NDArray[np.int64] = np.concatenate(numbers)
        return whole

    def find(self, i: int) -> tuple[Table, int]:
        """Return the table of row `i`, and the row's index there."""
        at = bisect.bisect_right(self._ends, i)
        return self.tables[at], i - (self._ends[at - 1] if at else 0)


def _number_same_names(tables: Sequence[Table]) -> Iterator[Table]:
    """Number tables that share a name but hold different data; a file given twice is the same data."""
    data: dict[str, list[str]] = {}
    for table in tables:
        same = data.setdefault(table.name, [])
        if table.original not in same:
            same.append(table.original)
    for table in tables:
        same = data[table.name]
        yield (
            replace(table, name=f"{table.name} {same.index(table.original) + 1}") if len(same) > 1 else table
        )


class View(Sequence[Any]):
    """A sequence whose items are made on access."""

    def __init__(self, size: int, take: Callable[[Sequence[int]], list[Any]]) -> None:
        """take: makes the items at some indices, a range or a list of them."""
        self.size, self.take = size, take

    @classmethod
    def of(cls, rows: Sequence[Any]) -> View:
        return rows if isinstance(rows, View) else cls(len(rows), lambda which: [rows[i] for i in which])

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: Any) -> Any:
        which = range(self.size)[i]
        return self.take(which) if isinstance(which, range) else self.take([which])[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def changed(self, change: Callable[[Any], Any]) -> View:
        """View the items with each changed by a function on access."""
        return View(len(self), lambda which: [change(item) for item in self.take(which)])

    def chosen(self, indices: NDArray[np.int64]) -> View:
        """View some of the items, in any order and with repeats."""
        return View(len(indices), lambda which: self.take(indices[which].tolist()))


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def json_text(value: Any) -> str:
    """Encode a row as JSON, keys in their order, including values that JSON cannot represent."""
    return json.dumps(value, default=_to_plain)


def _to_plain(value: Any) -> Any:
    """Convert a value that JSON cannot represent; an array becomes a list, since its `str` omits elements."""
    return value.tolist() if hasattr(value, "tolist") else f"{type(value).__qualname__} {value}"


CONVERSATIONS = ("prompt", "completion", "chosen", "rejected", "messages", "conversations")
"""Columns that may hold conversations."""
ROLES = {"human": "user", "gpt": "assistant"}
"""{ShareGPT's role: the role that chat templates know}."""


@dataclass
class ColumnKind:
    """Counts of the values of a column; nulls are not counted."""

    texts: int = 0
    lists: int = 0
    text_first: bool = False
    """Whether the first value is a text."""
    json_texts: int = 0
    """Texts that are a conversation's JSON."""
    python_texts: int = 0
    """Texts that are a conversation's `str()` in Python, which is not JSON."""
    sharegpt: int = 0
    """Conversations in ShareGPT's format: messages have `from` and `value`, or roles of `ROLES`."""
    parts: int = 0
    """Conversations in which a content is a list of parts."""
    others: int = 0
    """Values that are not text, a list or null."""

    @property
    def total(self) -> int:
        return self.texts + self.lists + self.others

    @property
    def chat(self) -> bool:
        """Whether the column holds conversations: most values are lists, or half of them and the first one."""
        return self.lists > self.texts or (self.lists == self.texts > 0 and not self.text_first)


Kinds = dict[str, ColumnKind]
"""Counts by column, in order of appearance."""


def count_values(kinds: Kinds, row: Mapping[Any, Any]) -> None:
    """Add the values of a row to the counts."""
    for name, value in row.items():
        kind = kinds.get(name)
        if kind is None:
            kind = kinds[name] = ColumnKind()
        if isinstance(value, str):
            kind.text_first |= kind.texts == kind.lists == 0
            kind.texts += 1
            messages: Any = parse_conversation(value)
            kind.json_texts += messages is not None
            kind.python_texts += messages is None and is_python_literal(value)
        elif isinstance(value, Sequence | np.ndarray):
            kind.lists += 1
            messages = (
                value if len(value) and not isinstance(value[0], str | int | float | np.number) else None
            )
        else:
            kind.others += value is not None
            continue
        if messages is not None:  # in every column, because it may be renamed
            kind.sharegpt += is_sharegpt(messages)
            kind.parts += has_parts(messages)


def count_kinds(rows: Iterable[Mapping[Any, Any]]) -> Kinds:
    kinds: Kinds = {}
    for row in rows:
        count_values(kinds, row)
    return kinds


def parse_conversation(text: str) -> list[Any] | None:
    """Parse a text as a conversation's JSON; None for any other text."""
    start = text[:200].lstrip()
    if not start.startswith("[") or not start[1:].lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if value and all(map(_is_message, value)) else None


def is_python_literal(text: str) -> bool:
    """Whether a text is the Python repr of messages, as pandas writes them to CSV files."""
    return text[:2] == "[{" and text[2:8] in ("'role'", "'from'", "'conte") and "}" in text[-9:]


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and ("role" in value or {"from", "value"} <= set(value))


def is_sharegpt(messages: Any) -> bool:
    """Whether a conversation is in ShareGPT's format."""
    return any(
        isinstance(message, Mapping)
        and (has_sharegpt_keys(message) or (isinstance(role := message.get("role"), str) and role in ROLES))
        for message in messages
    )


def has_parts(messages: Any) -> bool:
    """Whether a content in a conversation, or in a list of them, is a list of parts."""
    return any(
        is_parts(message.get("content", message.get("value")))
        if isinstance(message, Mapping)
        else is_parts(message) and has_parts(message)
        for message in messages
    )


def has_sharegpt_keys(message: Mapping[Any, Any]) -> bool:
    return "role" not in message and {"from", "value"} <= set(message)
