"""What the attention kernels of all platforms share."""

from __future__ import annotations

import math
from typing import Any

import jax

from rlhf_core.models import MASKED, Blocks, visible_blocks

LOWEST = 0.1 * MASKED
"""Start of a running maximum: so far above MASKED that the weight of an invisible key is exactly 0."""


def visible_of(rows: Any, blocks: Blocks) -> jax.Array:
    """Find `visible_blocks` of the rows of a kernel: visible_until, positions, the window as int32 [1], and the indices
    and positions of the queries where these are not all of a row; None without.
    """
    until, positions, window, of_queries = rows
    near, at = None if window is None else window[0], None if of_queries is None else of_queries[0]
    visible: jax.Array = visible_blocks(positions, until, near, blocks, at)
    return visible


def kernel_cost(products: int, queries: jax.Array, keys: jax.Array, arrays: Any) -> dict[str, int]:
    """Count what a kernel does at most: all pairs before a query are visited, and every array is moved once.

    products: of queries × keys, two per pair in the forward pass. queries: [B, K, G, time, h]; keys: [B, K, time, h].
    arrays: those read and written.
    """
    *heads, time, size = queries.shape
    pairs = math.prod(heads) * time * (keys.shape[2] + 1) // 2
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))
    return {"flops": 2 * products * pairs * size, "transcendentals": pairs, "bytes_accessed": moved}
