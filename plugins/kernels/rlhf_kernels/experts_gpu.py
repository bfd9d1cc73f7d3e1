"""Products of the rows of every expert for GPUs, in Pallas for Triton: as `lax.ragged_dot`, which XLA computes there by
multiplying every row with every expert.

Rows are sorted by expert. A kernel computes one block of columns of one block of rows and one of the experts that the
block has rows of, and writes those rows. Rows behind those of the last expert are not written.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

COLUMNS, DEPTH = 128, 32
"""Columns of a block, and columns of the rows that are multiplied together."""
_dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)


def _block_rows(rows: int, experts: int) -> int:
    """Choose the rows of a block: an expert's usual share, so that few are multiplied in vain."""
    return min(max(pl.next_power_of_2(max(rows // experts, 1)), 16), 128)


def _visits(counts: jax.Array, rows: int, block: int) -> tuple[jax.Array, ...]:
    """List the pairs of a block of rows and an expert: their blocks and experts, -1 where there is no pair, int32
    [visits]; and the first row of every expert and the row after its last, int32 [experts].
    """
    ends = jnp.cumsum(counts)
    starts = ends - counts
    first = starts // block
    each = jnp.where(counts > 0, (ends - 1) // block - first + 1, 0)
    total = jnp.cumsum(each)
    number = jnp.arange(pl.cdiv(rows, block) + len(counts), dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(total, number, side="right"), len(counts) - 1)
    at = first[expert] + number - (total - each)[expert]
    return at, jnp.where(number < total[-1], expert, -1), starts, ends


def _load(ref: Any, *masks: Any) -> jax.Array:
    return plgpu.load(ref, mask=functools.reduce(jnp.logical_and, masks), other=0)


def _rows_kernel(
    at: Any, experts: Any, starts: Any, ends: Any, x: Any, w: Any, out: Any, *, block: int, transposed: bool
) -> None:
    visit = pl.program_id(0)
    expert = experts[visit]
    first = at[visit] * block
    depth = x.shape[1]
    columns = pl.program_id(1) * COLUMNS + jnp.arange(COLUMNS)

    @pl.when(expert >= 0)
    def _() -> None:
        rows = first + jnp.arange(block)
        own = (rows >= starts[expert]) & (rows < ends[expert])
        there = columns < out.shape[1]

        def add(n: jax.Array, total: jax.Array) -> jax.Array:
            deep = n * DEPTH + jnp.arange(DEPTH)
            inside = deep < depth
            left = _load(x.at[rows[:, None], deep[None]], own[:, None], inside[None])
            if transposed:
                right = _load(w.at[expert, columns[:, None], deep[None]], there[:, None], inside[None]).T
            else:
                right = _load(w.at[expert, deep[:, None], columns[None]], inside[:, None], there[None])
            return total + _dot(left, right)

        total = lax.fori_loop(0, pl.cdiv(depth, DEPTH), add, jnp.zeros((block, COLUMNS), jnp.float32))
        plgpu.store(
            out.at[rows[:, None], columns[None]], total.astype(out.dtype), mask=own[:, None] & there[None]
        )


def _kernels_kernel(starts: Any, ends: Any, x: Any, d_y: Any, out: Any, *, block: int) -> None:
    expert = pl.program_id(0)
    size = out.shape[1:]
    deep, columns = (pl.program_id(1 + i) * COLUMNS + jnp.arange(COLUMNS) for i in range(2))
    first, last = starts[expert], ends[expert]

    def add(n: jax.Array, total: jax.Array) -> jax.Array:
        rows = first + n * block + jnp.arange(block)
        own = rows < last
        left = _load(x.at[rows[:, None], deep[None]], own[:, None], (deep < size[0])[None])
        right = _load(d_y.at[rows[:, None], columns[None]], own[:, None], (columns < size[1])[None])
        return total + _dot(left.T, right)

    total = jnp.zeros((COLUMNS, COLUMNS), jnp.float32)
    total = lax.fori_loop(0, lax.div(last - first + block - 1, block), add, total)
    there = (deep < size[0])[:, None] & (columns < size[1])[None]
    plgpu.store(out.at[expert, deep[:, None], columns[None]], total, mask=there)


def _call(
    kernel: Any, name: str, grid: tuple[int, ...], arrays: Any, shape: Any, interpret: bool
) -> jax.Array:
    x, other = arrays[-2:]
    _, deep, wide = shape.shape if len(shape.shape) == 3 else other.shape
    moved = sum(math.prod(array.shape) * array.dtype.itemsize for array in (x, other, shape))
    cost = {"flops": 2 * len(x) * deep * wide, "transcendentals": 0, "bytes_accessed": moved}
    called: Any = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=shape,
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
        name=name,
        metadata={key: str(number) for key, number in cost.items()},
    )
    made: jax.Array = called(*arrays)
    return made


def expert_rows(
    x: jax.Array, w: jax.Array, counts: jax.Array, *, transposed: bool = False, interpret: bool = False
) -> jax.Array:
    """Compute x[rows of e] · w[e], [N, out] in the dtype of `x`, summed in float32.

    x: [N, in], sorted by expert. w: [experts, in, out], or with `transposed` [experts, out, in]. counts: int32
    [experts].
    """
    block = _block_rows(len(x), len(w))
    width = w.shape[1 if transposed else 2]
    visits = _visits(counts, len(x), block)
    kernel = functools.partial(_rows_kernel, block=block, transposed=transposed)
    grid = (len(visits[0]), pl.cdiv(width, COLUMNS))
    shape = jax.ShapeDtypeStruct((len(x), width), x.dtype)
    return _call(kernel, "expert_rows", grid, (*visits, x, w), shape, interpret)


def expert_kernels(x: jax.Array, d_y: jax.Array, counts: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Compute x[rows of e]ᵀ · d_y[rows of e] for every expert, float32 [experts, in, out].

    x: [N, in], d_y: [N, out], sorted by expert. counts: int32 [experts].
    """
    ends = jnp.cumsum(counts)
    sizes = (x.shape[1], d_y.shape[1])
    kernel = functools.partial(_kernels_kernel, block=DEPTH)
    grid = (len(counts), *(pl.cdiv(size, COLUMNS) for size in sizes))
    shape = jax.ShapeDtypeStruct((len(counts), *sizes), jnp.float32)
    return _call(kernel, "expert_kernels", grid, (ends - counts, ends, x, d_y), shape, interpret)
