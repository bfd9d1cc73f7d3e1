"""The sampling loop as one compiled program: prefill, then a token a step in every slot until no sequence is left."""

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

from rlhf_core.logprobs import unembed
from rlhf_core.mesh import replicated_sharding, row_multiple, row_sharding
from rlhf_core.sampling.filters import draw, min_p_filter, repetition_penalty, top_k_filter, top_p_filter

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.models import Definition
    from rlhf_core.sampling import SamplingOptions


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


@dataclass(frozen=True)
class Plan:
    """What one compiled program is for, beside its shapes. Samplers with equal plans share programs."""

    definition: Definition
    options: SamplingOptions
    mesh: Mesh
    stop_ids: tuple[int, ...]
    num_generations: int
    slots: int
    """Sequences that are decoded at once, in each shard of rows."""
    last_slots: int
    """The same once no more are left; 0: as before."""
    key_type: str


class _Slots(NamedTuple):
    """The sequence in each slot, all shards' together [B]. What no option asks for is None."""

    keys: jax.Array  # uint32 [B, words], the sequence's own
    drawn: jax.Array  # int32 [B], tokens sampled so far
    position: jax.Array  # int32 [B], of the last token
    last: jax.Array  # int32 [B], the last token: of the prompt, or sampled
    free: jax.Array  # bool [B], the sequence has ended, or there is none
    seen: jax.Array | None  # bool [B, V], tokens of the prompt and the completion
    matched: jax.Array | None  # int32 [B], how much of a stop string the completion ends in


class _Carry(NamedTuple):
    """The model's cache is used as a ring: step s writes its place s mod length."""

    step: jax.Array  # int32
    slots: _Slots
    queue: Queue
    written: Written
    cache: Any


@functools.partial(jax.jit, static_argnames="plan")
def generate(
    params: Any,
    prompts: jax.Array,
    lengths: jax.Array,
    last: jax.Array,
    ids: jax.Array,
    key_data: jax.Array,
    stop_table: jax.Array | None,
    *,
    plan: Plan,
) -> Any:
    """(`Written`, the step at which each sequence began [N], its slot [N]), for P prompts and G completions each,
    N = P · G, replicated. `rlhf_core.sampling.loop.read` makes completions of it.

    prompts: int32 [P, time], left-padded, without their last tokens; lengths: int32 [P], with them, 0: the prompt is
    not wanted, nor those after it in its shard; last: int32 [P], the last tokens; ids: uint32 [N].
    stop_table: unsigned [states, V], of `rlhf_core.sampling.stop_strings`; None: no stop strings.
    """
    model, options, groups = plan.definition, plan.options, plan.num_generations
    shards, longest = row_multiple(plan.mesh), options.max_completion_length
    sequences, rows = len(ids) // shards, shards * plan.slots
    cache_length = prompts.shape[1] + longest  # a completion's last token is never fed back, its prompt's is
    place = jnp.arange(cache_length)
    stops = jnp.asarray(plan.stop_ids, jnp.int32)

    used = jnp.arange(prompts.shape[1]) >= prompts.shape[1] - (lengths[:, None] - 1)
    positions = jnp.maximum(jnp.cumsum(used, axis=1) - 1, 0)
    _, read = model.prefill(params, prompts, positions, jnp.where(used, prompts.shape[1], 0))
    prepared = model.prepare(params)
    kernel, softcap = model.unembedding(params)
    key = jax.random.wrap_key_data(key_data, impl=plan.key_type)

    def begin(queue: Queue, index: jax.Array, slot: jax.Array) -> tuple[_Slots, Any]:
        """Sequences `index` of each shard, int32 [shards, n], about to feed their prompts' last tokens."""
        prompt = index // groups
        own_ids, length, token = take(ids, index), take(lengths, prompt), take(last, prompt)
        seen = None
        if options.repetition_penalty != 1:
            none = jnp.zeros((len(token), kernel.shape[1]), jnp.bool_)
            seen = _mark(_mark(none, *take((prompts, used), prompt)), token[:, None], True)
        waiting = (index < queue.wanted[:, None]).reshape(-1)
        slots = _Slots(
            jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i)))(own_ids),
            jnp.zeros_like(token),
            length - 1,
            token,
            ~waiting,
            seen,
            None if stop_table is None else jnp.zeros_like(token),
        )
        return slots, model.ring(take(read, prompt), cache_length, slot)

    def fill(carry: _Carry) -> _Carry:
        """One free slot of each shard gets the next sequence of its queue."""
        queue = carry.queue
        free = carry.slots.free.reshape(shards, -1)
        needed = free.any(1) & queue.waits()
        slot = jnp.argmax(free, axis=1).astype(jnp.int32)
        index = jnp.minimum(queue.begun, sequences - 1)
        new = begin(queue, index[:, None], carry.step % cache_length)
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

    def step(carry: _Carry, columns: jax.Array | None = None) -> _Carry:
        """The next token of every sequence. columns: of `written` by slots, int32 [shards, slots]; None: the slots."""
        slots, slot = carry.slots, carry.step % cache_length
        age = slot - place + jnp.where(place > slot, cache_length, 0)  # steps ago, round
        visible = age <= slots.position[:, None]
        hidden, cache = model.decode(prepared, carry.cache, slots.last, slots.position, visible, slot)
        logits = unembed(hidden, kernel.astype(hidden.dtype), softcap)
        token, logp = _choose(logits, _uniforms(slots.keys, slots.drawn, plan.key_type), options, slots.seen)
        stopped = (token[:, None] == stops).any(-1)
        matched = slots.matched
        if stop_table is not None:
            matched = stop_table[matched, token].astype(jnp.int32)
            stopped |= matched == stop_table.shape[0] - 1
        cut = slots.drawn == longest - 1
        ends = jnp.where(slots.free, 0, jnp.where(stopped, ENDED, jnp.where(cut, CUT, 0)))
        new = Written(token, logp, ends.astype(jnp.int8))
        rows = jax.tree.map(lambda x: x[None], new if columns is None else take(new, columns))
        written = jax.tree.map(
            lambda whole, row: lax.dynamic_update_slice(whole, row, (carry.step, 0)), carry.written, rows
        )
        slots = _Slots(
            slots.keys,
            slots.drawn + 1,
            slots.position + 1,
            token,
            slots.free | stopped | cut,
            None if slots.seen is None else _mark(slots.seen, token[:, None], True),
            matched,
        )
        return _Carry(carry.step + 1, slots, carry.queue, written, cache)

    def many(carry: _Carry) -> jax.Array:
        """More sequences are left than fit the last slots."""
        left = (~carry.slots.free).reshape(shards, -1).sum(1)
        return carry.queue.waits().any() | (left > plan.last_slots).any()

    def step_full(carry: _Carry) -> _Carry:
        return step(lax.while_loop(fillable, fill, carry))

    wanted = (lengths > 0).reshape(shards, -1).sum(1, dtype=jnp.int32) * groups
    first = jnp.broadcast_to(jnp.arange(plan.slots, dtype=jnp.int32), (shards, plan.slots))
    none = jnp.zeros((shards, sequences), jnp.int32)
    queue = Queue(
        wanted, jnp.minimum(wanted, plan.slots), none, lax.dynamic_update_slice(none, first, (0, 0))
    )
    steps = most_steps(sequences, plan.slots, longest)
    written = Written(*(jnp.zeros((steps, rows), x) for x in (jnp.int32, jnp.float32, jnp.int8)))
    slots, cache = spread(plan.mesh, begin(queue, first, jnp.int32(0)))
    end = lax.while_loop(many, step_full, _Carry(jnp.int32(0), slots, queue, written, cache))
    if plan.last_slots:
        order = jnp.argsort(end.slots.free.reshape(shards, -1), axis=1)  # stable: those that go on come first
        columns = jnp.minimum(
            jnp.argsort(order, axis=1), plan.last_slots - 1
        )  # of ended ones: never read again
        slots, cache = take((end.slots, end.cache), order[:, : plan.last_slots])
        end = lax.while_loop(
            lambda carry: ~carry.slots.free.all(),
            functools.partial(step, columns=columns),
            end._replace(slots=slots, cache=cache),
        )
    # Replicated, so that every process of a multi-process run can read all of it.
    slot = end.queue.slot + plan.slots * jnp.arange(shards, dtype=jnp.int32)[:, None]
    out = (end.written, end.queue.step.reshape(-1), slot.reshape(-1))
    return lax.with_sharding_constraint(out, replicated_sharding(plan.mesh))


def _mark(seen: jax.Array, tokens: jax.Array, used: jax.Array | bool) -> jax.Array:
    """`seen` bool [B, V] with the `used` ones among tokens int32 [B, n] set."""
    used = jnp.broadcast_to(used, tokens.shape)
    return jax.vmap(lambda row, token, use: row.at[token].max(use))(seen, tokens, used)


def _uniforms(keys: jax.Array, counts: jax.Array, key_type: str) -> jax.Array:
    """float32 [B, 2] in [0, 1): for the token `counts`, int32 [B], of the sequences with these keys, uint32 [B, …]."""

    def of_sequence(key: jax.Array, count: jax.Array) -> jax.Array:
        own = jax.random.wrap_key_data(key, impl=key_type)
        return jax.random.uniform(jax.random.fold_in(own, count), (2,))

    return jax.vmap(of_sequence)(keys, counts)


def _choose(
    logits: jax.Array, uniforms: jax.Array, options: SamplingOptions, seen: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """(tokens int32 [B], their log-probabilities float32 [B]) of logits [B, V], given uniforms [B, 2].

    The log-probabilities are the policy's: neither the penalty nor a filter changes them.
    """
    greedy = options.temperature == 0

    def scaled(logits: jax.Array) -> jax.Array:
        logits = logits if greedy else logits / options.temperature
        return logits - logits.max(-1, keepdims=True)

    policy = scaled(logits)
    mass = jnp.exp(policy)
    normalizer = jnp.log(mass.sum(-1))
    preferred = policy
    if seen is not None:
        preferred = scaled(repetition_penalty(logits, seen, options.repetition_penalty))
        mass = jnp.exp(preferred)
    if greedy:
        token = jnp.argmax(preferred, axis=-1).astype(jnp.int32)
    else:
        if options.top_k is not None:
            mass = top_k_filter(mass, options.top_k)
        if options.top_p < 1:
            mass = top_p_filter(mass, options.top_p)
        if options.min_p:
            mass = min_p_filter(mass, options.min_p)
        token = draw(mass, uniforms)
    return token, jnp.take_along_axis(policy, token[:, None], axis=-1)[:, 0] - normalizer
