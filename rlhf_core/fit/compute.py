"""Computing over many batches, few of them on the device at a time, and saying so where it takes long."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
"""What takes no longer is not spoken of; what does is spoken of this often, then ten times as rarely."""


def compute_batches(
    compute: Callable[[Packed], Any],
    mesh: Mesh,
    batches: Sequence[Packed],
    say: Callable[[str], None] | None = None,
) -> Iterator[tuple[Packed, Any]]:
    """Yield every batch with what `compute` makes of it, on the host; at most two are dispatched and not read.

    say: told how many of the batches have been evaluated, where that takes longer than a few seconds.
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
            say(f"evaluating {number}/{len(batches)}")
        pending.append((batch, compute(put_rows(mesh, batch))))
    for done, result in pending:
        yield done, jax.device_get(result)


@contextmanager
def say_if_slow(say: Callable[[str], None], line: str) -> Iterator[None]:
    """Say a line where what is inside takes longer than a few seconds."""
    timer = threading.Timer(QUIET_SECONDS, say, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
