"""Share programs between equal runs of the test process, which is what most tests spend their time on.

Runs of users share none: what a function reads besides its arguments may have changed in between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, TypeVar

import jax
import pytest
from jax.sharding import Mesh

from rlhf_core import optimizers, state
from rlhf_core.runtime import caches, machine

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

MAX_SHARED = 64
"""Functions that are kept, and results. JAX keeps the programs of a function as long as the function itself."""


def shared(function: F) -> F:
    """Return the first function seen that equals this one, for `jax.jit`, which tells functions apart by identity.

    Equal are functions of modules, objects that compare by value, such as frozen dataclasses with `__call__`, and
    `functools.partial` of these with equal arguments. Other functions are returned as they are and not kept: closures,
    lambdas and methods may hold arrays.
    """
    return _recall(_first, function)


def shared_result(function: Callable[[], T]) -> T:
    """Call `function`, or return what the first function seen that equals it returned; see `shared`."""
    return _recall(_result, function)


def _recall(kept: Any, function: Any) -> Any:
    try:
        comparable = _by_value(function)
    except TypeError:
        return kept.__wrapped__(function)
    return kept(comparable)


@functools.lru_cache(MAX_SHARED)
def _first(function: F) -> F:
    return function


@functools.lru_cache(MAX_SHARED)
def _result(function: Callable[[], T]) -> T:
    return function()


def forget() -> None:
    """Forget every function and result that was shared so far, and with them their programs."""
    _first.cache_clear()
    _result.cache_clear()


_HASH_OF_IDENTITY: Any = object.__hash__


class _Partial(functools.partial[Any]):
    """A `functools.partial` that equals those of an equal function and equal arguments of the same types."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Partial) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        arguments = (*enumerate(self.args), *sorted(self.keywords.items()))
        return self.func, *((name, type(value), value) for name, value in arguments)


def _by_value(value: Any) -> Any:
    """Return `value`, with partials replaced by those that compare by value.

    Raises TypeError for what cannot be hashed or compares by identity, except for functions of modules.
    """
    if isinstance(value, functools.partial):
        keywords = {name: _by_value(each) for name, each in value.keywords.items()}
        return _Partial(_by_value(value.func), *map(_by_value, value.args), **keywords)
    if isinstance(value, FunctionType):
        # One that was made within a function may hold arrays in its closure or its defaults.
        fits = value.__closure__ is None and "<" not in value.__qualname__
    else:
        fits = type(value).__hash__ is not _HASH_OF_IDENTITY and not isinstance(value, MethodType)
    if not fits and not isinstance(value, Mesh | None):  # equal meshes are one object
        raise TypeError(f"{value!r} does not compare by value")
    hash(value)
    return value


OF_USERS: tuple[tuple[Any, str, Any], ...] = tuple(
    (module, name, getattr(module, name))
    for module, name in (
        (jax, "jit"),
        (optimizers, "_clipped"),
        (state, "_by_name"),
        (machine, "free_memory"),
        (caches, "forget"),
    )
)
"""What users' runs call; tests replace it."""


@contextmanager
def programs_shared() -> Iterator[None]:
    """Share the programs of equal functions in this process, and keep them when stages and runs end."""
    jit, clipped, by_name, *_ = (function for *_, function in OF_USERS)

    def sharing_jit(*functions: Any, **options: Any) -> Any:
        return jit(*map(shared, functions), **options)

    def keep() -> None:
        pass

    with _replaced(sharing_jit, _sharing_results(clipped), _sharing_results(by_name), keep, keep):
        yield


@contextmanager
def nothing_shared() -> Iterator[None]:
    """Share nothing in the block, as where users run."""
    with _replaced(*(function for *_, function in OF_USERS)):
        yield


@contextmanager
def _replaced(*functions: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patches:
        for (module, name, _), function in zip(OF_USERS, functions, strict=True):
            patches.setattr(module, name, function)
        yield


def _sharing_results(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **named: shared_result(functools.partial(function, *arguments, **named))
