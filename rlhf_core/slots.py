"""Sequences that wait, and the slots of a batch in which they are decoded: one that ends makes room for the next.

Slots write their keys and values at the same place of the cache, used as a ring, whenever they began: a sequence is
what its slot wrote last. Each shard of a mesh has a queue and slots of its own, so that nothing moves between devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_core.mesh import row_sharding

ENDED = 1
"""Of `Written.ends`: a stop token was sampled, or a stop string completed."""
CUT = 2
"""Of `Written.ends`: the longest length was reached."""


class Queue(NamedTuple):
    """Which sequences a shard has begun; its sequence q is completion q mod G of its prompt q // G."""

    wanted: jax.Array
    """int32 [shards], how many there are."""
    begun: jax.Array
    """int32 [shards], how many have or had a slot."""
    step: jax.Array
    """int32 [shards, sequences], the step at which each got its slot."""
    slot: jax.Array
    """int32 [shards, sequences], which one."""

    def waits(self) -> jax.Array:
        """bool [shards]."""
        return self.begun < self.wanted


class Written(NamedTuple):
    """What was sampled, step by step: steps are [T], slots of all shards [B]."""

    tokens: jax.Array
    """int32 [T, B]."""
    logps: jax.Array
    """float32 [T, B]."""
    ends: jax.Array
    """int8 [T, B]: 0, ENDED or CUT."""


def most_steps(sequences: int, slots: int, longest: int) -> int:
    """Steps that `sequences` of at most `longest` tokens take at most: the k-th begins once k - slots have ended."""
    return -(-sequences // slots) * longest


def take(tree: Any, index: jax.Array) -> Any:
    """Rows `index`, int32 [shards, n], of every array [shards · rows, …], counted within the shard: [shards · n, …]."""
    shards = index.shape[0]

    def one(x: jax.Array) -> jax.Array:
        parts = x.reshape(shards, -1, *x.shape[1:])
        return jax.vmap(lambda part, i: part[i])(parts, index).reshape(-1, *x.shape[1:])

    return jax.tree.map(one, tree)


def put(tree: Any, index: jax.Array, new: Any, needed: jax.Array) -> Any:
    """Arrays [shards · rows, …] with row `index`, int32 [shards], of each shard replaced by its row of `new`,
    [shards, …], where `needed`, bool [shards].
    """
    shards = index.shape[0]

    def one(x: jax.Array, row: jax.Array) -> jax.Array:
        def shard(part: jax.Array, row: jax.Array, i: jax.Array, needed: jax.Array) -> jax.Array:
            # Not a scatter that drops rows: this is one copy of the row, in place.
            kept = jnp.where(needed, row, lax.dynamic_index_in_dim(part, i, 0, keepdims=False))
            return lax.dynamic_update_index_in_dim(part, kept, i, 0)

        parts = x.reshape(shards, -1, *x.shape[1:])
        return each_shard(shard)(parts, row, index, needed).reshape(x.shape)

    return jax.tree.map(one, tree, new)


def each_shard(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` over the first axis of its arguments. Where that is one, without the gathers that vmap makes."""

    def over(*arrays: jax.Array) -> Any:
        if arrays[0].shape[0] > 1:
            return jax.vmap(function)(*arrays)
        return jax.tree.map(lambda x: x[None], function(*(x[0] for x in arrays)))

    return over


def spread(mesh: Mesh, tree: Any) -> Any:
    """Every array's first axis over the rows of the mesh; the others as the compiler finds best."""
    sharding = row_sharding(mesh)

    def one(x: jax.Array) -> jax.Array:
        spec = PartitionSpec(*sharding.spec, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return jax.tree.map(one, tree)


def read(written: Any, step: Any, slot: Any, longest: int) -> tuple[np.ndarray, ...]:
    """(tokens int32 [N, longest], lengths int32 [N], logps float32 [N, longest], finished bool [N]) of N sequences that
    began at `step` in `slot`, int32 [N] each; NumPy.
    """
    tokens, logps, ends = (np.asarray(x) for x in written)
    when = np.minimum(np.asarray(step)[:, None] + np.arange(longest), len(tokens) - 1)
    where = np.asarray(slot)[:, None]
    ended = ends[when, where]
    last = (ended > 0).argmax(1)
    inside = np.arange(longest) <= last[:, None]
    return (
        np.where(inside, tokens[when, where], 0),
        (last + 1).astype(np.int32),
        np.where(inside, logps[when, where], np.float32(0)),
        np.take_along_axis(ended, last[:, None], axis=1)[:, 0] == ENDED,
    )
