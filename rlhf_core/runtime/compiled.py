"""Count of the programs that this process compiled, and read from its cache."""

from __future__ import annotations

import functools
from threading import Lock
from typing import NamedTuple

COMPILED = "/jax/core/compile/backend_compile_duration"
HIT = "/jax/compilation_cache/cache_hits"


class Compiled(NamedTuple):
    """Programs that were compiled or read, the seconds of all threads that this took, and how many were read."""

    programs: int = 0
    seconds: float = 0.0
    cached: int = 0

    def since(self, before: Compiled) -> Compiled:
        return Compiled(
            self.programs - before.programs, self.seconds - before.seconds, self.cached - before.cached
        )

    def __str__(self) -> str:
        return f"{self.programs} programs in {self.seconds:.1f} s, {self.cached} of them from the cache"


_so_far = Compiled()
_counting = Lock()
"""Programs are compiled in several threads."""


def compiled_so_far() -> Compiled:
    """Return the count since this was first called in this process."""
    _listen()
    return _so_far


@functools.cache
def _listen() -> None:
    import jax

    def on_duration(event: str, duration_secs: float, **_: object) -> None:
        global _so_far
        if event != COMPILED:
            return
        with _counting:
            _so_far = _so_far._replace(programs=_so_far.programs + 1, seconds=_so_far.seconds + duration_secs)

    def on_event(event: str, **_: object) -> None:
        global _so_far
        if event != HIT:
            return
        with _counting:
            _so_far = _so_far._replace(cached=_so_far.cached + 1)

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    jax.monitoring.register_event_listener(on_event)
