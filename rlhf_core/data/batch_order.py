"""Choose the rows of each update as a pure function of the seed and the update's number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def count_updates(size: int, batch_size: int, epochs: float, max_steps: int | None = None) -> int:
    """Count the updates in a run: `max_steps` if given, else as many as `epochs` passes over `size` rows need.

    If `max_steps` is more than the epochs need, the run starts over on the data.
    """
    return max_steps if max_steps is not None else int(-(-(size * epochs) // batch_size))


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
    import grain

    if size < 1:
        raise ValueError("a schedule needs at least one example")
    examples = grain.MapDataset.source(range(size)).seed(seed)
    if shuffle:
        examples = examples.shuffle()
    examples = examples.repeat(None)
    total = None if epochs is None else int(size * epochs)
    first = start * batch_size
    while total is None or first < total:
        last = first + batch_size if total is None else min(first + batch_size, total)
        yield np.fromiter((examples[i] for i in range(first, last)), np.int64, last - first)
        first = last
