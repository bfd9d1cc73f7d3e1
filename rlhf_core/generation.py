"""The sampling loop as one compiled program: prefill, then a token a step until every sequence has ended."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rlhf_core.filters import draw, min_p_filter, repetition_penalty, top_k_filter, top_p_filter
from rlhf_core.logprobs import unembed
from rlhf_core.mesh import replicated, row_sharding

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding

    from rlhf_core.models import Definition
    from rlhf_core.sampling import SamplingOptions


@dataclass(frozen=True)
class Plan:
    """What one compiled program is for, beside its shapes. Samplers with equal plans share programs."""

    definition: Definition
    options: SamplingOptions
    mesh: Mesh
    stop_ids: tuple[int, ...]
    num_generations: int
    key_type: str


class _State(NamedTuple):
    """The loop's own arrays; the model's cache is carried beside them. What no option asks for is None."""

    sampled: jax.Array  # int32, tokens sampled so far
    last: jax.Array  # int32 [B], the token sampled last
    done: jax.Array  # bool [B]
    tokens: jax.Array  # int32 [B, C]
    logps: jax.Array  # float32 [B, C]
    lengths: jax.Array  # int32 [B]
    seen: jax.Array | None  # bool [B, V], tokens of the prompt and the completion
    matched: jax.Array | None  # int32 [B], how much of a stop string the completion ends in


@functools.partial(jax.jit, static_argnames="plan")
def generate(
    params: Any,
    prompts: jax.Array,
    lengths: jax.Array,
    ids: jax.Array,
    key_data: jax.Array,
    stop_table: jax.Array | None,
    *,
    plan: Plan,
) -> Any:
    """The fields of `Rollouts`, for P prompts and G completions each, B = P · G, replicated.

    prompts: int32 [P, time], left-padded; lengths: int32 [P], 0: the row is not wanted; ids: uint32 [P · G].
    stop_table: unsigned [states, V], of `rlhf_core.stopping`; None: no stop strings.
    """
    model, options, groups = plan.definition, plan.options, plan.num_generations
    time, longest = prompts.shape[1], options.max_completion_length
    cache_length = time + longest - 1  # the last token is sampled and never fed back
    slots = jnp.arange(cache_length)
    stops = jnp.asarray(plan.stop_ids, jnp.int32)

    first = time - lengths[:, None]  # the index of a prompt's first token
    used = slots[:time] >= first
    positions = jnp.maximum(slots[:time] - first, 0)
    states, cache = model.prefill(params, prompts, positions, jnp.where(used, time, 0), cache_length)
    cache = model.repeat(cache, groups)
    states, lengths, first = (jnp.repeat(x, groups, axis=0) for x in (states[:, -1], lengths, first))
    prepared = model.prepare(params)
    kernel, softcap = model.unembedding(params)
    kernel = kernel.astype(states.dtype)
    uniforms = _uniforms(jax.random.wrap_key_data(key_data, impl=plan.key_type), ids, longest)

    def sample(state: _State, hidden: jax.Array) -> _State:
        """The next token of every row that is not done."""
        logits = unembed(hidden, kernel, softcap)
        uniform = lax.dynamic_index_in_dim(uniforms, state.sampled, 1, False)
        token, logp = _choose(logits, uniform, options, state.seen)
        token, logp = jnp.where(state.done, 0, token), jnp.where(state.done, 0.0, logp)
        stopped = (token[:, None] == stops).any(-1)
        matched = state.matched
        if stop_table is not None:
            matched = stop_table[matched, token].astype(jnp.int32)
            stopped |= matched == stop_table.shape[0] - 1
        return _State(
            state.sampled + 1,
            token,
            state.done | stopped,
            lax.dynamic_update_slice(state.tokens, token[:, None], (0, state.sampled)),
            lax.dynamic_update_slice(state.logps, logp[:, None], (0, state.sampled)),
            state.lengths + ~state.done,
            None if state.seen is None else _mark(state.seen, token[:, None], True),
            matched,
        )

    def step(carry: tuple[_State, Any]) -> tuple[_State, Any]:
        state, cache = carry
        slot = time + state.sampled - 1
        visible = (slots >= first) & (slots <= slot)
        hidden, cache = model.decode(prepared, cache, state.last, slot - first[:, 0], visible, slot)
        return sample(state, hidden), cache

    def going(carry: tuple[_State, Any]) -> jax.Array:
        return (carry[0].sampled < longest) & ~carry[0].done.all()

    def row_zeros(dtype: Any, *shape: int) -> Any:
        return _constrained(jnp.zeros((len(ids), *shape), dtype), row_sharding(plan.mesh))

    seen = None
    if options.repetition_penalty != 1:
        each = (jnp.repeat(x, groups, axis=0) for x in (prompts, used))
        seen = _mark(row_zeros(jnp.bool_, kernel.shape[1]), *each)
    start = _State(
        jnp.int32(0),
        row_zeros(jnp.int32),
        lengths == 0,
        row_zeros(jnp.int32, longest),
        row_zeros(jnp.float32, longest),
        row_zeros(jnp.int32),
        seen,
        None if stop_table is None else row_zeros(jnp.int32),
    )
    state, _ = lax.while_loop(going, step, (sample(start, states), cache))
    # Replicated, so that every process of a multi-process run can read all of it.
    return _constrained((state.tokens, state.lengths, state.logps, state.done), replicated(plan.mesh))


def _constrained(arrays: Any, sharding: NamedSharding) -> Any:
    return lax.with_sharding_constraint(arrays, sharding)


def _mark(seen: jax.Array, tokens: jax.Array, used: jax.Array | bool) -> jax.Array:
    """`seen` bool [B, V] with the `used` ones among tokens int32 [B, n] set."""
    used = jnp.broadcast_to(used, tokens.shape)
    return jax.vmap(lambda row, token, use: row.at[token].max(use))(seen, tokens, used)


def _uniforms(key: jax.Array, ids: jax.Array, count: int) -> jax.Array:
    """float32 [B, count, 2] in [0, 1), two numbers for each token of each sequence."""

    def of_sequence(id_: jax.Array) -> jax.Array:
        own = jax.random.fold_in(key, id_)
        return jax.vmap(lambda t: jax.random.uniform(jax.random.fold_in(own, t), (2,)))(jnp.arange(count))

    return jax.vmap(of_sequence)(ids)


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
