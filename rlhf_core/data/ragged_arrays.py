"""Ragged arrays: sequences of different lengths stored in a few flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Ragged(Sequence[NDArray[Any]]):
    """Sequences of different lengths: slices of a few flat arrays, which may be memory-mapped."""

    def __init__(
        self,
        flats: Sequence[NDArray[Any]],
        which: NDArray[np.int32],
        starts: NDArray[np.int64],
        stops: NDArray[np.int64],
    ) -> None:
        """which, starts, stops: [n], the index of each sequence's flat array and its bounds there."""
        self.flats, self.which, self.starts, self.stops = list(flats), which, starts, stops

    @classmethod
    def joined(cls, parts: Sequence[tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]]) -> Ragged:
        """Concatenate parts (flat array, starts, stops)."""
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
        """Return the largest element of the flat arrays, an upper bound for the sequences."""
        return max((int(flat.max(initial=0)) for flat in self.flats), default=0)
