"""Rows with their numbers: of one file or dataset, and of several as one sequence."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Source:
    """The rows of one file or dataset."""

    name: str
    """What messages call it."""
    rows: Sequence[Mapping[str, Any]]
    numbers: Sequence[int]
    """1-based number of each row in the file; rows that were drawn more than once repeat theirs."""
    fingerprint: str
    """Of the content."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that some row has, in order of appearance."""
        return tuple(dict.fromkeys(itertools.chain.from_iterable(self.rows)))

    def where(self, i: int) -> str:
        return f"{self.name} row {self.numbers[i]}"

    def take(self, indices: Sequence[int], how: str) -> Source:
        return Source(
            self.name,
            [self.rows[i] for i in indices],
            [self.numbers[i] for i in indices],
            digest(self.fingerprint, how),
        )


class Records(Sequence[Mapping[str, Any]]):
    """The rows of all sources, one after another."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
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

    def _find(self, i: int) -> tuple[Source, int]:
        at = bisect.bisect_right(self._ends, i)
        return self.sources[at], i - (self._ends[at - 1] if at else 0)


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def json_text(value: Any) -> str:
    """The JSON of a row, keys in their order, that stands for what JSON has no form for, too."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """What JSON has no form for, such as an array, whose text would leave out what is in its middle."""
    return value.tolist() if hasattr(value, "tolist") else f"{type(value).__qualname__} {value}"
