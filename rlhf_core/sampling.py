"""Completions sampled from a policy, with the log-probability of every token.

A prompt is prefilled once, however many completions it gets, and its cache repeated. Prompts are padded on
the left to one of a few lengths, so that all rows write the same cache slot. The loop is one program.
Each sequence has a key of its own: what it samples does not depend on its neighbours or on how calls are cut.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from pydantic import Field

from rlhf_core.errors import InputError
from rlhf_core.filters import draw, min_p_filter, top_k_filter, top_p_filter
from rlhf_core.logprobs import unembed
from rlhf_core.mesh import put_rows, replicated, row_multiple, row_sharding
from rlhf_core.options import Options

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding

    from rlhf_core.models import Definition

SHORTEST_BUCKET = 32
"""Tokens; prompts are padded to this times a power of two, or to the longest allowed."""


class SamplingOptions(Options):
    """How completions are drawn: temperature, then top_k, top_p and min_p, in transformers' order."""

    temperature: float = Field(
        default=1.0, ge=0, description="logits are divided by it; 0 takes the likeliest token"
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="share of the probability to sample from; 1: all"
    )
    top_k: int | None = Field(default=None, ge=1, description="number of likeliest tokens to sample from")
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="least probability, relative to the likeliest token's"
    )
    max_completion_length: int = Field(default=256, ge=1, description="tokens, the stop token included")


class Rollouts(NamedTuple):
    """N completions, NumPy arrays on every process; C is max_completion_length."""

    tokens: np.ndarray
    """int32 [N, C], 0 after the end."""
    lengths: np.ndarray
    """int32 [N], tokens of the completion, its stop token included."""
    logps: np.ndarray
    """float32 [N, C], nats: log-probability under softmax(logits / temperature), not filtered; 0 after the
    end. At temperature 0, under softmax(logits)."""
    finished: np.ndarray
    """bool [N], a stop token was sampled; False: cut at C."""


@dataclass(frozen=True)
class _Plan:
    """What one compiled program is for, beside its shapes. Samplers with equal plans share programs."""

    definition: Definition
    options: SamplingOptions
    mesh: Mesh
    stop_ids: tuple[int, ...]
    num_generations: int
    key_type: str


class Sampler:
    """Samples `num_generations` completions for each of any number of prompts.

    definition: a language model; its parameters are given with every call and may be spread over `mesh`.
    stop_ids: tokens that end a completion.
    prompts_per_call: prompts on the devices at once, rounded up to a multiple of the mesh's rows; there are
        num_generations times as many sequences.
    max_prompt_length: tokens; longer prompts are refused.

    One program is compiled for each padded prompt length: 32, 64, 128, … and max_prompt_length.
    """

    def __init__(
        self,
        definition: Definition,
        options: SamplingOptions,
        *,
        mesh: Mesh,
        stop_ids: Sequence[int],
        num_generations: int = 1,
        prompts_per_call: int,
        max_prompt_length: int,
    ) -> None:
        if min(num_generations, prompts_per_call, max_prompt_length) < 1:
            raise ValueError(
                "num_generations, prompts_per_call and max_prompt_length must be positive; got "
                f"{num_generations}, {prompts_per_call} and {max_prompt_length}"
            )
        self.definition = definition
        self.options = options
        self.mesh = mesh
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self.num_generations = num_generations
        multiple = row_multiple(mesh)
        self.prompts_per_call = -(-prompts_per_call // multiple) * multiple
        self.max_prompt_length = max_prompt_length

    def __call__(
        self, params: Any, prompts: Sequence[np.ndarray], key: jax.Array, ids: np.ndarray | None = None
    ) -> Rollouts:
        """Completions of `prompts`; those of one prompt are adjacent, N = len(prompts) × num_generations.

        prompts: int [length] each, at least one token.
        key: a typed key, the same on every process. ids: int [N], default 0 … N - 1. Sequence j draws its
        t-th token with fold_in(fold_in(key, ids[j]), t): equal ids and prompts give equal completions.

        Raises InputError for prompts that are empty or longer than max_prompt_length.
        """
        count, groups, longest = len(prompts), self.num_generations, self.options.max_completion_length
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        self._check(lengths)
        ids = np.arange(count * groups) if ids is None else np.asarray(ids)
        if ids.shape != (count * groups,):
            raise ValueError(
                f"ids must have one entry a completion, [{count * groups}]; its shape is {ids.shape}"
            )
        ids = ids.astype(np.uint32).reshape(count, groups)
        key_data = np.asarray(jax.random.key_data(key))
        plan = _Plan(
            self.definition, self.options, self.mesh, self.stop_ids, groups, str(jax.random.key_impl(key))
        )
        out = Rollouts(
            np.zeros((count, groups, longest), np.int32),
            np.zeros((count, groups), np.int32),
            np.zeros((count, groups, longest), np.float32),
            np.zeros((count, groups), np.bool_),
        )
        # Prompts of like lengths go together, so that fewer are padded far.
        order = np.argsort(lengths, kind="stable")
        for start in range(0, count, self.prompts_per_call):
            chosen = order[start : start + self.prompts_per_call]
            batch = self._batch([prompts[i] for i in chosen], lengths[chosen], ids[chosen])
            result = jax.device_get(_generate(params, *put_rows(self.mesh, batch), key_data, plan=plan))
            for whole, part in zip(out, result, strict=True):
                whole[chosen] = part.reshape(-1, *whole.shape[1:])[: len(chosen)]
        return Rollouts(*(whole.reshape(count * groups, *whole.shape[2:]) for whole in out))

    def _check(self, lengths: np.ndarray) -> None:
        problems = [f"prompt {i + 1} has no tokens" for i in np.flatnonzero(lengths == 0)]
        problems += [
            f"prompt {i + 1} has {lengths[i]} tokens, more than max_prompt_length={self.max_prompt_length}; "
            "shorten it or raise max_prompt_length"
            for i in np.flatnonzero(lengths > self.max_prompt_length)
        ]
        if problems:
            raise InputError(*problems)

    def _batch(
        self, prompts: Sequence[np.ndarray], lengths: np.ndarray, ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Left-padded tokens int32 [P, time], lengths int32 [P], 0 where unused, ids uint32 [P · G]."""
        time = bucket(int(lengths.max()), self.max_prompt_length)
        tokens = np.zeros((self.prompts_per_call, time), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, time - len(prompt) :] = prompt
        unused = self.prompts_per_call - len(prompts)
        return tokens, np.pad(lengths, (0, unused)), np.pad(ids, ((0, unused), (0, 0))).reshape(-1)


def bucket(length: int, longest: int) -> int:
    """The padded length of a prompt: SHORTEST_BUCKET times a power of two, at most `longest`."""
    size = SHORTEST_BUCKET
    while size < length:
        size *= 2
    return min(size, longest)


class _State(NamedTuple):
    """The loop's own arrays; the model's cache is carried beside them."""

    sampled: jax.Array  # int32, tokens sampled so far
    last: jax.Array  # int32 [B], the token sampled last
    done: jax.Array  # bool [B]
    tokens: jax.Array  # int32 [B, C]
    logps: jax.Array  # float32 [B, C]
    lengths: jax.Array  # int32 [B]


@functools.partial(jax.jit, static_argnames="plan")
def _generate(
    params: Any, prompts: jax.Array, lengths: jax.Array, ids: jax.Array, key_data: jax.Array, *, plan: _Plan
) -> Any:
    """The fields of `Rollouts`, for P prompts and G completions each, B = P · G, replicated.

    prompts: int32 [P, time], left-padded; lengths: int32 [P], 0: the row is not wanted; ids: uint32 [P · G].
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
        token, logp = _choose(logits, lax.dynamic_index_in_dim(uniforms, state.sampled, 1, False), options)
        token, logp = jnp.where(state.done, 0, token), jnp.where(state.done, 0.0, logp)
        stopped = (token[:, None] == stops).any(-1)
        return _State(
            state.sampled + 1,
            token,
            state.done | stopped,
            lax.dynamic_update_slice(state.tokens, token[:, None], (0, state.sampled)),
            lax.dynamic_update_slice(state.logps, logp[:, None], (0, state.sampled)),
            state.lengths + ~state.done,
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

    start = _State(
        jnp.int32(0),
        row_zeros(jnp.int32),
        lengths == 0,
        row_zeros(jnp.int32, longest),
        row_zeros(jnp.float32, longest),
        row_zeros(jnp.int32),
    )
    state, _ = lax.while_loop(going, step, (sample(start, states), cache))
    # Replicated, so that every process of a multi-process run can read all of it.
    return _constrained((state.tokens, state.lengths, state.logps, state.done), replicated(plan.mesh))


def _constrained(arrays: Any, sharding: NamedSharding) -> Any:
    return lax.with_sharding_constraint(arrays, sharding)


def _uniforms(key: jax.Array, ids: jax.Array, count: int) -> jax.Array:
    """float32 [B, count, 2] in [0, 1), two numbers for each token of each sequence."""

    def of_sequence(id_: jax.Array) -> jax.Array:
        own = jax.random.fold_in(key, id_)
        return jax.vmap(lambda t: jax.random.uniform(jax.random.fold_in(own, t), (2,)))(jnp.arange(count))

    return jax.vmap(of_sequence)(ids)


def _choose(logits: jax.Array, uniforms: jax.Array, options: SamplingOptions) -> tuple[jax.Array, jax.Array]:
    """(tokens int32 [B], their log-probabilities float32 [B]) of logits [B, V], given uniforms [B, 2]."""
    greedy = options.temperature == 0
    if not greedy:
        logits = logits / options.temperature
    logits = logits - logits.max(-1, keepdims=True)
    mass = jnp.exp(logits)
    normalizer = jnp.log(mass.sum(-1))
    if greedy:
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        if options.top_k is not None:
            mass = top_k_filter(mass, options.top_k)
        if options.top_p < 1:
            mass = top_p_filter(mass, options.top_p)
        if options.min_p:
            mass = min_p_filter(mass, options.min_p)
        token = draw(mass, uniforms)
    return token, jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - normalizer
