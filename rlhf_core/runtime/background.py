"""Compile programs in the background, before their first call."""

from __future__ import annotations

import functools
import os
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

MAX_THREADS = 8
"""Programs that compile at the same time take memory, and a compiler uses several threads by itself."""


class BackgroundCompiler:
    """Compiles programs in threads, in parallel with each other and with the caller.

    The caller traces and lowers in its own thread, where its jax settings hold. jax caches the compiled program, so
    that a call of the jitted function with such arguments finds it.
    """

    def __init__(self) -> None:
        self._programs: dict[Hashable, Future[Any]] = {}

    def __contains__(self, name: Hashable) -> bool:
        return name in self._programs

    def compile(self, name: Hashable, lowered: Any) -> None:
        """Start to compile what `jax.jit(…).lower(…)` returned."""
        self._programs[name] = _threads().submit(lowered.compile)

    def wait(self, name: Hashable) -> None:
        """Wait until that program is compiled, if it was asked for. Raises what the compiler raised."""
        if name in self._programs:
            self._programs[name].result()

    def wait_for_all(self) -> None:
        for name in self._programs:
            self.wait(name)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return the process's pool, which compiles first what was asked for first."""
    return ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS), thread_name_prefix="compile")
