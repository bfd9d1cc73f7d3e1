"""Programs compiled ahead of their first call, in threads: beside each other, and beside what the caller does next."""

from __future__ import annotations

import functools
import os
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

MOST = 8
"""Threads at most: programs that compile at once take memory, and a compiler uses several threads by itself."""


class Ahead:
    """Programs that are being compiled, by name.

    Tracing and lowering are done by the caller, in its own thread, where its settings of jax hold. What comes of a
    compilation is kept by jax, so that a call of the jitted function with such arguments finds it.
    """

    def __init__(self) -> None:
        self._programs: dict[Hashable, Future[Any]] = {}

    def __contains__(self, name: Hashable) -> bool:
        return name in self._programs

    def compile(self, name: Hashable, lowered: Any) -> None:
        """Start to compile what `jax.jit(…).lower(…)` gave."""
        self._programs[name] = _threads().submit(lowered.compile)

    def wait(self, name: Hashable) -> None:
        """Return once that program is compiled, or at once if it was never asked for. Raises what the compiler did."""
        if name in self._programs:
            self._programs[name].result()

    def wait_for_all(self) -> None:
        for name in self._programs:
            self.wait(name)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Of the process: what was asked for first is compiled first."""
    return ThreadPoolExecutor(min(os.cpu_count() or 1, MOST), thread_name_prefix="compile")
