"""The sampler's compiled program: prefill, then decode one token per step in every slot until no sequence is left."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_core.mesh import ROW_AXES, replicated_sharding, row_multiple, row_sharding
from rlhf_core.models import Definition
from rlhf_core.models.experts import recording, route_shape
from rlhf_core.runtime.caches import cached
from rlhf_core.sampling.next_token import CUT, ENDED, Stops, TokenSampler, mark
from rlhf_core.sampling.placement import Peers, param_specs

if TYPE_CHECKING:
    from rlhf_core.sampling import SamplingOptions


class Queue(NamedTuple):
    """The sequences that each shard has begun; its sequence q is completion q mod G of its prompt q // G."""

    wanted: jax.Array
    """int32 [shards], the number of sequences."""
    begun: jax.Array
    """int32 [shards], the number that have or had a slot."""
    step: jax.Array
    """int32 [shards, sequences], the step at which each sequence got its slot."""
    slot: jax.Array
    """int32 [shards, sequences], that slot."""

    def waits(self) -> jax.Array:
        """bool [shards]: whether a sequence waits for a slot."""
        return self.begun < self.wanted


class Written(NamedTuple):
    """Everything sampled, by step [T] and by slot of all shards [B]."""

    tokens: jax.Array
    """int32 [T, B]."""
    logps: jax.Array
    """float32 [T, B]."""
    ends: jax.Array
    """int8 [T, B]: 0, `next_token.ENDED` or `CUT`."""
    routes: jax.Array | None = None
    """int8 or int16 [T, B, layers, k]: the experts of the token that was read, the one before; None: not wanted."""


def most_steps(sequences: int, slots: int, longest: int) -> int:
    """Bound the steps of `sequences` of at most `longest` tokens: the k-th begins once k - slots have ended."""
    return -(-sequences // slots) * longest


def take(tree: Any, index: jax.Array) -> Any:
    """Take rows `index`, int32 [shards, n], counted within the shard, of arrays [shards · rows, …]: [shards · n, …]."""
    shards = index.shape[0]

    def one(x: jax.Array) -> jax.Array:
        parts = x.reshape(shards, -1, *x.shape[1:])
        return jax.vmap(lambda part, i: part[i])(parts, index).reshape(-1, *x.shape[1:])

    return jax.tree.map(one, tree)


def put(tree: Any, index: jax.Array, new: Any, needed: jax.Array) -> Any:
    """Replace row `index`, int32 [shards], of each shard of arrays [shards · rows, …] by its row of `new`, [shards, …],
    where `needed`, bool [shards].
    """
    shards = index.shape[0]

    def one(x: jax.Array, row: jax.Array) -> jax.Array:
        def shard(part: jax.Array, row: jax.Array, i: jax.Array, needed: jax.Array) -> jax.Array:
            # One copy of the row, in place, unlike a scatter that drops rows.
            value = jnp.where(needed, row, lax.dynamic_index_in_dim(part, i, 0, keepdims=False))
            return lax.dynamic_update_index_in_dim(part, value, i, 0)

        parts = x.reshape(shards, -1, *x.shape[1:])
        return each_shard(shard)(parts, row, index, needed).reshape(x.shape)

    return jax.tree.map(one, tree, new)


def each_shard(function: Callable[..., Any]) -> Callable[..., Any]:
    """Map `function` over the first axis of its arguments; an axis of size 1 avoids the gathers that vmap makes."""

    def over(*arrays: jax.Array) -> Any:
        if arrays[0].shape[0] > 1:
            return jax.vmap(function)(*arrays)
        return jax.tree.map(lambda x: x[None], function(*(x[0] for x in arrays)))

    return over


def spread(mesh: Mesh, tree: Any) -> Any:
    """Shard every array's first axis over the rows of the mesh; leave the others to the compiler."""
    sharding = row_sharding(mesh)

    def one(x: jax.Array) -> jax.Array:
        spec = PartitionSpec(*sharding.spec, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return jax.tree.map(one, tree)


def read_completions(written: Any, step: Any, slot: Any, longest: int) -> tuple[np.ndarray, ...]:
    """Collect (tokens int32 [N, longest], lengths int32 [N], logps float32 [N, longest], finished bool [N]), NumPy, of
    N sequences that began at `step` in `slot`, int32 [N] each; and their routes [N, longest, layers, k], if wanted.
    """
    tokens, logps, ends = (np.asarray(x) for x in written[:3])
    routes = written.routes
    when = np.minimum(np.asarray(step)[:, None] + np.arange(longest), len(tokens) - 1)
    where = np.asarray(slot)[:, None]
    ended = ends[when, where]
    last = (ended > 0).argmax(1)
    inside = np.arange(longest) <= last[:, None]
    read = []
    if routes is not None:  # a token is read in the step after the one that wrote it
        later = np.minimum(when + 1, len(tokens) - 1)
        there = (np.arange(longest) < last[:, None])[..., None, None]
        read = [np.where(there, routes[later, where], routes.dtype.type(-1))]
    return (
        np.where(inside, tokens[when, where], 0),
        (last + 1).astype(np.int32),
        np.where(inside, logps[when, where], np.float32(0)),
        np.take_along_axis(ended, last[:, None], axis=1)[:, 0] == ENDED,
        *read,
    )


@dataclass(frozen=True)
class SamplingProgram:
    """The static arguments of a compiled program. Samplers with equal ones share it."""

    definition: Definition
    options: SamplingOptions
    mesh: Mesh
    stop_ids: tuple[int, ...]
    num_generations: int
    slots: int
    """Sequences that each shard of rows decodes together."""
    last_slots: int
    """The same once no more sequences are left; 0: as before."""
    key_type: str
    shared_layers: bool = False
    """Whether the parameters have the layout of `sampling.placement`. Each shard of rows then runs its own
    loop, whose devices exchange only activations and logits."""
    shares_prompts: bool = False
    """Whether the cache of a prompt is held once for its completions, see `DecodeGroups`. Slots are then as many as the
    sequences of a shard, one for each."""
    prefill_tokens: int = 0
    """Prompts are prefilled in parts of at most so many tokens per shard, padding included; 0: all together."""
    routes: bool = False
    """Whether the experts of every decoded token are returned."""


class _Slots(NamedTuple):
    """The sequence in each slot of all shards [B]. Fields that no option needs are None."""

    keys: jax.Array  # uint32 [B, words], the sequence's key
    drawn: jax.Array  # int32 [B], tokens sampled so far
    position: jax.Array  # int32 [B], of the last token
    last: jax.Array  # int32 [B], the last token: of the prompt, or sampled
    free: jax.Array  # bool [B], the sequence has ended, or there is none
    seen: jax.Array | None  # bool [B, V], tokens of the prompt and the completion
    matched: jax.Array | None  # int32 [B], state in the table of stop strings


class _Carry(NamedTuple):
    """The state of the loop. The KV cache is a ring: step s writes slot s mod length.

    With `shares_prompts` it holds the completions alone, and step s writes entry s.
    """

    step: jax.Array  # int32
    slots: _Slots
    queue: Queue
    written: Written
    cache: Any


@functools.partial(jax.jit, static_argnames="program")
def generate(
    params: Any,
    prompts: jax.Array,
    lengths: jax.Array,
    last: jax.Array,
    ids: jax.Array,
    key_data: jax.Array,
    stop_table: jax.Array | None,
    *,
    program: SamplingProgram,
) -> Any:
    """Sample N = P · G sequences, G for each of P prompts: (`Written`, the step at which each began [N], its slot [N]),
    replicated, from which `read_completions` collects completions.

    params: as they are trained, or with `program.shared_layers` from `sampling.placement`.
    prompts: int32 [P, time], left-padded, without their last tokens; last: int32 [P], those tokens. lengths: int32 [P],
    last token included; 0: skip this prompt and those after it in its shard. ids: uint32 [N].
    stop_table: unsigned [states, V], from `rlhf_core.sampling.stop_strings`; None: no stop strings.
    """
    shards = row_multiple(program.mesh)
    arguments = (params, prompts, lengths, last, ids, key_data, stop_table)
    if program.shared_layers:
        rows = PartitionSpec(ROW_AXES)
        whole = PartitionSpec()
        written, step, slot = jax.shard_map(
            functools.partial(_sample, program=program),
            mesh=program.mesh,
            in_specs=(param_specs(program.definition, program.mesh), rows, rows, rows, rows, whole, whole),
            out_specs=(PartitionSpec(None, ROW_AXES), rows, rows),
            check_vma=False,
        )(*arguments)
    else:
        written, step, slot = _sample(*arguments, program=program)
    # Replicated: every process of a multi-process run reads all of it.
    slot = slot.reshape(shards, -1) + program.slots * jnp.arange(shards, dtype=jnp.int32)[:, None]
    out = (written, step, slot.reshape(-1))
    return lax.with_sharding_constraint(out, replicated_sharding(program.mesh))


def _sample(
    params: Any,
    prompts: jax.Array,
    lengths: jax.Array,
    last: jax.Array,
    ids: jax.Array,
    key_data: jax.Array,
    stop_table: jax.Array | None,
    *,
    program: SamplingProgram,
) -> Any:
    """Do what `generate` does, for one shard that runs its own loop; slots are counted within each shard."""
    shards = 1 if program.shared_layers else row_multiple(program.mesh)
    model, options, groups = program.definition, program.options, program.num_generations
    longest = options.max_completion_length
    sequences = len(ids) // shards
    rows = shards * program.slots
    shape = route_shape(model) if program.routes else None
    cache_length = prompts.shape[1] + longest  # a completion's last token is never fed back, its prompt's is
    place = jnp.arange(cache_length)
    stops = Stops.of(program.stop_ids, stop_table)

    used = jnp.arange(prompts.shape[1]) >= prompts.shape[1] - (lengths[:, None] - 1)
    positions = jnp.maximum(jnp.cumsum(used, axis=1) - 1, 0)
    until = jnp.where(used, prompts.shape[1], 0)
    read = _prefill(model, params, (prompts, positions, until), program.prefill_tokens)
    prepared = params if program.shared_layers else model.prepare(params)
    peers = Peers(program.mesh.shape["tensor"] if program.shared_layers else 1)
    sampler = TokenSampler.of(model, params, peers, options, program.key_type)
    key = jax.random.wrap_key_data(key_data, impl=program.key_type)

    def begin(queue: Queue, index: jax.Array) -> _Slots:
        """Set up sequences `index` of each shard, int32 [shards, n], to decode their prompts' last tokens."""
        prompt = index // groups
        own_ids, length, token = take(ids, index), take(lengths, prompt), take(last, prompt)
        seen = None
        if options.repetition_penalty != 1:
            none = jnp.zeros((len(token), model.vocab_size), jnp.bool_)
            seen = mark(mark(none, *take((prompts, used), prompt)), token[:, None], True)
        waiting = (index < queue.wanted[:, None]).reshape(-1)
        return _Slots(
            jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i)))(own_ids),
            jnp.zeros_like(token),
            length - 1,
            token,
            ~waiting,
            seen,
            None if stop_table is None else jnp.zeros_like(token),
        )

    def rings(index: jax.Array, slot: jax.Array | int) -> Any:
        """Copy the caches of the prompts of sequences `index` of each shard; their next token is written to `slot`."""
        return model.ring(take(read, index // groups), cache_length, slot)

    def fill(carry: _Carry) -> _Carry:
        """Give one free slot of each shard the next sequence of its queue."""
        queue = carry.queue
        free = carry.slots.free.reshape(shards, -1)
        needed = free.any(1) & queue.waits()
        slot = jnp.argmax(free, axis=1).astype(jnp.int32)
        index = jnp.minimum(queue.begun, sequences - 1)
        new = begin(queue, index[:, None]), rings(index[:, None], carry.step % cache_length)
        slots, cache = put((carry.slots, carry.cache), slot, new, needed)
        note = each_shard(lambda x, i, value, use: x.at[i].set(jnp.where(use, value, x[i])))
        when = jnp.broadcast_to(carry.step, (shards,))
        queue = Queue(
            queue.wanted,
            queue.begun + needed,
            note(queue.step, index, when, needed),
            note(queue.slot, index, slot, needed),
        )
        return _Carry(carry.step, slots, queue, carry.written, cache)

    def fillable(carry: _Carry) -> jax.Array:
        return (carry.slots.free.reshape(shards, -1).any(1) & carry.queue.waits()).any()

    def decode_rings(cache: Any, slots: _Slots, count: jax.Array) -> tuple[jax.Array, Any]:
        slot = count % cache_length
        age = slot - place + jnp.where(place > slot, cache_length, 0)  # steps since the slot was written
        visible = age <= slots.position[:, None]
        return model.decode(prepared, cache, slots.last, slots.position, visible, slot)

    def decode_groups(cache: Any, slots: _Slots, count: jax.Array) -> tuple[jax.Array, Any]:
        return model.decode_groups(prepared, read, used, cache, slots.last, slots.position, count)

    def step(carry: _Carry, decode: Any = decode_rings, columns: jax.Array | None = None) -> _Carry:
        """Decode a token per slot. columns: int32 [shards, slots], the slot of each column of `written`; None: same."""
        slots = carry.slots
        with recording([model] if program.routes else []) as recorder:
            hidden, cache = decode(carry.cache, slots, carry.step)
        routes = jnp.stack(recorder.chosen, 1).astype(shape.dtype) if shape else None
        token, logp = sampler.sample(hidden, slots.keys, slots.drawn, slots.seen)
        stopped, matched = stops.after(token, slots.matched)
        cut = slots.drawn == longest - 1
        ends = jnp.where(slots.free, 0, jnp.where(stopped, ENDED, jnp.where(cut, CUT, 0)))
        new = Written(token, logp, ends.astype(jnp.int8), routes)
        rows = jax.tree.map(lambda x: x[None], new if columns is None else take(new, columns))
        written = jax.tree.map(
            lambda whole, row: lax.dynamic_update_slice_in_dim(whole, row, carry.step, 0),
            carry.written,
            rows,
        )
        slots = _Slots(
            slots.keys,
            slots.drawn + 1,
            slots.position + 1,
            token,
            slots.free | stopped | cut,
            None if slots.seen is None else mark(slots.seen, token[:, None], True),
            matched,
        )
        return _Carry(carry.step + 1, slots, carry.queue, written, cache)

    def many(carry: _Carry) -> jax.Array:
        """Whether more sequences are left than fit the last slots."""
        left = (~carry.slots.free).reshape(shards, -1).sum(1)
        return carry.queue.waits().any() | (left > program.last_slots).any()

    def unfinished(carry: _Carry) -> jax.Array:
        return ~carry.slots.free.all()

    def step_full(carry: _Carry) -> _Carry:
        if program.shares_prompts:
            return step(carry, decode_groups)
        if sequences > program.slots:
            carry = lax.while_loop(fillable, fill, carry)
        return step(carry)

    wanted = (lengths > 0).reshape(shards, -1).sum(1, dtype=jnp.int32) * groups
    first = jnp.broadcast_to(jnp.arange(program.slots, dtype=jnp.int32), (shards, program.slots))
    # There may be fewer sequences.
    slot = jnp.minimum(jnp.arange(sequences, dtype=jnp.int32), program.slots - 1)
    queue = Queue(
        wanted,
        jnp.minimum(wanted, program.slots),
        jnp.zeros((shards, sequences), jnp.int32),
        jnp.broadcast_to(slot, (shards, sequences)),
    )
    steps = most_steps(sequences, program.slots, longest)
    written = Written(
        jnp.zeros((steps, rows), jnp.int32),
        jnp.zeros((steps, rows), jnp.float32),
        jnp.zeros((steps, rows), jnp.int8),
        jnp.zeros((steps, rows, *shape.shape), shape.dtype) if shape else None,
    )
    slots = begin(queue, first)
    if program.shares_prompts:

        def at_start(x: jax.Array, axis: int, empty: jax.Array) -> jax.Array:
            return take(x, first // groups) if axis == STATE else empty

        axes = time_axes(model)
        cache = jax.tree.map(at_start, read, axes, empty_cache(read, axes, rows, longest))
    else:
        cache = rings(first, 0)
    if not program.shared_layers:
        slots, cache = spread(program.mesh, (slots, cache))
    end = lax.while_loop(many, step_full, _Carry(jnp.int32(0), slots, queue, written, cache))
    if program.last_slots:
        order = jnp.argsort(end.slots.free.reshape(shards, -1), axis=1)  # stable: unfinished ones come first
        # Those that ended are never read again.
        columns = jnp.minimum(jnp.argsort(order, axis=1), program.last_slots - 1)
        chosen = order[:, : program.last_slots]
        slots = take(end.slots, chosen)
        cache = (
            _rings(end.cache, read, axes, chosen, groups)
            if program.shares_prompts
            else take(end.cache, chosen)
        )
        step_last = functools.partial(step, columns=columns)
        end = lax.while_loop(unfinished, step_last, end._replace(slots=slots, cache=cache))
    return end.written, end.queue.step.reshape(-1), end.queue.slot.reshape(-1)


def _prefill(model: Definition, params: Any, prompts: tuple[jax.Array, ...], tokens: int) -> Any:
    """Compute the cache of prompts, three arrays [P, time] as `Definition.prefill` takes them, in equal parts of at
    most `tokens` tokens if they have that many prompts; 0: all together.
    """
    rows, time = prompts[0].shape
    parts = -(-rows // max(tokens // time, 1)) if tokens else 1
    if parts == 1:
        return model.prefill(params, *prompts)[1]
    size = -(-rows // parts)

    def part(i: jax.Array, cache: Any) -> Any:
        start = jnp.minimum(
            i * size, rows - size
        )  # the last part computes some prompts again, to be as large
        chosen = (lax.dynamic_slice_in_dim(x, start, size) for x in prompts)
        read = model.prefill(params, *chosen)[1]
        return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, start, 0), cache, read)

    shapes = jax.eval_shape(model.prefill, params, *prompts)[1]
    return lax.fori_loop(0, parts, part, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))


STATE = -1
"""In place of the axis of time: the array is a state, see `Definition`."""


@cached
def time_axes(model: Definition) -> Any:
    """Find the axis of time of each array of a model's caches: the one that longer rings have more of, or STATE."""

    def rings(params: Any, tokens: Any) -> Any:
        read = model.prefill(params, tokens, tokens, tokens)[1]
        return model.ring(read, 1, 0), model.ring(read, 2, 0)

    def one(short: Any, long: Any) -> int:
        sizes = zip(short.shape, long.shape, strict=True)
        return next((i for i, (n, m) in enumerate(sizes) if n != m), STATE)

    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.tree.map(one, *jax.eval_shape(rings, model.abstract_params(), tokens))


def empty_cache(read: Any, axes: Any, rows: int, length: int) -> Any:
    """Make the cache of `rows` rows with `length` entries. read: the cache of prompts; axes: from `time_axes`."""

    def one(x: jax.Array, axis: int) -> jax.Array:
        if axis == STATE:
            return jnp.zeros((rows, *x.shape[1:]), x.dtype)
        return jnp.zeros((rows, *x.shape[1:axis], length, *x.shape[axis + 1 :]), x.dtype)

    return jax.tree.map(one, read, axes)


def _rings(cache: Any, read: Any, axes: Any, index: jax.Array, groups: int) -> Any:
    """Make rings of the caches of sequences `index` of each shard and of their prompts.

    Step s of these rings wrote slot s, and the prompts are at their ends.
    """

    def one(own: jax.Array, prompts: jax.Array, axis: int) -> jax.Array:
        nonlocal index
        if axis == STATE:
            return take(own, index)  # it has the prompt's tokens, too
        ring = jnp.concatenate([take(own, index), take(prompts, index // groups)], axis)
        # One array after the other, so that each can have the memory of one that is not needed any more.
        index, ring = lax.optimization_barrier((index, ring))
        return ring

    return jax.tree.map(one, cache, read, axes)
