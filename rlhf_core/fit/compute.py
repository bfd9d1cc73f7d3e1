"""Compute over many batches with few of them on the device at a time, and say so where it takes long."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.fit.batches import pack_chunks
from rlhf_core.mesh import put_rows, replicated_sharding
from rlhf_core.packing.rows import Layout, Packed, Tree

if TYPE_CHECKING:
    from jax.sharding import Mesh

IN_FLIGHT = 2
"""Batches whose inputs and results the device holds: one is computed while the other is read or placed."""
QUIET_SECONDS = 5.0
"""Work that takes no longer is not announced; progress is announced after this long, then a tenth as often."""
CHUNK = 1024
"""Trees that `per_token` packs together."""
BRANCH = "branch"


def compute_batches(
    compute: Callable[[Packed], Any],
    mesh: Mesh,
    batches: Iterable[Packed],
    say: Callable[[str], None] | None = None,
) -> Iterator[tuple[Packed, Any]]:
    """Yield every batch with its result on the host; at most two are dispatched and not read.

    say: prints progress where the computation takes longer than a few seconds.
    """
    pending: deque[tuple[Packed, Any]] = deque()
    due, wait = time.monotonic() + QUIET_SECONDS, QUIET_SECONDS
    for number, batch in enumerate(batches):
        if len(pending) == IN_FLIGHT:
            done, result = pending.popleft()
            yield done, jax.device_get(result)
        if say is not None and time.monotonic() > due:
            wait = 10 * QUIET_SECONDS
            due = time.monotonic() + wait
            say(f"evaluating {number}{f'/{len(batches)}' if isinstance(batches, Sequence) else ''}")
        pending.append((batch, compute(put_rows(mesh, batch))))
    for done, result in pending:
        yield done, jax.device_get(result)


def per_token(
    function: Callable[[Any, Packed], jax.Array],
    params: Any,
    trees: Sequence[Tree],
    layout: Layout,
    mesh: Mesh,
    *,
    token_names: Sequence[str] = (),
    sequence_names: Sequence[str] = (),
) -> list[NDArray[Any]]:
    """Compute `function(params, batch)`, an array [rows, trained], over all trees; return one array per branch.

    Arrays are in the order of the trees and of their branches, with a value per trained token, a token whose weight is
    not 0. token_names, sequence_names: values of the trees that `function` reads. A program is compiled for every
    shape of the layout; another `function` object compiles anew. Every process must call this alike.
    """
    values: list[NDArray[Any]] = []
    first: list[int] = []  # the number of each tree's first branch

    def chunks() -> Iterator[list[Tree]]:
        for start in range(0, len(trees), CHUNK):
            chunk = []
            for tree in trees[start : start + CHUNK]:
                count = len(tree.branches)
                first.append(len(values))
                values.extend([np.zeros(0, np.float32)] * count)
                numbers = {BRANCH: np.arange(count, dtype=np.float32)}  # a tree may be split over rows
                chunk.append(tree._replace(sequence_values={**tree.sequence_values, **numbers}))
            yield chunk

    names = (*sequence_names, BRANCH)
    batches = pack_chunks(chunks(), layout, token_names=token_names, sequence_names=names)
    compute = partial(jax.jit(function, out_shardings=replicated_sharding(mesh)), params)
    for batch, result in compute_batches(compute, mesh, batches):
        row, column = np.nonzero(batch.trained >= 0)
        sequence = batch.rows.sequence[row, batch.trained[row, column]]
        starts = np.flatnonzero((np.diff(row, prepend=-1) != 0) | (np.diff(sequence, prepend=-1) != 0))
        pieces = np.split(result[row, column], starts[1:])
        for at, piece in zip(
            starts.tolist(), pieces, strict=False
        ):  # no start, one piece: nothing is trained
            place = row[at], sequence[at]
            values[first[batch.example[place]] + int(batch.sequence_values[BRANCH][place])] = piece
    return values


@contextmanager
def say_if_slow(say: Callable[[str], None], line: str) -> Iterator[None]:
    """Say a line where the block takes longer than a few seconds."""
    timer = threading.Timer(QUIET_SECONDS, say, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
