"""Choose the rows of each update as a pure function of the seed and the update's number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import grain

FEW_ROWS = 4096
"""Grain walks through about 2^16 numbers to permute any smaller set, so that each of few rows takes milliseconds: their
permutations are made once per epoch and shared by all readers of the same data."""


def count_examples(size: int, batch_size: int, epochs: float, max_steps: int | None = None) -> int:
    """Count the examples that a run trains on: those of `max_steps` whole batches if given, else of `epochs` passes
    over `size` rows, at least one.
    """
    if max_steps is not None:
        return max_steps * batch_size
    # Rounding down, but 1.1 passes over 10 rows, 11.000000000000002, and 1/3 of a pass over 3 are whole numbers.
    return max(1, math.floor(size * epochs + 1e-6))


def count_updates(size: int, batch_size: int, epochs: float, max_steps: int | None = None) -> int:
    """Count the updates in a run: `max_steps` if given, else as many as `epochs` passes over `size` rows need.

    If `max_steps` is more than the epochs need, the run starts over on the data.
    """
    return -(-count_examples(size, batch_size, epochs, max_steps) // batch_size)


def visited_rows(size: int, count: int, *, seed: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Return the distinct rows among the first `count` rows of `batch_rows`, ascending, int64."""
    if count >= size:
        return np.arange(size)
    if count <= 0:
        return np.zeros(0, np.int64)
    return np.sort(next(batch_rows(size, count, seed=seed, shuffle=shuffle)))


def batch_rows(
    size: int,
    batch_size: int,
    *,
    seed: int,
    shuffle: bool = True,
    epochs: float | None = None,
    start: int = 0,
) -> Iterator[NDArray[np.int64]]:
    """Yield the row indices of updates `start`, `start` + 1, …, int64 [batch_size] each.

    Every epoch is a new permutation, and batches cross epoch boundaries, so no row is skipped. Batch k does not
    depend on `start`.

    epochs: passes over the data; the last batch may be smaller. None: endless.
    """
    if size < 1:
        raise ValueError("a schedule needs at least one example")
    total = None if epochs is None else count_examples(size, batch_size, epochs)
    first = start * batch_size
    while total is None or first < total:
        last = first + batch_size if total is None else min(first + batch_size, total)
        yield rows_at(size, first, last, seed=seed, shuffle=shuffle)
        first = last


def rows_at(size: int, first: int, last: int, *, seed: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Return the rows at positions `first` to `last` − 1 of the endless epochs, int64."""
    positions = np.arange(first, last)
    if not shuffle:
        return positions % size
    if size > FEW_ROWS:
        examples = _examples(size, seed)
        return np.fromiter((examples[int(i)] for i in positions), np.int64, len(positions))
    epochs = [_epoch(size, seed, epoch) for epoch in range(first // size, -(-last // size))]
    return np.concatenate(epochs)[positions - first // size * size]


def _examples(size: int, seed: int) -> grain.MapDataset[int]:
    """Return the endless sequence of shuffled epochs."""
    import grain

    return grain.MapDataset.source(range(size)).seed(seed).shuffle().repeat(None)


@lru_cache(maxsize=64)
def _epoch(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the permutation of an epoch, int64 [size]."""
    examples = _examples(size, seed)
    return np.fromiter((examples[epoch * size + i] for i in range(size)), np.int64, size)
