"""What a decoder's layer reads beside its input: the tokens before its own, in packed rows or in a cache.

B rows of T tokens; K heads of keys and values, G heads of queries for each, of h dimensions; S entries of a cache.

A pass has one reader, and every layer of it a `LayerContext` with this reader. Layers call `LayerContext.attend` or
`LayerContext.recur`, and so compute the same in training, prefill and decoding.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh

from rlhf_core.contracts import AttentionOver
from rlhf_core.models.attention import attend_at
from rlhf_core.models.attention_cached import attend_cached, attend_groups
from rlhf_core.models.attention_pieces import attend_pieces
from rlhf_core.models.experts import Routed, Routing


class Aux(NamedTuple):
    """What a layer returns beside its output."""

    cache: Any = None
    """What later tokens read of these: rotated keys [B, K, h, S] and values [B, K, S, h] in the compute dtype; a state
    of a layer that has one; None of a layer that reads another layer's keys and values."""
    routed: Routed | None = None
    """What its router did, where `LayerContext.routing` asks for it."""


class Reader(Protocol):
    """How the tokens of a pass read those before them."""

    def attend(
        self,
        ctx: LayerContext,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        options: Mapping[str, Any],
    ) -> tuple[jax.Array, Any]:
        """Do what `LayerContext.attend` does; options: `softcap`, and `sinks` of a layer that has some."""

    def recur(self, ctx: LayerContext, mixer: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        """Do what `LayerContext.recur` does."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerContext:
    """What one layer reads beside its input, [B, T, D].

    rotation: of its tokens: cosine and sine, float32 [B, T, pairs], and, of some families, the queries' growth.
    window: how many positions back a query sees, int32 scalar; None: all of them.
    given: the layer's own input, [B, T, size], of a family whose layers have one.
    routing: what its router is told and asked; None: nothing.
    cache: of the tokens before these, where they follow those of a cache. source_cache: the cache of the layer whose
        keys and values this one reads, if it has none of its own. source_layer: the number of the layer whose cache it
        reads, mostly its own.
    """

    reader: Reader
    rotation: tuple[jax.Array, ...]
    window: Any = None
    given: jax.Array | None = None
    routing: Routing | None = None
    cache: Any = None
    source_cache: Any = None
    source_layer: int | None = None

    def attend(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        *,
        softcap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Attend to these tokens and those before them: ([B, T, K · G · h], the layer's `Aux.cache`).

        q: scaled queries, [B, K, G, T, h]. k, v: [B, K, T, h]; None: those of `source_cache`. softcap, sinks: see
        `attention.attend`.
        """
        options: dict[str, Any] = {"softcap": softcap}
        if sinks is not None:
            options["sinks"] = sinks
        return self.reader.attend(self, q, k, v, options)

    def recur(self, mixer: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        """Run a mixer with a state, see `layer.Recurrent`, over these tokens: ([B, T, D], the layer's `Aux.cache`)."""
        return self.reader.recur(self, mixer, x)


@dataclass(frozen=True, eq=False, kw_only=True)
class RowReader:
    """Tokens of packed rows read those before them in their own sequence.

    positions, visible_until: int32 [B, T], of whole rows. over: attention over rows. mesh: what cuts the rows that
    layers get into pieces; None: they are whole. orders: {class of a mixer with a state: its `Recurrent.order`}.
    """

    positions: jax.Array
    visible_until: jax.Array
    over: AttentionOver
    mesh: AbstractMesh | None = None
    orders: Mapping[Any, Any] = field(default_factory=dict)

    def attend(
        self, ctx: LayerContext, q: Any, k: Any, v: Any, options: Mapping[str, Any]
    ) -> tuple[jax.Array, Any]:
        if k is None:
            keys, v = ctx.source_cache
            k = keys.swapaxes(2, 3)
            kept = None
        else:
            kept = k.swapaxes(2, 3), v
        rows = self.positions, self.visible_until
        window = None if ctx.window is None else jnp.int32(ctx.window)
        if self.mesh is not None:
            return attend_pieces(self.over, self.mesh, (q, k, v), rows, window, **options), kept
        return self.over(q, k, v, *rows, window=window, **options), kept

    def recur(self, ctx: LayerContext, mixer: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        out: tuple[jax.Array, Any] = mixer.over_rows(x, self.orders[type(mixer)])
        return out


@dataclass(frozen=True, eq=False, kw_only=True)
class SomeTokensReader:
    """Some tokens of rows attend to keys and values of all. at: int32 [B, n], their indices. k, v: [B, K, T, h]."""

    rows: RowReader
    at: jax.Array
    k: jax.Array
    v: jax.Array

    def attend(
        self, ctx: LayerContext, q: Any, k: Any, v: Any, options: Mapping[str, Any]
    ) -> tuple[jax.Array, Any]:
        rows = self.rows.positions, self.rows.visible_until
        return attend_at(q, self.k, self.v, self.at, *rows, window=ctx.window, **options), None

    def recur(self, ctx: LayerContext, mixer: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        raise NotImplementedError("a state is computed from all tokens")


def written(x: Any, new: jax.Array, slot: jax.Array | int, axis: int) -> Any:
    """Write `new`, [B, …], into the cache `x` from index `slot` of `axis` on: one for all rows, or one for each. In a
    tuple of parts, it is one entry.
    """
    if isinstance(x, tuple):
        ends = itertools.accumulate(part.shape[axis] for part in x)
        return tuple(
            _written_inside(part, new.squeeze(axis), slot - end + part.shape[axis], axis)
            for part, end in zip(x, ends, strict=True)
        )
    if jnp.ndim(slot) == 0:
        start: list[jax.Array | int] = [0] * x.ndim
        start[axis] = slot
        return lax.dynamic_update_slice(x, new, start)
    over_rows: Any = jax.vmap(lambda row, part, at: lax.dynamic_update_slice_in_dim(row, part, at, axis - 1))
    return over_rows(x, new, slot)


def _written_inside(part: jax.Array, new: jax.Array, at: jax.Array | int, axis: int) -> jax.Array:
    """Write an entry of each row, [B, …], to index `at`, int32 [B], of `axis`, if there is one."""
    size = part.shape[axis]
    at = jnp.where((at >= 0) & (at < size), at, size)
    index = (jnp.arange(len(part)), *[slice(None)] * (axis - 1), at)
    return part.at[index].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class CacheReader:
    """Tokens that follow those of a cache, whose entries have an axis S.

    positions: int32 [B, T], of these tokens. slot: the entry of the first of them, one for all rows or int32 [B].
    entries: int32 [B, S], the positions of the cache's entries with theirs. count: int32 [B], the tokens of a row
    before its padding; None: T is 1.
    """

    positions: jax.Array
    slot: jax.Array | int
    entries: jax.Array
    count: jax.Array | None = None

    def attend(
        self, ctx: LayerContext, q: Any, k: Any, v: Any, options: Mapping[str, Any]
    ) -> tuple[jax.Array, Any]:
        if k is None:
            keys, values = ctx.source_cache
            return self.read(ctx, q, keys, values, options), None
        keys, values = ctx.cache
        keys = written(keys, k.swapaxes(2, 3), self.slot, 3)
        values = written(values, v, self.slot, 2)
        return self.read(ctx, q, keys, values, options), (keys, values)

    def read(
        self, ctx: LayerContext, q: Any, keys: Any, values: Any, options: Mapping[str, Any]
    ) -> jax.Array:
        """Attend to a layer's keys and values, these tokens' included: [B, T, K · G · h]."""
        raise NotImplementedError

    def recur(self, ctx: LayerContext, mixer: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        # At position 0 there is no token before: whatever is in the cache is no state.
        state = jax.tree.map(functools.partial(_zero_where, self.positions[:, 0] == 0), ctx.cache)
        if self.count is not None:
            extended: tuple[jax.Array, Any] = mixer.extend(x, state, self.count)
            return extended
        out, state = mixer.next(x[:, 0], state)
        return out[:, None], state


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenReader(CacheReader):
    """One token per row reads the entries `visible`, bool [B, S]."""

    visible: jax.Array

    def read(
        self, ctx: LayerContext, q: Any, keys: Any, values: Any, options: Mapping[str, Any]
    ) -> jax.Array:
        # With a slot of its own, a row's entries lie in the order of their positions.
        in_order = jnp.ndim(self.slot) > 0
        seen = self.visible
        if ctx.window:
            place = jnp.arange(seen.shape[1]) if in_order else self.entries
            seen = seen & (self.positions - place < ctx.window)
        return attend_cached(q, keys, values, seen[:, None], **options, in_order=in_order)


@dataclass(frozen=True, eq=False, kw_only=True)
class GroupReader(CacheReader):
    """One token per row reads the row's own entries up to `slot`, and those of its prompt, which G rows share.

    prompts: by layer, the caches of P prompts; used: bool [P, time], their entries that are not padding;
    prompt_positions: int32 [P, time], of these.
    """

    prompts: tuple[Any, ...]
    used: jax.Array
    prompt_positions: jax.Array

    def read(
        self, ctx: LayerContext, q: Any, keys: Any, values: Any, options: Mapping[str, Any]
    ) -> jax.Array:
        assert ctx.source_layer is not None
        entries = jnp.arange(self.entries.shape[1])
        own = entries <= self.slot
        read = self.used[:, None]
        if ctx.window:
            age = (
                self.positions.reshape(len(self.used), -1, 1) - self.prompt_positions[:, None]
            )  # [P, G, time]
            read = read & (age < ctx.window)
            own = own & (self.slot - entries < ctx.window)
        before = (*self.prompts[ctx.source_layer], read)
        return attend_groups(q[:, :, :, 0], before, (keys, values, own), **options)[:, None]


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkReader(CacheReader):
    """T tokens per row read the entries up to their own, each at the index of its position."""

    def read(
        self, ctx: LayerContext, q: Any, keys: Any, values: Any, options: Mapping[str, Any]
    ) -> jax.Array:
        age = self.positions[:, :, None] - jnp.arange(self.entries.shape[1])  # [B, T, S]
        seen = age >= 0 if ctx.window is None else (age >= 0) & (age < ctx.window)
        return attend_cached(q, keys, values, seen, **options, in_order=True)


def previous_tokens(positions: jax.Array, visible_until: jax.Array) -> jax.Array:
    """Return the index of the token before each one in its own sequence, int32 [B, T]; -1 where it has none.

    positions, visible_until: int32 [B, T], see `rlhf_core.contracts.Rows`.
    """
    index = jnp.arange(positions.shape[1], dtype=jnp.int32)
    starts = lax.cummax(jnp.where(positions == 0, index, -1), axis=1)  # of the token's tree
    follows = (jnp.roll(positions, 1, 1) == positions - 1) & (jnp.roll(visible_until, 1, 1) > index)
    # The first token of a later branch follows the prefix, in which a token's position is its index in the tree.
    return jnp.where(positions == 0, -1, jnp.where(follows, index - 1, starts + positions - 1))


def _zero_where(rows: jax.Array, x: jax.Array) -> jax.Array:
    """Set the rows of `x`, [B, …], to 0 where `rows`, bool [B]."""
    return jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)), 0, x)
