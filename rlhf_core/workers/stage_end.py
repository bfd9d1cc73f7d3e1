"""Close worker processes and the event loop when a stage ends."""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable

_closers: list[Callable[[], object]] = []
_lock = threading.Lock()


def before_end(closer: Callable[[], object]) -> None:
    """Register a function for `close` to call. Calling it again must do nothing."""
    with _lock:
        _close_at_exit()
        _closers[:] = [each for each in _closers if getattr(each, "alive", True)]
        _closers.append(closer)


def close() -> None:
    """End every worker process and the event loop; they start again when next needed."""
    with _lock:
        closers = _closers[::-1]
        _closers.clear()
    for closer in closers:
        closer()


@functools.cache
def _close_at_exit() -> None:
    atexit.register(close)
