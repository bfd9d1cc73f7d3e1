"""Rows for tests of attention: nested branches, several sequences in a row, unused ends; and what attention gives."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.models import Blocks, attend

ROWS = 2


class Shape(NamedTuple):
    """Of a batch: time, size of a head, key heads, query heads per key head, and what one program is made for."""

    time: int
    size: int
    kv_heads: int = 1
    groups: int = 2
    window: bool = False
    softcap: float | None = None
    sinks: bool = False
    blocks: tuple[Blocks, Blocks] | None = (Blocks(16, 32), Blocks(32, 16))


def layout(time: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw positions and visible_until of a row: trees with nested branches, one after another; some rows are empty,
    and the end of most is unused.
    """
    positions, until = np.zeros((2, time), np.int32)
    start, end = 0, int(draw.integers(0, time + 1)) if draw.random() < 0.7 else time

    def grow(start: int, end: int, position: int, depth: int) -> None:
        trunk = int(draw.integers(1, end - start + 1)) if depth < 3 else end - start
        positions[start : start + trunk] = position + np.arange(trunk)
        until[start : start + trunk] = end
        cuts = np.sort(draw.integers(start + trunk, end + 1, draw.integers(0, 4)))
        for left, right in itertools.pairwise([start + trunk, *cuts, end]):
            if right > left:
                grow(left, right, position + trunk, depth + 1)

    while start < end:
        stop = int(draw.integers(start + 1, end + 1)) if draw.random() < 0.7 else end
        grow(start, stop, 0, 0)
        start = stop
    return positions, until


def batch(shape: Shape, draw: np.random.Generator, dtype: Any = np.float32) -> tuple[Any, ...]:
    """Queries, keys, values, sinks, a cotangent, positions, visible_until, and a window."""
    time, size, heads, groups, *_ = shape
    positions, until = (np.stack(x) for x in zip(*(layout(time, draw) for _ in range(ROWS)), strict=True))
    q = draw.standard_normal((ROWS, heads, groups, time, size)) * 2 / np.sqrt(size)
    k, v = draw.standard_normal((2, ROWS, heads, time, size))
    cotangent = draw.standard_normal((ROWS, time, heads * groups * size)) / np.sqrt(size)
    cotangent[until == 0] = 0  # nothing reads what an unused slot gets
    sinks = draw.standard_normal((heads, groups))
    arrays = (jnp.asarray(x, dtype) for x in (q, k, v, sinks, cotangent))
    return *arrays, positions, until, np.int32(draw.integers(1, time + 1))


@functools.cache
def program(shape: Shape, over: Callable[..., Any] = attend) -> Any:
    """Compile the value and gradients of an attention function."""

    @jax.jit
    def run(
        q: Any, k: Any, v: Any, sinks: Any, cotangent: Any, positions: Any, until: Any, window: Any
    ) -> Any:
        near = window if shape.window else None

        def mix(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            sinks = sinks if shape.sinks else None
            return over(q, k, v, positions, until, window=near, softcap=shape.softcap, sinks=sinks)

        mixed, back = jax.vjp(mix, q, k, v, sinks)
        return mixed, *back(cotangent)

    return run


def differ(found: Any, expected: Any, until: np.ndarray) -> float:
    """Return the largest difference of the value in used slots, and of the gradients, relative to the largest number
    where that is above 1.
    """
    used = (until > 0)[..., None]
    pairs = [(found[0] * used, expected[0] * used), *zip(found[1:], expected[1:], strict=True)]
    wide = [(np.asarray(one, np.float64), np.asarray(other, np.float64)) for one, other in pairs]
    return max(np.abs(one - other).max() / max(1.0, np.abs(other).max()) for one, other in wide)
