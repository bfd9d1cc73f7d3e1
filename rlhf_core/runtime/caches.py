"""Cache within one run: none reads what an earlier run of the same process left behind."""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
MAX_CACHED = 512
_caches: list[Callable[[], object]] = []
_ends: list[Callable[[], object]] | None = None
"""What to call when the run that this process is in ends; None outside of runs."""


@contextmanager
def own_run() -> Iterator[None]:
    """Begin a run without programs and results of earlier runs in this process, and leave none behind.

    A run inside another one is part of it.
    """
    global _ends
    if _ends is not None:
        yield
        return
    _ends = []
    try:
        forget()
        # Python shows a warning once per line and text, until filters are set.
        with warnings.catch_warnings():
            pass
        yield
    finally:
        ends, _ends = _ends, None
        for end in ends:
            end()
        forget()


def at_run_end(end: Callable[[], object]) -> None:
    """Call `end` when the current run ends; outside of runs, do nothing."""
    if _ends is not None:
        _ends.append(end)


def forget() -> None:
    """Forget every program that JAX keeps, traces of functions included, and every result of a `cached` function.

    Losses, optimizers and model families may read more than their arguments: globals, helpers, the environment.
    """
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.clear_caches()
    for clear in _caches:
        clear()


def cached(function: F) -> F:
    """Keep the results of a function that reads users' code until `forget`, for arguments that are `Exact` the same."""
    results = functools.lru_cache(MAX_CACHED)(lambda exact: function(*exact.value))
    _caches.append(results.cache_clear)

    @functools.wraps(function)
    def recall(*arguments: Any) -> Any:
        return results(Exact(arguments))

    return cast(F, recall)


class Exact:
    """A value that equals another one where both compare equal and their types agree, those of fields included.

    For keys of caches and static arguments under jit: 1, 1.0 and True compare equal, so do frozen dataclasses of them.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._key = _exact(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exact) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self.value)


def _exact(value: Any) -> Any:
    if isinstance(value, float):
        return type(value), value.hex()
    parts: Any = ()
    if isinstance(value, tuple):
        parts = tuple(map(_exact, value))
    elif (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and type(value).__eq__ is not object.__eq__
    ):
        parts = tuple(_exact(getattr(value, each.name)) for each in dataclasses.fields(value) if each.compare)
    return type(value), value, parts
