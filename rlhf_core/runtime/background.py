"""Compile programs in the background, before their first call."""

from __future__ import annotations

import functools
import os
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any
from weakref import WeakSet

from rlhf_core.runtime.machine import trim_memory
from rlhf_core.runtime.terminal import echo

MAX_THREADS = 8
"""Programs that compile at the same time take memory, and a compiler uses several threads by itself."""


PATIENCE = 60.0
"""Seconds of waiting for a program after which that is said, once in a process."""


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
        self._programs[name] = _threads().submit(_compile, lowered)
        _asked_for.add(self._programs[name])

    def wait(self, name: Hashable) -> None:
        """Wait until that program is compiled, if it was asked for. Raises what the compiler raised."""
        if name not in self._programs:
            return
        program = self._programs[name]
        _, unfinished = wait([program], PATIENCE)
        if unfinished:
            _say_that_it_takes_long()
        program.result()

    def wait_for_all(self) -> None:
        for name in self._programs:
            self.wait(name)


def _compile(lowered: Any) -> Any:
    """Compile a program; after the last one that was asked for, return what the compiler took."""
    program = lowered.compile()
    if sum(not each.done() for each in list(_asked_for)) <= 1:  # this one is not done
        trim_memory()
    return program


_asked_for: WeakSet[Future[Any]] = WeakSet()
"""Programs of this process that are in use."""


def compiling() -> bool:
    """Whether a program is still compiled, or waits for that."""
    return not all(program.done() for program in list(_asked_for))


@functools.cache
def _say_that_it_takes_long() -> None:
    echo(f"still compiling after {PATIENCE:.0f} s: programs of large models take minutes, once", err=True)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return the process's pool, which compiles first what was asked for first."""
    return ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS), thread_name_prefix="compile")
