"""The compiled programs of conversations: feed tokens into the caches of slots, copy caches, and decode turns.

A conversation's cache has an entry for every position, so that one slot can pause while others decode, and can
be fed what its environment said. All programs run within `jax.shard_map`: each shard of rows has its own slots,
numbered from 0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from rlhf_core.contracts import Weights
from rlhf_core.mesh import AXES, ROW_AXES, put_rows, replicated_sharding, row_multiple
from rlhf_core.models import Definition
from rlhf_core.models.attention import CACHED_BLOCK
from rlhf_core.runtime.background import BackgroundCompiler
from rlhf_core.runtime.devices import platform
from rlhf_core.sampling.loop import STATE, empty_cache, put, take, time_axes
from rlhf_core.sampling.next_token import CUT, ENDED, Settings, Stops, TokenSampler, mark
from rlhf_core.sampling.placement import Peers, param_specs

if TYPE_CHECKING:
    from rlhf_core.sampling import SamplingOptions

CHUNKS = (16, 64, 256)
"""Tokens that are fed to a slot together, padding included."""
FED_AT_ONCE = 1024
"""Tokens that a shard is fed together, at most, padding included."""
SHARE = 8
"""Decoding stops for the host once one in so many of the turns that ran has ended; as large a share is fed together."""
STEPS = 64
"""The most tokens per turn that are decoded before the host sees them."""

SHORT_CACHE = CACHED_BLOCK
"""Entries of the caches of turns with settings on a CPU while nothing longer runs: out of longer ones, attention copies
every block."""
PATIENCE = 16
"""Times that turns are decoded in caches longer than they need, before these are cut."""
PACKED = 128
"""Tokens of a row in which new contexts are prefilled together."""
PACKED_AT_ONCE = {"cpu": 256}
"""Tokens of these rows that a shard is fed together, padding included; elsewhere `FED_AT_ONCE`."""
PIECE, SPAN = 16, 64
"""Contexts in a row begin at multiples of the one and lie between multiples of the other, or begin the row: products
with values are added in such spans, so that a context has the same bits at each of these places."""

STOP_IDS = 16
"""Stop tokens that a turn with its own settings may have."""

ALIGNED = 8
"""Caches and padded prompts have a multiple of this; products over other numbers of keys make XLA copy them on GPUs."""

CACHE = PartitionSpec(AXES)
"""Of arrays that every device has its own part of, whichever axis of theirs `tensor` cuts: one part after the other."""
ROWS = PartitionSpec(ROW_AXES)
WHOLE = PartitionSpec()


def cache_length(tokens: int) -> int:
    """Count the entries of the cache of a conversation of so many tokens, behind which the shortest chunk fits."""
    return -(-(tokens + CHUNKS[0]) // ALIGNED) * ALIGNED


@dataclass(frozen=True)
class TurnsProgram:
    """The static arguments of the compiled programs."""

    definition: Definition
    options: SamplingOptions
    mesh: Mesh
    stop_ids: tuple[int, ...]
    slots: int
    """Conversations that each shard of rows holds at a time."""
    length: int
    """Entries of a slot's cache, see `cache_length`."""
    key_type: str
    shared_layers: bool
    """Whether devices share layers, see `sampling.placement`; otherwise `Definition.prepare` made the weights."""
    alternatives: int | None = None
    """Likeliest tokens that are reported, of turns that each have settings; None: `options` are the settings of all."""

    @property
    def shards(self) -> int:
        return row_multiple(self.mesh)

    @property
    def penalised(self) -> bool:
        """Return whether tokens that were seen have another probability."""
        return self.options.repetition_penalty != 1

    @property
    def has_states(self) -> bool:
        """Return whether caches hold states, see `Definition`."""
        return STATE in jax.tree.leaves(time_axes(self.definition))

    @property
    def lengths(self) -> tuple[int, ...]:
        """List how long caches may be, ascending: on a CPU, short ones while nothing longer runs."""
        short = self.alternatives is not None and platform() == "cpu" and self.length > SHORT_CACHE
        return (SHORT_CACHE, self.length) if short else (self.length,)

    @property
    def packs(self) -> bool:
        """Return whether contexts that fit a row of `PACKED` are prefilled there."""
        return self.alternatives is not None and not self.has_states

    @property
    def packed_rows(self) -> int:
        """Count the rows of `PACKED` tokens that a shard is fed together."""
        return PACKED_AT_ONCE.get(platform(), FED_AT_ONCE) // PACKED

    @property
    def chunks(self) -> tuple[int, ...]:
        """List the lengths that `extend` is compiled for, ascending."""
        return tuple(chunk for chunk in CHUNKS if chunk <= self.length)

    def rows(self, chunk: int) -> int:
        """Count the slots of a shard that are fed `chunk` tokens together."""
        return max(min(FED_AT_ONCE // chunk, self.slots // SHARE), 1)

    @property
    def copies(self) -> int:
        """Count the caches of a shard that are copied together."""
        return max(self.slots // SHARE, 1)


class Slots(NamedTuple):
    """The turn in each slot of all shards, [B], NumPy arrays on the host."""

    active: Any
    """bool: the turn continues."""
    last: Any
    """int32, the last token of the conversation, which is not in its cache."""
    position: Any
    """int32, of that token."""
    drawn: Any
    """int32, tokens of the turn so far."""
    limit: Any
    """int32, the most tokens of the turn."""
    matched: Any
    """int32, the state in the table of stop strings."""
    ids: Any
    """uint32, the conversation's id."""
    turn: Any
    """uint32, the number of the turn."""
    settings: Settings | None = None
    """How turns are sampled, of a program whose turns have settings."""


def empty_slots(program: TurnsProgram) -> Slots:
    """Make the slots, NumPy arrays, in which nothing runs."""
    count = program.slots * program.shards
    types = (np.bool_, *[np.int32] * 5, *[np.uint32] * 2)
    arrays: Any = [np.zeros(count, dtype) for dtype in types]
    slots = Slots(*arrays)
    if program.alternatives is None:
        return slots
    words = jax.random.key_data(jax.random.key(0, impl=program.key_type)).shape[-1]
    whole = np.full(count, program.definition.vocab_size, np.int32)
    settings = Settings(
        keys=np.zeros((count, words), np.uint32),
        temperature=np.zeros(count, np.float32),
        top_p=np.ones(count, np.float32),
        top_k=whole,
        min_p=np.zeros(count, np.float32),
        stop_ids=np.full((count, STOP_IDS), -1, np.int32),
        alternatives=np.zeros(count, np.bool_),
    )
    return slots._replace(settings=settings)


class Fed(NamedTuple):
    """What `extend` feeds to some slots of each shard, [shards · rows], NumPy arrays on the host."""

    slot: Any
    """int32, within the shard."""
    used: Any
    """bool; the other rows are padding."""
    tokens: Any
    """int32 [shards · rows, chunk], of which the last may be padding."""
    start: Any
    """int32, the position of the first of them."""
    count: Any
    """int32, how many of them are no padding."""


def padded_fed(program: TurnsProgram, rows: int, chunk: int) -> Fed:
    """Make what feeds nothing to `rows` slots of each shard."""
    count = rows * program.shards
    types = (((), np.int32), ((), np.bool_), ((chunk,), np.int32), ((), np.int32), ((), np.int32))
    return Fed(*(np.zeros((count, *shape), dtype) for shape, dtype in types))


class Packed(NamedTuple):
    """Contexts in rows of each shard, [shards · rows, time], NumPy arrays on the host; see `Definition.hidden`."""

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
    """bool; the others are padding."""
    row: Any
    """int32, within the shard."""
    start: Any
    """int32, the index of the first token."""


def padded_packed(program: TurnsProgram) -> tuple[Packed, Pieces]:
    """Make rows without a context."""
    rows = program.packed_rows * program.shards
    packed = Packed(*(np.zeros((rows, PACKED), np.int32) for _ in Packed._fields))
    types = (np.int32, np.bool_, np.int32, np.int32)
    return packed, Pieces(*(np.zeros(rows * PACKED // PIECE, dtype) for dtype in types))


class Copies(NamedTuple):
    """What `copy` copies within each shard, [shards · copies], NumPy arrays on the host."""

    slot: Any
    """int32."""
    used: Any
    """bool; the other rows are padding."""
    source: Any
    """int32, the slot that is copied."""


def padded_copies(program: TurnsProgram) -> Copies:
    """Make what copies nothing."""
    count = program.copies * program.shards
    return Copies(*(np.zeros(count, dtype) for dtype in (np.int32, np.bool_, np.int32)))


class Decoded(NamedTuple):
    """What `decode` sampled, by step [STEPS, B], and where that left each slot, [B]; NumPy arrays."""

    tokens: np.ndarray
    """int32 [STEPS, B]."""
    logps: np.ndarray
    """float32 [STEPS, B]."""
    drawn: np.ndarray
    """int32, tokens of the turn so far."""
    matched: np.ndarray
    """int32, the state in the table of stop strings."""
    ends: np.ndarray
    """int32: 0, `next_token.ENDED` or `CUT`."""
    likeliest: tuple[np.ndarray, np.ndarray]
    """int32 and float32 [STEPS, alternatives, B]: the likeliest tokens, where turns ask for them, and their
    log-probabilities."""

    @classmethod
    def of(cls, words: np.ndarray) -> Self:
        """Read the result of `decode`."""
        first, ends = words[: 2 * STEPS], words[2 * STEPS : 2 * STEPS + 3]
        ids, logps = words[2 * STEPS + 3 :].reshape(2, STEPS, -1, words.shape[1])
        likeliest = (ids, logps.view(np.float32))
        return cls(first[:STEPS], first[STEPS:].view(np.float32), ends[0], ends[1], ends[2], likeliest)


def _on_shards(program: TurnsProgram, function: Callable[..., Any], inputs: Any, outputs: Any) -> Any:
    return jax.shard_map(function, mesh=program.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def _weights(program: TurnsProgram) -> Any:
    return param_specs(program.definition, program.mesh) if program.shared_layers else WHOLE


@functools.partial(jax.jit, static_argnames="program")
def begin(weights: Any, *, program: TurnsProgram) -> tuple[Any, jax.Array | None]:
    """Make (the cache of all slots, the tokens that each has seen: bool [B, V], None without a repetition penalty)."""
    model = program.definition

    def shard(weights: Any) -> Any:
        one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        read = jax.eval_shape(model.prefill, weights, one, one, one)[1]
        cache = empty_cache(read, time_axes(model), program.slots, program.length)
        seen = jnp.zeros((program.slots, model.vocab_size), jnp.bool_) if program.penalised else None
        return cache, seen

    made: tuple[Any, jax.Array | None] = _on_shards(program, shard, (_weights(program),), (CACHE, ROWS))(
        weights
    )
    return made


@functools.partial(jax.jit, static_argnames=("program", "length"))
def resize(cache: Any, *, program: TurnsProgram, length: int) -> Any:
    """Give the caches of all slots `length` entries: the first ones of those that they have, and empty ones."""

    def one(x: jax.Array, axis: int) -> jax.Array:
        if axis == STATE:
            return x
        kept = lax.slice_in_dim(x, 0, min(length, x.shape[axis]), axis=axis)
        return jnp.pad(kept, [(0, (length - kept.shape[i]) * (i == axis)) for i in range(x.ndim)])

    axes = time_axes(program.definition)
    return _on_shards(program, lambda cache: jax.tree.map(one, cache, axes), (CACHE,), CACHE)(cache)


@functools.partial(jax.jit, static_argnames="program")
def prefill(weights: Any, packed: Packed, *, program: TurnsProgram) -> Any:
    """Compute the cache of contexts in rows, for `place`."""

    def shard(weights: Any, packed: Packed) -> Any:
        return program.definition.prefill(weights, *packed)[1]

    return _on_shards(program, shard, (_weights(program), ROWS), CACHE)(weights, packed)


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
            slot, used, row, start = (x[i] for x in pieces)

            def write(x: jax.Array, new: jax.Array, axis: int) -> jax.Array:
                new = lax.dynamic_slice_in_dim(lax.dynamic_slice_in_dim(new, row, 1), start, PACKED, axis)
                at = (slot, *[0] * (x.ndim - 1))
                kept = lax.dynamic_slice(x, at, new.shape)
                return lax.dynamic_update_slice(x, jnp.where(used, new, kept), at)

            return jax.tree.map(write, cache, longer, axes)

        return lax.fori_loop(0, len(pieces.slot), one, cache)

    return _on_shards(program, shard, (CACHE, CACHE, ROWS), CACHE)(cache, read, pieces)


@functools.partial(jax.jit, static_argnames="program", donate_argnames="cache")
def extend(weights: Any, cache: Any, fed: Fed, *, program: TurnsProgram) -> Any:
    """Write the keys and values of tokens into the caches of their slots."""

    def shard(weights: Any, cache: Any, fed: Fed) -> Any:
        return _extended(weights, cache, fed, program)[1]

    return _on_shards(program, shard, (_weights(program), CACHE, ROWS), CACHE)(weights, cache, fed)


def _extended(weights: Any, cache: Any, fed: Fed, program: TurnsProgram) -> tuple[jax.Array, Any]:
    """Write tokens into a shard's cache: (the hidden states after them, [rows, chunk, hidden], the cache)."""
    rows = take(cache, fed.slot[None])
    count = (fed.count,) if program.has_states else ()
    hidden, rows = program.definition.extend(weights, rows, fed.tokens, fed.start, *count)

    def one(i: jax.Array, cache: Any) -> Any:
        row = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i, 1), (fed.slot, rows, fed.used))
        return put(cache, *row)

    return hidden, lax.fori_loop(0, len(fed.slot), one, cache)


@functools.partial(jax.jit, static_argnames="program", donate_argnames="cache")
def read(
    weights: Any, cache: Any, fed: Fed, targets: Any, *, program: TurnsProgram
) -> tuple[Any, tuple[jax.Array, ...]]:
    """Do what `extend` does, and return what `TokenSampler.judge` says of the tokens that follow, `targets`, int32
    [shards · rows, chunk]: (cache, [shards · rows, chunk, …] each).
    """

    def shard(weights: Any, cache: Any, fed: Fed, targets: jax.Array) -> Any:
        hidden, cache = _extended(weights, cache, fed, program)
        peers = Peers(program.mesh.shape["tensor"])
        sampler = TokenSampler.of(program.definition, weights, peers, program.options, program.key_type)

        def judge(each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            return sampler.judge(*each, program.alternatives or 0)

        judged = lax.map(judge, (hidden.swapaxes(0, 1), targets.T))
        return cache, jax.tree.map(lambda x: x.swapaxes(0, 1), judged)

    inputs = (_weights(program), CACHE, ROWS, ROWS)
    result: tuple[Any, tuple[jax.Array, ...]] = _on_shards(program, shard, inputs, (CACHE, ROWS))(
        weights, cache, fed, targets
    )
    return result


@functools.partial(jax.jit, static_argnames="program", donate_argnames="cache")
def copy(cache: Any, copies: Copies, *, program: TurnsProgram) -> Any:
    """Copy the caches of slots to others."""

    def shard(cache: Any, copies: Copies) -> Any:
        def one(i: jax.Array, cache: Any) -> Any:
            slot, used, source = (lax.dynamic_slice_in_dim(x, i, 1) for x in copies)
            return put(cache, slot, take(cache, source[None]), used)

        return lax.fori_loop(0, len(copies.slot), one, cache)

    return _on_shards(program, shard, (CACHE, ROWS), CACHE)(cache, copies)


@functools.partial(jax.jit, static_argnames="program", donate_argnames="seen")
def note(seen: jax.Array, fed: Fed, *, program: TurnsProgram) -> jax.Array:
    """Set the tokens that slots have seen, bool [B, V], to those that they are fed."""

    def shard(seen: jax.Array, fed: Fed) -> jax.Array:
        none = jnp.zeros((len(fed.slot), seen.shape[1]), jnp.bool_)
        rows = mark(none, fed.tokens, jnp.arange(fed.tokens.shape[1]) < fed.count[:, None])

        def one(i: jax.Array, seen: jax.Array) -> Any:
            slot, row, used = (lax.dynamic_slice_in_dim(x, i, 1) for x in (fed.slot, rows, fed.used))
            return put(seen, slot, row, used)

        return lax.fori_loop(0, len(rows), one, seen)

    noted: jax.Array = _on_shards(program, shard, (ROWS, ROWS), ROWS)(seen, fed)
    return noted


class _Carry(NamedTuple):
    step: jax.Array
    slots: Slots
    ends: jax.Array
    cache: Any
    seen: jax.Array | None
    tokens: jax.Array
    logps: jax.Array
    likeliest: tuple[jax.Array, jax.Array] | None


@functools.partial(jax.jit, static_argnames="program", donate_argnames=("cache", "seen"))
def decode(
    weights: Any,
    cache: Any,
    seen: jax.Array | None,
    slots: Slots,
    key_data: jax.Array,
    stop_table: jax.Array | None,
    steps: jax.Array,
    *,
    program: TurnsProgram,
) -> tuple[Any, jax.Array | None, jax.Array]:
    """Decode the turns of active slots until one in SHARE of a shard's has ended, or `steps`, int32, tokens of each are
    sampled, at most STEPS: (cache, seen, words, int32 [2 · STEPS · (1 + alternatives) + 3, B], replicated, for
    `Decoded.of`).
    """
    function = functools.partial(_decode, program=program)
    inputs = (_weights(program), CACHE, ROWS, ROWS, WHOLE, WHOLE, WHOLE)
    outputs = (CACHE, ROWS, PartitionSpec(None, ROW_AXES))
    cache, seen, words = _on_shards(program, function, inputs, outputs)(
        weights, cache, seen, slots, key_data, stop_table, steps
    )
    # Replicated: every process of a multi-process run reads all of it.
    return cache, seen, lax.with_sharding_constraint(words, replicated_sharding(program.mesh))


def _decode(
    weights: Any,
    cache: Any,
    seen: jax.Array | None,
    slots: Any,
    key_data: jax.Array,
    stop_table: jax.Array | None,
    steps: jax.Array,
    *,
    program: TurnsProgram,
) -> Any:
    model, rows = program.definition, program.slots
    peers = Peers(program.mesh.shape["tensor"])
    sampler = TokenSampler.of(model, weights, peers, program.options, program.key_type)
    own, slots = slots.settings, slots._replace(settings=None)
    stops = Stops.of(program.stop_ids, stop_table) if own is None else Stops(own.stop_ids, None)
    keys = _turn_keys(key_data, slots, program.key_type) if own is None else own.keys
    place = jnp.arange(program.length)
    running = slots.active.sum()
    enough = jnp.clip(running // SHARE, 1, running)

    def continues(carry: _Carry) -> jax.Array:
        return (carry.step < steps) & (running - carry.slots.active.sum() < enough)

    def step(carry: _Carry) -> _Carry:
        slots: Any = carry.slots
        # Slots that pause write their last token to its own entry, again and again, and keep their states.
        visible = (place <= slots.position[:, None]) & slots.active[:, None]
        hidden, cache = model.decode(
            weights, carry.cache, slots.last, slots.position, visible, slots.position
        )
        cache = jax.tree.map(
            lambda axis, new, old: over_rows(slots.active, new, old) if axis == STATE else new,
            time_axes(model),
            cache,
            carry.cache,
        )
        seen = None if carry.seen is None else mark(carry.seen, slots.last[:, None], True)
        if own is None:
            token, logp = sampler.sample(hidden, keys, slots.drawn, seen)
            likeliest = None
        else:
            token, logp, *more = sampler.sample_own(
                hidden, own, slots.drawn, slots.active, program.alternatives or 0
            )
            likeliest = jax.tree.map(
                lambda all_, new: lax.dynamic_update_slice(all_, new.T[None], (carry.step, 0, 0)),
                carry.likeliest,
                tuple(more),
            )
        stopped, matched = stops.after(token, slots.matched)
        cut = slots.drawn == slots.limit - 1
        goes, active = ~(stopped | cut), slots.active
        sampled = slots._replace(
            active=goes, last=token, position=slots.position + 1, drawn=slots.drawn + 1, matched=matched
        )
        return _Carry(
            carry.step + 1,
            jax.tree.map(lambda new, old: jnp.where(active, new, old), sampled, slots),
            jnp.where(active & ~goes, jnp.where(stopped, ENDED, CUT), carry.ends),
            cache,
            seen,
            lax.dynamic_update_slice(carry.tokens, token[None], (carry.step, 0)),
            lax.dynamic_update_slice(carry.logps, logp[None], (carry.step, 0)),
            likeliest,
        )

    none = jnp.zeros((STEPS, rows), jnp.int32)
    ids = jnp.zeros((STEPS, program.alternatives or 0, rows), jnp.int32)
    likeliest = None if own is None else (ids, ids.astype(jnp.float32))
    start = _Carry(
        jnp.int32(0),
        slots,
        jnp.zeros(rows, jnp.int32),
        cache,
        seen,
        none,
        none.astype(jnp.float32),
        likeliest,
    )
    end: Any = lax.while_loop(continues, step, start)
    logps = lax.bitcast_convert_type(end.logps, jnp.int32)
    # One array is one exchange, which cannot begin before the loop ends: devices wait for each other in one place.
    words = jnp.concatenate([end.tokens, logps, jnp.stack([end.slots.drawn, end.slots.matched, end.ends])])
    if end.likeliest is not None:
        likeliest = (end.likeliest[0], lax.bitcast_convert_type(end.likeliest[1], jnp.int32))
        words = jnp.concatenate([words, *(each.reshape(-1, rows) for each in likeliest)])
    return end.cache, end.seen, words


def over_rows(rows: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Take rows of `new`, [B, …], where `rows`, bool [B], and of `old` elsewhere."""
    return jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 1)), new, old)


def _turn_keys(key_data: jax.Array, slots: Slots, key_type: str) -> jax.Array:
    """Compute the key of each slot's turn, uint32 [B, words].

    The number of the turn is folded into the rollout's key from the second turn on, then the conversation's id.
    """
    key = jax.random.wrap_key_data(key_data, impl=key_type)

    def one(turn: jax.Array, id_: jax.Array) -> jax.Array:
        later = jax.random.key_data(jax.random.fold_in(key, turn_number(turn)))
        of_turn = jax.random.wrap_key_data(jnp.where(turn == 0, key_data, later), impl=key_type)
        return jax.random.key_data(jax.random.fold_in(of_turn, id_))

    return jax.vmap(one)(slots.turn, slots.ids)


def turn_number(turn: Any) -> Any:
    """Return what is folded into the key of a rollout for turn number `turn` ≥ 1; ids of conversations are smaller."""
    return turn + np.uint32(2**31)


class Devices:
    """The state of the slots on the devices, and the programs over it. Lists of slots have numbers of all shards."""

    def __init__(
        self,
        program: TurnsProgram,
        weights: Weights,
        key: jax.Array,
        stop_table: jax.Array | None,
        compiling: BackgroundCompiler,
    ) -> None:
        self.program = program
        self._weights = weights
        self._key_data = np.asarray(jax.random.key_data(key))
        self._stop_table = stop_table
        self._compiling = compiling
        self._now = dataclasses.replace(program, length=program.lengths[0])
        """The program for caches as long as they are."""
        self._unused, self._most = 0, 0
        self._wait("begin")
        self._cache, self._seen = begin(weights.value, program=self._now)

    def _wait(self, name: Hashable) -> None:
        self._compiling.wait((name, self._now.length))

    def _resize(self, length: int) -> None:
        self._wait(("resize", length))
        self._cache = resize(self._cache, program=self._now, length=length)
        self._now = dataclasses.replace(self.program, length=length)
        self._unused = self._most = 0

    def grow(self, entries: int) -> None:
        """Make the caches long enough for so many entries."""
        if entries > self._now.length:
            self._resize(next(length for length in self.program.lengths if length >= entries))

    def cut(self, entries: int) -> bool:
        """Make the caches shorter if no more than `entries` were needed for a while; return whether they were cut."""
        self._unused, self._most = self._unused + 1, max(self._most, entries)
        enough = next(length for length in self.program.lengths if length >= self._most)
        if enough == self._now.length:
            self._unused = self._most = 0
        if self._unused < PATIENCE:
            return False
        self._resize(enough)
        return True

    def prefill(self, contexts: Sequence[tuple[int, np.ndarray]], own: Weights | None = None) -> None:
        """Feed slots from their start: (slot, tokens int32 [n], which fit a row of `PACKED`) each.

        own: as for `feed`.
        """
        weights = (own or self._weights).value
        left: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(self.program.shards)]
        for slot, tokens in sorted(contexts, key=lambda each: len(each[1]), reverse=True):
            left[slot // self.program.slots].append((slot % self.program.slots, tokens))
        while any(left):
            packed, pieces = padded_packed(self.program)
            rows = self.program.packed_rows
            left = [
                _pack(packed, pieces, range(shard * rows, (shard + 1) * rows), mine)
                for shard, mine in enumerate(left)
            ]
            self._compiling.wait(("prefill", self.program.length))
            put_packed, put_pieces = put_rows(self.program.mesh, (packed, pieces))
            read = prefill(weights, put_packed, program=self.program)
            self._wait("place")
            self._cache = place(self._cache, read, put_pieces, program=self._now)

    def feed(self, pieces: Sequence[tuple[int, int, int, np.ndarray]], own: Weights | None = None) -> None:
        """Feed slots: (slot, chunk, start, tokens int32 [n ≤ chunk]) each, different slots.

        own: weights to use in place of the usual ones.
        """
        weights = (own or self._weights).value
        for chunk in sorted({piece[1] for piece in pieces}):
            self._wait(("extend", chunk))
            same = [(slot, start, tokens) for slot, size, start, tokens in pieces if size == chunk]
            for batch in self._batches(same, self.program.rows(chunk)):
                fed = put_rows(self.program.mesh, self._fed(batch, self.program.rows(chunk), chunk))
                self._cache = extend(weights, self._cache, fed, program=self._now)

    def read(
        self, pieces: Sequence[tuple[int, int, int, np.ndarray, np.ndarray]], own: Weights
    ) -> list[tuple[np.ndarray, ...]]:
        """Feed slots, and judge the tokens that follow those of a piece, its last item: what `TokenSampler.judge`
        returns, of each piece.
        """
        judged: dict[int, tuple[np.ndarray, ...]] = {}
        for chunk in sorted({piece[1] for piece in pieces}):
            self._wait(("read", chunk))
            rows = self.program.rows(chunk)
            same = [(slot, start, tokens) for slot, size, start, tokens, _ in pieces if size == chunk]
            follow = {slot: targets for slot, size, _, _, targets in pieces if size == chunk}
            for batch in self._batches(same, rows):
                targets = np.zeros((rows * self.program.shards, chunk), np.int32)
                for row, (slot, _, tokens) in batch:
                    targets[row, : len(tokens)] = follow[slot]
                fed = put_rows(self.program.mesh, (self._fed(batch, rows, chunk), targets))
                self._cache, result = read(own.value, self._cache, *fed, program=self._now)
                found = jax.device_get(result)
                for row, (slot, _, tokens) in batch:
                    judged[slot] = tuple(each[row, : len(tokens)] for each in found)
        return [judged[piece[0]] for piece in pieces]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy caches: (slot, slot that it is copied from) each, of the same shard."""
        self._wait("copy")
        for batch in self._batches(pairs, self.program.copies):
            copies = padded_copies(self.program)
            for row, pair in batch:
                copies.slot[row], copies.source[row] = (slot % self.program.slots for slot in pair)
                copies.used[row] = True
            rows = put_rows(self.program.mesh, copies)
            self._cache = copy(self._cache, rows, program=self._now)

    def note(self, contexts: Sequence[tuple[int, np.ndarray]]) -> None:
        """Set what slots have seen, where a repetition penalty needs it: (slot, its whole context) each."""
        if self._seen is None:
            return
        self._wait("note")
        size = self.program.copies
        for batch in self._batches([(slot, 0, context) for slot, context in contexts], size):
            fed = put_rows(self.program.mesh, self._fed(batch, size, self.program.length))
            self._seen = note(self._seen, fed, program=self.program)

    def decode(self, slots: Slots, steps: int, own: Weights | None = None) -> Decoded:
        """Decode the active slots by at most so many tokens. own: as for `feed`."""
        self._wait("decode")
        rows = put_rows(self.program.mesh, slots)
        self._cache, self._seen, words = decode(
            (own or self._weights).value,
            self._cache,
            self._seen,
            rows,
            self._key_data,
            self._stop_table,
            np.int32(steps),
            program=self._now,
        )
        return Decoded.of(jax.device_get(words))

    def _batches(self, items: Iterable[Any], rows: int) -> Iterator[list[tuple[int, Any]]]:
        """Yield (row, item) of the items of each call, `rows` of each shard; an item begins with its slot."""
        shards: list[deque[Any]] = [deque() for _ in range(self.program.shards)]
        for item in items:
            shards[item[0] // self.program.slots].append(item)
        while any(shards):
            yield [
                (number * rows + i, shard.popleft())
                for number, shard in enumerate(shards)
                for i in range(min(rows, len(shard)))
            ]

    def _fed(self, batch: list[tuple[int, Any]], rows: int, chunk: int) -> Fed:
        fed = padded_fed(self.program, rows, chunk)
        for row, (slot, start, tokens) in batch:
            fed.slot[row], fed.used[row], fed.start[row] = slot % self.program.slots, True, start
            fed.tokens[row, : len(tokens)], fed.count[row] = tokens, len(tokens)
        return fed


def _pack(
    packed: Packed, pieces: Pieces, rows: range, contexts: Sequence[tuple[int, np.ndarray]]
) -> list[tuple[int, np.ndarray]]:
    """Put contexts, (slot, tokens) each, into the rows of a shard, each at the first place where it fits; return those
    that fit nowhere.
    """
    spans, number = PACKED // SPAN, rows.start * (PACKED // PIECE)
    used = [0] * (len(rows) * spans)
    left = []
    for slot, tokens in contexts:
        count = len(tokens)
        if count > SPAN:
            fits = [i for i in range(0, len(used), spans) if not any(used[i : i + spans])]
        else:
            fits = [i for i, taken in enumerate(used) if taken + count <= SPAN]
        if not fits:
            left.append((slot, tokens))
            continue
        first = fits[0]
        row, start = divmod(first * SPAN + used[first], PACKED)
        row += rows.start
        for i in range(first, first + -(-count // SPAN)):
            used[i] += -(-min(count, SPAN) // PIECE) * PIECE
            count -= SPAN
        where = slice(start, start + len(tokens))
        packed.tokens[row, where], packed.positions[row, where] = tokens, np.arange(len(tokens))
        packed.visible_until[row, where] = start + len(tokens)
        pieces.slot[number], pieces.used[number] = slot, True
        pieces.row[number], pieces.start[number] = row - rows.start, start
        number += 1
    return left
