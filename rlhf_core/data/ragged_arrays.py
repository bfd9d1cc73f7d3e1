"""Sequences of rows, and what their rows are called, without an object for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
