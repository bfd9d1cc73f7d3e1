"""Prefill of new contexts in packed rows, apart from the caches of slots: even of those that wait for one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlhf_core.models.attention_cached import CACHE_PART
from rlhf_core.runtime.machine import platform
from rlhf_core.sampling.loop import time_axes
from rlhf_core.sampling.turns import CACHE, FED_AT_ONCE, ROWS, TurnsProgram, on_shards, weights_spec

PACKED = CACHE_PART
"""Tokens of a row, which is as many as a context may have."""
PACKED_AT_ONCE = {"cpu": 256}
"""Tokens that a shard is fed together, padding included; elsewhere `FED_AT_ONCE`."""
PIECE, SPAN = 16, 64
"""Contexts in a row begin at multiples of the one and lie between multiples of the other, or begin the row: products
with values are added in such spans, so that a context has the same bits at each of these places."""


class PackedContexts(NamedTuple):
    """Contexts in rows of each shard, [shards · rows, PACKED], NumPy arrays on the host; see `Definition.hidden`."""

    tokens: Any
    """int32; the rest of a row is padding."""
    positions: Any
    """int32."""
    visible_until: Any
    """int32."""


class Pieces(NamedTuple):
    """Where the contexts in packed rows belong, [shards · pieces], NumPy arrays on the host."""

    slot: Any
    """int32, within the shard."""
    used: Any
    """bool; those that are not, are padding, and follow the others of their shard."""
    row: Any
    """int32, within the shard."""
    start: Any
    """int32, the index of the first token."""


class Prefilled(NamedTuple):
    """A context whose keys and values are computed, and in no slot yet."""

    cache: Future[Any]
    """Of all that was computed together."""
    row: int
    """Within the shard."""
    start: int


def packed_rows(program: TurnsProgram) -> int:
    """Count the rows that a shard is fed together."""
    return PACKED_AT_ONCE.get(platform(), FED_AT_ONCE) // PACKED


def padded_packed(program: TurnsProgram) -> PackedContexts:
    """Make rows without a context."""
    return PackedContexts(
        *(np.zeros((packed_rows(program) * program.shards, PACKED), np.int32) for _ in PackedContexts._fields)
    )


def padded_pieces(program: TurnsProgram) -> Pieces:
    """Make what belongs nowhere: as many for each shard as rows have places."""
    count = packed_rows(program) * (PACKED // PIECE) * program.shards
    return Pieces(*(np.zeros(count, dtype) for dtype in (np.int32, np.bool_, np.int32, np.int32)))


@functools.partial(jax.jit, static_argnames="program")
def prefill(weights: Any, packed: PackedContexts, *, program: TurnsProgram) -> Any:
    """Compute the cache of contexts in rows, for `place`."""

    def shard(weights: Any, packed: PackedContexts) -> Any:
        return program.definition.prefill(weights, *packed)[1]

    return on_shards(program, shard, (weights_spec(program), ROWS), CACHE)(weights, packed)


@functools.partial(jax.jit, static_argnames="program", donate_argnames="cache")
def place(cache: Any, read: Any, pieces: Pieces, *, program: TurnsProgram) -> Any:
    """Write what `prefill` computed into the caches of slots. What follows a context in its row comes with it, and is
    overwritten before it is seen.
    """
    axes = time_axes(program.definition)

    def shard(cache: Any, read: Any, pieces: Pieces) -> Any:
        longer = jax.tree.map(
            lambda x, axis: jnp.pad(x, [(0, PACKED * (i == axis)) for i in range(x.ndim)]), read, axes
        )

        def one(i: jax.Array, cache: Any) -> Any:
            slot, _, row, start = (x[i] for x in pieces)

            def write(axis: int, x: Any, new: jax.Array) -> Any:
                if isinstance(x, tuple):  # the first part is as long as a row
                    return write(axis, x[0], new), *x[1:]
                new = lax.dynamic_slice_in_dim(lax.dynamic_slice_in_dim(new, row, 1), start, PACKED, axis)
                return lax.dynamic_update_slice(x, new, (slot, *[0] * (x.ndim - 1)))

            return jax.tree.map(write, axes, cache, longer)

        return lax.fori_loop(0, pieces.used.sum(), one, cache)

    return on_shards(program, shard, (CACHE, CACHE, ROWS), CACHE)(cache, read, pieces)


def pack(
    packed: PackedContexts, rows: range, contexts: Sequence[np.ndarray]
) -> Iterator[tuple[int, int, int]]:
    """Put contexts, int32 [n] with n ≤ PACKED, into `rows`, each at the first place where it fits; yield (its index,
    its row of `rows`, its start) for those that fit somewhere.
    """
    spans = PACKED // SPAN
    used = [0] * (len(rows) * spans)
    for index, tokens in enumerate(contexts):
        count = len(tokens)
        if count > SPAN:
            fits = [i for i in range(0, len(used), spans) if not any(used[i : i + spans])]
        else:
            fits = [i for i, taken in enumerate(used) if taken + count <= SPAN]
        if not fits:
            continue
        first = fits[0]
        row, start = divmod(first * SPAN + used[first], PACKED)
        for i in range(first, first + -(-count // SPAN)):
            used[i] += -(-min(count, SPAN) // PIECE) * PIECE
            count -= SPAN
        where = rows[row], slice(start, start + len(tokens))
        packed.tokens[where], packed.positions[where] = tokens, np.arange(len(tokens))
        packed.visible_until[where] = start + len(tokens)
        yield index, row, start


def prefill_all(
    program: TurnsProgram,
    contexts: Sequence[Sequence[np.ndarray]],
    run: Callable[[PackedContexts], Future[Any]],
) -> list[list[Prefilled]]:
    """Prefill the contexts of each shard, the longest first, in as many calls of `run` as they take."""
    orders = [sorted(range(len(each)), key=lambda i: -len(each[i])) for each in contexts]
    found: list[dict[int, Prefilled]] = [{} for _ in contexts]
    rows = packed_rows(program)
    while any(orders):
        packed = padded_packed(program)
        places = []
        for shard, order in enumerate(orders):
            mine = range(shard * rows, (shard + 1) * rows)
            places.append(
                [(order[i], *at) for i, *at in pack(packed, mine, [contexts[shard][i] for i in order])]
            )
        cache = run(packed)
        for shard, placed in enumerate(places):
            found[shard] |= {index: Prefilled(cache, *at) for index, *at in placed}
            orders[shard] = [i for i in orders[shard] if i not in found[shard]]
    return [[each[i] for i in range(len(each))] for each in found]
