"""Sequences of rows, and what their rows are called, without an object for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.source import Records


class Ragged(Sequence[NDArray[Any]]):
    """Sequences of several lengths: parts of a few flat arrays, which may lie on the disk."""

    def __init__(
        self,
        flats: Sequence[NDArray[Any]],
        which: NDArray[np.int32],
        starts: NDArray[np.int64],
        stops: NDArray[np.int64],
    ) -> None:
        """which, starts, stops: [n], of each sequence the number of its flat array, and its ends there."""
        self.flats, self.which, self.starts, self.stops = list(flats), which, starts, stops

    @classmethod
    def joined(cls, parts: Sequence[tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]]) -> Ragged:
        """parts: (flat array, starts, stops)."""
        which = np.repeat(np.arange(len(parts), dtype=np.int32), [len(starts) for _, starts, _ in parts])
        starts = np.concatenate([np.zeros(0, np.int64), *(starts for _, starts, _ in parts)])
        stops = np.concatenate([np.zeros(0, np.int64), *(stops for _, _, stops in parts)])
        return cls([flat for flat, _, _ in parts], which, starts, stops)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return Ragged(self.flats, self.which[i], self.starts[i], self.stops[i])
        return self.flats[self.which[i]][self.starts[i] : self.stops[i]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.stops - self.starts

    def largest(self) -> int:
        """The largest element of the flat arrays: at least as large as any of the sequences'."""
        return max((int(flat.max(initial=0)) for flat in self.flats), default=0)


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
