"""Compute over many batches with few of them on the device at a time, and say so where it takes long."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax

from rlhf_core.mesh import put_rows
from rlhf_core.packing.rows import Packed

if TYPE_CHECKING:
    from jax.sharding import Mesh

IN_FLIGHT = 2
"""Batches whose inputs and results the device holds: one is computed while the other is read or placed."""
QUIET_SECONDS = 5.0
"""Work that takes no longer is not announced; progress is announced after this long, then a tenth as often."""


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
