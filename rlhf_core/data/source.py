"""Rows with their numbers: of one file or dataset, and of several as one sequence."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.column_kinds import Kind, Kinds, kinds_of
from rlhf_core.runtime.signals import stop_if_asked

CHUNK = 2048
"""Rows that are objects at one time while a source is encoded."""


@dataclass(frozen=True)
class Source:
    """The rows of one file or dataset."""

    name: str
    """What messages call it."""
    rows: Sequence[Mapping[str, Any]]
    """Read where they are whenever they are asked for; rows of a list are objects already."""
    numbers: Sequence[int] | NDArray[np.int64]
    """1-based number of each row in the file; rows that were drawn more than once repeat theirs."""
    fingerprint: str
    """Of the content."""
    known: Kinds | None = None
    """`kinds`, where they are known already."""
    remarks: tuple[str, ...] = field(default=())
    """How the columns are read, where that is not as the file has them."""
    origin: str = ""
    """The fingerprint of the data that these rows were taken from; empty where they are all of it."""

    @property
    def source(self) -> str:
        return self.origin or self.fingerprint

    @cached_property
    def kinds(self) -> Kinds:
        """What each column holds, over all rows."""
        if self.known is not None:
            return self.known
        return kinds_of(row for _, chunk in self.chunks(self.rows) for row in chunk)

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that some row has, in order of appearance."""
        return tuple(self.kinds)

    def kind(self, column: str) -> Kind:
        return self.kinds.get(column) or Kind()

    def where(self, i: int) -> str:
        return f"{self.name} row {self.numbers[i]}"

    def take(self, indices: Sequence[int] | NDArray[np.int64], how: str) -> Source:
        which = np.asarray(indices, np.int64)
        everything = len(np.unique(which)) == len(self.rows)
        return replace(
            self,
            rows=Chosen(self.rows, which),
            numbers=np.asarray(self.numbers, np.int64)[which],
            fingerprint=digest(self.fingerprint, how),
            known=self.kinds if everything else None,
            origin=self.source,
        )

    def part(self, start: int, stop: int) -> Source:
        """Some rows in a row, which are objects from now on, of the same columns as all of them."""
        return replace(
            self,
            rows=self.rows[start:stop],
            numbers=self.numbers[start:stop],
            fingerprint=digest(self.fingerprint, f"{start}:{stop}"),
            known=self.kinds,
            origin=self.source,
        )

    def parts(self, size: int = CHUNK) -> Iterator[Source]:
        """All rows, so many at a time."""
        for start in range(0, len(self.rows), size):
            yield self.part(start, start + size)

    @staticmethod
    def chunks(rows: Sequence[Any], size: int = CHUNK) -> Iterator[tuple[int, Sequence[Any]]]:
        """(start, rows) of so many rows at a time. Raises Stopped between them, where the run was asked to stop."""
        for start in range(0, len(rows), size):
            stop_if_asked("while data was read")
            yield start, rows[start : start + size]


class Records(Sequence[Mapping[str, Any]]):
    """The rows of all sources, one after another."""

    def __init__(self, sources: Sequence[Source]) -> None:
        """Sources of one name that hold different data are numbered: "dataset 2"."""
        self.sources = tuple(_told_apart(sources))
        self._ends = list(itertools.accumulate(len(source.rows) for source in self.sources))

    @property
    def name(self) -> str:
        return ", ".join(dict.fromkeys(source.name for source in self.sources))

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that some row has."""
        return tuple(dict.fromkeys(itertools.chain.from_iterable(s.columns for s in self.sources)))

    @property
    def fingerprint(self) -> str:
        """Of the content, in order; another one means other data."""
        return digest(*(source.fingerprint for source in self.sources))

    @property
    def remarks(self) -> list[str]:
        """How columns are read, where that is not as the files have them."""
        return [f"{source.name}: {remark}" for source in self.sources for remark in source.remarks]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        source, k = self._find(range(len(self))[i])
        return source.rows[k]

    def where(self, i: int) -> str:
        """Names row `i`, such as "prefs.jsonl row 17"."""
        source, k = self._find(range(len(self))[i])
        return source.where(k)

    def offsets(self) -> list[int]:
        """The number of the first row of each source."""
        return [0, *self._ends[:-1]]

    def _find(self, i: int) -> tuple[Source, int]:
        at = bisect.bisect_right(self._ends, i)
        return self.sources[at], i - (self._ends[at - 1] if at else 0)


def _told_apart(sources: Sequence[Source]) -> Iterator[Source]:
    """The sources, numbered where different data have one name; a file that comes twice is the same data."""
    data: dict[str, list[str]] = {}
    for source in sources:
        same = data.setdefault(source.name, [])
        if source.source not in same:
            same.append(source.source)
    for source in sources:
        same = data[source.name]
        yield (
            replace(source, name=f"{source.name} {same.index(source.source) + 1}")
            if len(same) > 1
            else source
        )


class Chosen(Sequence[Any]):
    """Some elements of a sequence, in the order given, each as often as it is named."""

    def __init__(self, whole: Sequence[Any], which: NDArray[np.int64]) -> None:
        self.whole, self.which = whole, which

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, i: Any) -> Any:
        if not isinstance(i, slice):
            return self.whole[int(self.which[range(len(self))[i]])]
        which = self.which[i]
        if len(which) > 1 and (np.diff(which) == 1).all():
            return list(self.whole[int(which[0]) : int(which[-1]) + 1])
        return [self.whole[k] for k in which.tolist()]


class Changed(Sequence[Any]):
    """Rows that are changed when they are asked for."""

    def __init__(self, whole: Sequence[Any], change: Callable[[Any], Any]) -> None:
        self.whole, self.change = whole, change

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, i: Any) -> Any:
        return list(map(self.change, self.whole[i])) if isinstance(i, slice) else self.change(self.whole[i])


class Places(Sequence[str]):
    """What rows are called, such as "prefs.jsonl row 17"."""

    def __init__(self, records: Records, rows: NDArray[np.int64]) -> None:
        """rows: int64 [n], of all rows of the records."""
        self.records, self.rows = records, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self.records.where(k) for k in self.rows[i].tolist()]
        return self.records.where(int(self.rows[i]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def identities(self) -> NDArray[np.int64]:
        """A number for each, the same where the name is the same."""
        names: dict[str, int] = {}
        every = [
            np.asarray(source.numbers, np.int64) + (names.setdefault(source.name, len(names)) << 40)
            for source in self.records.sources
        ]
        whole: NDArray[np.int64] = np.concatenate(every)
        return whole[self.rows]


class Cells(Sequence[Any]):
    """A column of some rows, read when it is asked for; None where a row lacks it."""

    def __init__(self, records: Records, rows: NDArray[np.int64], column: str) -> None:
        self.records, self.rows, self.column = records, rows, column

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self.records[k].get(self.column) for k in self.rows[i].tolist()]
        return self.records[int(self.rows[i])].get(self.column)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def json_text(value: Any) -> str:
    """The JSON of a row, keys in their order, that stands for what JSON has no form for, too."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """What JSON has no form for, such as an array, whose text would leave out what is in its middle."""
    return value.tolist() if hasattr(value, "tolist") else f"{type(value).__qualname__} {value}"
