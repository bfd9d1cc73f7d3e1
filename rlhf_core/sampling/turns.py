"""The compiled programs of conversations: feed tokens into the caches of slots, copy caches, and decode turns.

A conversation's cache has an entry for every position, so that one slot can pause while others decode, and can
be fed what its environment said. All programs run within `jax.shard_map`: each shard of rows has its own slots,
numbered from 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from rlhf_core.mesh import AXES, ROW_AXES, replicated_sharding, row_multiple
from rlhf_core.models import Definition
from rlhf_core.models.attention_cached import cut
from rlhf_core.sampling.loop import STATE, empty_cache, put, take, time_axes
from rlhf_core.sampling.next_token import CUT, ENDED, RowSettings, Stops, TokenSampler, mark
from rlhf_core.sampling.placement import Peers, param_specs

if TYPE_CHECKING:
    from rlhf_core.sampling import SamplingOptions

CHUNKS = (16, 64, 256)
"""Tokens that are fed to a slot together, padding included."""
FED_AT_ONCE = 1024
"""Tokens that a shard is fed together, at most, padding included."""
JUDGED = CHUNKS[0]
"""Tokens of each row whose logits are computed together where contexts are judged."""
SHARE = 8
"""Decoding stops for the host once one in so many of the turns that ran has ended; as large a share is fed together."""
STEPS = 64
"""The most tokens per turn that are decoded before the host sees them."""

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
    def parts(self) -> tuple[int, ...]:
        """List the sizes of the parts of a cache, see `Definition.cache_parts`."""
        return self.definition.cache_parts(self.length)

    @property
    def short(self) -> TurnsProgram | None:
        """Return the program that decodes in the first part of caches alone, if there is one."""
        if self.alternatives is None or len(self.parts) == 1:
            return None
        return replace(self, length=self.parts[0])

    @property
    def packs(self) -> bool:
        """Return whether contexts that fit a row of `packed.PACKED` are prefilled there."""
        return self.alternatives is not None and not self.has_states

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
    settings: RowSettings | None = None
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
    settings = RowSettings(
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
        first = words[: 2 * STEPS]
        ends = words[2 * STEPS : 2 * STEPS + 3]
        ids, logps = words[2 * STEPS + 3 :].reshape(2, STEPS, -1, words.shape[1])
        likeliest = (ids, logps.view(np.float32))
        return cls(first[:STEPS], first[STEPS:].view(np.float32), ends[0], ends[1], ends[2], likeliest)


def on_shards(program: TurnsProgram, function: Callable[..., Any], inputs: Any, outputs: Any) -> Any:
    return jax.shard_map(function, mesh=program.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def weights_spec(program: TurnsProgram) -> Any:
    return param_specs(program.definition, program.mesh) if program.shared_layers else WHOLE


@functools.partial(jax.jit, static_argnames="program")
def begin(weights: Any, *, program: TurnsProgram) -> tuple[Any, jax.Array | None]:
    """Make (the cache of all slots, the tokens that each has seen: bool [B, V], None without a repetition penalty)."""
    model = program.definition

    def shard(weights: Any) -> Any:
        one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        read = jax.eval_shape(model.prefill, weights, one, one, one)[1]
        cache = _in_parts(empty_cache(read, time_axes(model), program.slots, program.length), program)
        seen = jnp.zeros((program.slots, model.vocab_size), jnp.bool_) if program.penalised else None
        return cache, seen

    made: tuple[Any, jax.Array | None] = on_shards(program, shard, (weights_spec(program),), (CACHE, ROWS))(
        weights
    )
    return made


@functools.partial(jax.jit, static_argnames="program", donate_argnames="cache")
def extend(weights: Any, cache: Any, fed: Fed, *, program: TurnsProgram) -> Any:
    """Write the keys and values of tokens into the caches of their slots."""

    def shard(weights: Any, cache: Any, fed: Fed) -> Any:
        return _extended(weights, cache, fed, program)[1]

    return on_shards(program, shard, (weights_spec(program), CACHE, ROWS), CACHE)(weights, cache, fed)


def _in_parts(cache: Any, program: TurnsProgram) -> Any:
    """Cut a cache along time."""
    if len(program.parts) == 1:
        return cache
    axes = time_axes(program.definition)
    return jax.tree.map(lambda axis, x: x if axis == STATE else cut(x, program.parts, axis), axes, cache)


def first_part(cache: Any, program: TurnsProgram) -> Any:
    """Take the first part of a cache, for `TurnsProgram.short`."""
    axes = time_axes(program.definition)
    return jax.tree.map(lambda _, x: x[:1] if isinstance(x, tuple) else x, axes, cache)


def with_first_part(cache: Any, first: Any, program: TurnsProgram) -> Any:
    """Put what `first_part` took back."""
    axes = time_axes(program.definition)
    return jax.tree.map(lambda _, x, new: (*new, *x[1:]) if isinstance(x, tuple) else new, axes, cache, first)


def _joined(cache: Any, program: TurnsProgram) -> Any:
    """Undo `_in_parts`."""
    if len(program.parts) == 1:
        return cache
    axes = time_axes(program.definition)
    return jax.tree.map(lambda axis, x: x if axis == STATE else jnp.concatenate(x, axis), axes, cache)


def _extended(weights: Any, cache: Any, fed: Fed, program: TurnsProgram) -> tuple[jax.Array, Any]:
    """Write tokens into a shard's cache: (the hidden states after them, [rows, chunk, hidden], the cache)."""
    rows = _joined(take(cache, fed.slot[None]), program)
    count = (fed.count,) if program.has_states else ()
    hidden, rows = program.definition.extend(weights, rows, fed.tokens, fed.start, *count)
    rows = _in_parts(rows, program)

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

        def turned(x: jax.Array) -> jax.Array:
            """Lay out [rows, parts · JUDGED, …] as [parts, rows · JUDGED, …], or the other way round."""
            parts = x.reshape(len(x), -1, JUDGED, *x.shape[2:]).swapaxes(0, 1)
            return parts.reshape(len(parts), -1, *x.shape[2:])

        return cache, jax.tree.map(turned, lax.map(judge, (turned(hidden), turned(targets))))

    inputs = (weights_spec(program), CACHE, ROWS, ROWS)
    result: tuple[Any, tuple[jax.Array, ...]] = on_shards(program, shard, inputs, (CACHE, ROWS))(
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

    return on_shards(program, shard, (CACHE, ROWS), CACHE)(cache, copies)


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

    noted: jax.Array = on_shards(program, shard, (ROWS, ROWS), ROWS)(seen, fed)
    return noted


class _TurnsCarry(NamedTuple):
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
    inputs = (weights_spec(program), CACHE, ROWS, ROWS, WHOLE, WHOLE, WHOLE)
    outputs = (CACHE, ROWS, PartitionSpec(None, ROW_AXES))
    cache, seen, words = on_shards(program, function, inputs, outputs)(
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
    own = slots.settings
    slots = slots._replace(settings=None)
    stops = Stops.of(program.stop_ids, stop_table) if own is None else Stops(own.stop_ids, None)
    keys = _turn_keys(key_data, slots, program.key_type) if own is None else own.keys
    place = jnp.arange(program.length)
    running = slots.active.sum()
    enough = jnp.clip(running // SHARE, 1, running)

    def continues(carry: _TurnsCarry) -> jax.Array:
        return (carry.step < steps) & (running - carry.slots.active.sum() < enough)

    def step(carry: _TurnsCarry) -> _TurnsCarry:
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
        goes = ~(stopped | cut)
        active = slots.active
        sampled = slots._replace(
            active=goes, last=token, position=slots.position + 1, drawn=slots.drawn + 1, matched=matched
        )
        return _TurnsCarry(
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
    start = _TurnsCarry(
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
