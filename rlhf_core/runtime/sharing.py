"""Share functions between equal calls, so that a process traces, lowers and loads equal programs once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, TypeVar

from jax.sharding import Mesh

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
