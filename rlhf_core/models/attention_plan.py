"""Plan which blocks of keys each block of queries visits, from what the queries of rows see.

The loops of `attention_blocks` and both Pallas kernels visit these blocks and no others.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.models.attention import MASKED

LOWEST = 0.1 * MASKED
"""Start of a running maximum: so far above MASKED that the weight of an invisible key is exactly 0."""


class Blocks(NamedTuple):
    """How many queries, and how many keys, are computed at once; one divides the other."""

    queries: int
    keys: int

    def fill(self, time: int) -> int:
        """Count the tokens that a row of `time` lacks for whole blocks of both."""
        return -time % max(self)


def visible_blocks(positions: Any, visible_until: Any, window: Any | None, blocks: Blocks) -> Any:
    """Find the blocks of keys that a block of queries has to visit: bool [B, query blocks, key blocks].

    positions, visible_until: int32 [B, time], of NumPy or JAX; whole blocks. window: as in `attention.attend`.
    No pair that is seen lies outside; blocks in which no pair is seen may be among them.
    """
    rows, time = visible_until.shape
    first_query, first_key = np.arange(0, time, blocks.queries)[:, None], np.arange(0, time, blocks.keys)
    last_seen = visible_until.reshape(rows, 1, -1, blocks.keys).max(-1)
    visible = (last_seen > first_query) & (first_key < first_query + blocks.queries)
    if window is not None:
        queries = positions.reshape(rows, -1, 1, blocks.queries).min(-1)
        visible &= queries - positions.reshape(rows, 1, -1, blocks.keys).max(-1) < window
    return visible


def visits(visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (int32 [..., n, m], int32 [..., n]): the visible ones of m blocks, in order and before the others; and
    how many are visible.

    visible: bool [..., n, m], from `visible_blocks`, or its transpose for the queries that a block of keys visits.
    """
    order = jnp.argsort(~visible, axis=-1, stable=True).astype(jnp.int32)
    return order, visible.sum(-1, dtype=jnp.int32)


def seen_pairs(
    queries: Any, keys: Any, until: Any, query_positions: Any, key_positions: Any, window: Any
) -> Any:
    """Compute which queries see which keys, for shapes that broadcast to both orders; without a window the last three
    are None.

    queries, keys: indices; until: of the keys; positions and window as in `attention.attend`.
    """
    seen = (keys <= queries) & (queries < until)
    return seen if window is None else seen & (query_positions - key_positions < window)


def kernel_cost(products: int, queries: jax.Array, arrays: Any) -> dict[str, int]:
    """Count what a kernel does at most: all pairs before a query are visited, and every array is moved once.

    products: of queries × keys, two per pair in the forward pass. queries: [B, K, G, time, h]. arrays: those read and
        written.
    """
    *heads, time, size = queries.shape
    pairs = math.prod(heads) * time * (time + 1) // 2
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))
    return {"flops": 2 * products * pairs * size, "transcendentals": pairs, "bytes_accessed": moved}


def filled(x: jax.Array, axis: int, fill: int) -> jax.Array:
    """Append `fill` zeros along an axis."""
    return jnp.pad(x, [(0, fill if i == axis else 0) for i in range(x.ndim)])
