"""Which functions tests share, so that their programs are traced once, and which are not kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from rlhf_core.plugins import load_file

sharing: Any = load_file(Path(__file__).parents[1] / "shared" / "sharing.py")
shared, shared_result = sharing.shared, sharing.shared_result

TRACED = []


@dataclass(frozen=True)
class Scale:
    factor: Any = 2.0

    def __call__(self, x: Any) -> Any:
        TRACED.append(self)
        return x * self.factor


def combine(first: Any, x: Any, *, power: Any = 1) -> Any:
    return first(x) ** power


def closure(factor: float) -> Callable[[Any], Any]:
    return lambda x: x * factor


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Scale(1.25), Scale(1.5)),
        (partial(combine, Scale(), power=2), partial(combine, Scale(), power=3)),
        (partial(combine, Scale(), power=2), partial(combine, Scale(), power=2.0)),
        (partial(combine, Scale(), power=1), partial(combine, Scale(), power=True)),
        (partial(combine, Scale(1.25)), partial(combine, Scale(1.5))),
        (closure(1.0), closure(1.0)),
    ],
    ids=["dataclass", "option", "int and float", "bool and int", "argument", "closure"],
)
def test_other_functions_are_not(first: Any, second: Any) -> None:
    assert shared(first) is not shared(second)


class Holder:
    def __init__(self) -> None:
        self.array = jnp.ones(3)

    def total(self, x: Any) -> Any:
        return (self.array * x).sum()


def held(holder: Any) -> list[Any]:
    """Closures, methods, objects that compare by identity, and what cannot be hashed, alone and within partials."""
    return [
        holder.total,
        lambda x: holder.total(x),
        lambda x, array=holder.array: x * array,
        partial(combine, holder.total),
        partial(combine, partial(combine, lambda x: holder.total(x))),
        partial(Holder.total, holder),
        Scale(holder.array),
        partial(combine, Scale([1.0])),
    ]


def test_what_may_hold_arrays_is_not_kept() -> None:
    holder = Holder()
    assert all(shared(function) is function for function in held(holder))
    assert all(shared_result(lambda made=made: made) is made for made in held(holder))
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None
