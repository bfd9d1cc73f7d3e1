"""Rows that devices share along time, the mesh's axis `context`: what each sends, and to whom."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

from rlhf_core.mesh import row_axes, zigzag
from rlhf_core.models.attention import Blocks, visible_blocks


def attend_pieces(
    over: Callable[..., jax.Array],
    mesh: AbstractMesh,
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    of_rows: tuple[jax.Array, jax.Array],
    window: jax.Array | None,
    **more: Any,
) -> jax.Array:
    """Compute attention over rows in the pieces of `cut_rows`, cut in the order of `zigzag`.

    Every device gathers the keys and values of its rows, and computes its own queries. Where windows are short, or the
    sequences of packed rows, neighbours send it what it sees of the parts before its own.
    arrays: q, k, v of pieces. of_rows: positions, visible_until of whole rows. more: further arguments of `over`:
    softcap, and arrays by kv head.
    """
    axes = row_axes()
    size = mesh.shape["context"]
    tensor = "tensor" if arrays[1].shape[1] % mesh.shape["tensor"] == 0 else None
    pieces = PartitionSpec(axes, tensor)
    heads = PartitionSpec(tensor)
    nothing = PartitionSpec()

    def local(arrays: Any, of_rows: Any, window: Any, reach: Any, by_head: Any) -> jax.Array:
        q, *both = arrays
        part = q.shape[3] // 2
        near = [functools.partial(_ends_before, count=part * n // SHARES) for n in NEAR]
        k, v = lax.switch((reach > np.array(NEAR)).sum(), [*near, _all_parts], both)
        number = lax.axis_index("context").astype(jnp.int32)
        starts = jnp.stack([number, 2 * size - 1 - number]) * part
        return over(q, k, v, *of_rows, window=window, softcap=softcap, starts=starts, **by_head)

    softcap = more.pop("softcap", None)
    rows = PartitionSpec(axes[:-1])
    mixed: jax.Array = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=((pieces,) * 3, (rows, rows), None if window is None else nothing, nothing, heads),
        out_specs=PartitionSpec(axes, None, tensor),
        check_vma=False,
    )(arrays, of_rows, window, sees_before(*of_rows, window, 2 * size), more)
    return mixed


SHARES = 16
"""Blocks of a part of a row whose keys are seen or not; 16 divides the tokens of parts."""
NEAR = (1, 4, 16)
"""Blocks before a part that neighbours send: the fewest of these that are enough, else all parts are gathered."""


def sees_before(
    positions: jax.Array, visible_until: jax.Array, window: jax.Array | None, parts: int
) -> jax.Array:
    """Count the blocks before its own part of the row that a query of any row may see, at most: int32."""
    block = visible_until.shape[1] // (SHARES * parts)
    visible = visible_blocks(positions, visible_until, window, Blocks(block, block)).any(0)
    blocks = np.arange(len(visible))
    before = blocks[:, None] // SHARES * SHARES - blocks
    return jnp.where(visible, before, 0).max()


def _all_parts(both: list[jax.Array]) -> list[jax.Array]:
    """Gather keys and values of rows, [B, K, T, h], from the devices' two parts each, [B, K, t, h]."""

    def whole(x: jax.Array) -> jax.Array:
        first, second = jnp.split(lax.all_gather(x, "context"), 2, axis=3)
        parts = jnp.moveaxis(jnp.concatenate([first, second[::-1]]), 0, 2)
        return parts.reshape(*parts.shape[:2], -1, parts.shape[-1])

    return [whole(x) for x in both]


def _ends_before(both: list[jax.Array], count: int) -> list[jax.Array]:
    """Make what `_all_parts` does of a device's two parts and the last `count` tokens of those before them, which
    neighbours have; others are 0 there.
    """
    size, number = lax.axis_size("context"), lax.axis_index("context")

    def whole(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x, 2, axis=2)
        part = first.shape[2]
        ends = first[:, :, part - count :], second[:, :, part - count :]
        last = number == size - 1  # its two parts are neighbours, too
        before = lax.ppermute(ends[0], "context", [(i, i + 1) for i in range(size - 1)])
        between = lax.ppermute(ends[1], "context", [(i + 1, i) for i in range(size - 1)])
        # Part 0 has none before it.
        placed = jnp.zeros((*x.shape[:2], count + 2 * size * part, x.shape[3]), x.dtype)
        for at, parts in (
            (number, [before, first]),
            (2 * size - 1 - number, [jnp.where(last, ends[0], between), second]),
        ):
            placed = lax.dynamic_update_slice_in_dim(placed, jnp.concatenate(parts, 2), at * part, 2)
        return placed[:, :, count:]

    return [whole(x) for x in both]


def across_pieces(
    function: Callable[[Any, Any, Any], jax.Array], mesh: AbstractMesh, x: Any, by_part: Any, of_rows: Any
) -> jax.Array:
    """Call a function of whole rows, in which channels, or heads, are independent, on rows that `cut_rows` has cut.

    The devices that share a row exchange pieces of all channels for some channels of the whole row, and back.
    function: (x, by_part, of_rows) → [B, T, n, …]. x: arrays of pieces, [B · c, T / c, n, …], cut in the order of
    `zigzag`. by_part: arrays [n, …]. of_rows: arrays of whole rows, [B, …].
    """
    axes = row_axes()
    size = mesh.shape["context"]
    n = jax.tree.leaves(x)[0].shape[2]

    def with_room(axis: int) -> Callable[[jax.Array], jax.Array]:
        return lambda x: jnp.pad(x, [(0, -n % size if i == axis else 0) for i in range(x.ndim)])

    def local(x: Any, by_part: Any, of_rows: Any) -> jax.Array:
        def gathered(x: jax.Array) -> jax.Array:
            whole = lax.all_to_all(x, "context", 2, 1, tiled=True)
            return whole[:, np.argsort(zigzag(whole.shape[1], size))]

        made = function(jax.tree.map(gathered, x), by_part, of_rows)
        back: jax.Array = lax.all_to_all(made[:, zigzag(made.shape[1], size)], "context", 1, 2, tiled=True)
        return back

    pieces = PartitionSpec(axes)
    parts = PartitionSpec("context")
    rows = PartitionSpec(axes[:-1])
    over = jax.shard_map(local, mesh=mesh, in_specs=(pieces, parts, rows), out_specs=pieces, check_vma=False)
    made: jax.Array = over(jax.tree.map(with_room(2), x), jax.tree.map(with_room(0), by_part), of_rows)
    return made[:, :, :n]
