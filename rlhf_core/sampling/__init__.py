"""Sample completions from a policy, with the log-probability of every token.

A prompt is prefilled once, however many completions it gets. Where every sequence of a call has a slot, completions
share their prompt's cache; otherwise a sequence that ends makes room for the next. Prompts are padded on the left to
one of a few lengths. Prefill and decoding are one program.
Each sequence has its own key: its tokens depend neither on its neighbours nor on how prompts are split into calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from rlhf_core.contracts import Rollouts as Rollouts
from rlhf_core.contracts import SamplerInputs
from rlhf_core.mesh import abstract_rows, put_rows, replicated_sharding, row_multiple
from rlhf_core.models.finite import nonfinite_error
from rlhf_core.runtime.background import BackgroundCompiler
from rlhf_core.sampling.by_turns import converse_by_turns as converse_by_turns
from rlhf_core.sampling.loop import SamplingProgram, generate, read_completions
from rlhf_core.sampling.options import SamplingMesh as SamplingMesh
from rlhf_core.sampling.options import SamplingOptions as SamplingOptions
from rlhf_core.sampling.options import check_prompts, stops_of
from rlhf_core.sampling.placement import (
    abstract_weights,
    allowed_sizes,
    move_weights,
    plan_room,
    replicated,
    sampling_mesh,
)
from rlhf_core.sampling.turn_sampler import ConversationSampler as ConversationSampler
from rlhf_core.sampling.turn_sampler import keeps_caches

__all__ = ["SamplingOptions"]


LAST_SLOTS = 4
"""The remaining sequences move into a quarter of the slots once that holds them, unless it is fewer than this."""
SHORTEST_BUCKET = 32
"""Tokens; prompts are padded to this times a power of two, or to the longest allowed."""
ALIGNED = 8
"""Prompts are padded to a multiple of this: products over another number of keys make XLA copy the cache on GPUs."""


class Sampler:
    """Samples `num_generations` completions for each of any number of prompts.

    Every call takes the parameters, which may be spread over the mesh; on several devices it first moves them into the
    layout of `sampling.placement`. Prompts are sampled together if they fit: `room` says how many. Stop strings match a
    completion's bytes as `token_bytes` gives them: across token borders, but not across the border of prompt and
    completion.

    One program is compiled for each padded prompt length: 32, 64, 128, … and max_prompt_length; `warm_up` compiles them
    ahead of time.

    Raises InputError for stop strings without a tokenizer or that it cannot write, and for stop tokens that the
    model does not have.
    """

    def __init__(self, inputs: SamplerInputs) -> None:
        definition, options = inputs.policy, inputs.options
        if min(inputs.num_generations, inputs.prompts_per_call, inputs.max_prompt_length) < 1:
            raise ValueError(
                "num_generations, prompts_per_call and max_prompt_length must be positive; got "
                f"{inputs.num_generations}, {inputs.prompts_per_call} and {inputs.max_prompt_length}"
            )
        self.definition, self.options = definition, options
        prompt_length = bucket(inputs.max_prompt_length, inputs.max_prompt_length)
        self.room = plan_room(
            definition,
            inputs.mesh,
            allowed_sizes(definition, inputs.mesh, options.mesh.tensor),
            memory=inputs.memory,
            prompts=inputs.prompts_per_call,
            num_generations=inputs.num_generations,
            prompt_length=prompt_length,
            length=prompt_length + options.max_completion_length,
        )
        shared = sampling_mesh(definition, inputs.mesh, self.room.tensor)
        self.shares_layers = shared is not None
        self.mesh = inputs.mesh if shared is None else shared
        self.stop_ids, self._stop_table = stops_of(inputs)
        self.num_generations = inputs.num_generations
        self.prompts_per_call = self.room.prompts
        self.max_prompt_length = inputs.max_prompt_length
        self._ahead = BackgroundCompiler()

    def __call__(
        self, params: Any, prompts: Sequence[np.ndarray], key: jax.Array, ids: np.ndarray | None = None
    ) -> Rollouts:
        """Sample N = len(prompts) × num_generations completions of `prompts`; those of one prompt are adjacent.

        prompts: int [length] each, at least one token.
        key: a typed key, the same on every process. ids: int [N], default 0 … N - 1. The t-th token of sequence j is
        sampled with fold_in(fold_in(key, ids[j]), t): equal ids and prompts give equal completions.

        Raises InputError for prompts that are empty or longer than max_prompt_length, and for weights that are not
        finite; NonFiniteError, which has the number of a prompt, where only outputs are not.
        """
        count, groups, longest = len(prompts), self.num_generations, self.options.max_completion_length
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        check_prompts(lengths, self.max_prompt_length)
        ids = np.arange(count * groups) if ids is None else np.asarray(ids)
        if ids.shape != (count * groups,):
            raise ValueError(
                f"ids must have one entry per completion, [{count * groups}]; its shape is {ids.shape}"
            )
        ids = ids.astype(np.uint32).reshape(count, groups)
        out = (
            np.zeros((count, groups, longest), np.int32),
            np.zeros((count, groups), np.int32),
            np.zeros((count, groups, longest), np.float32),
            np.zeros((count, groups), np.bool_),
        )
        moved = self._moved(params)
        # Prompts of similar lengths share a batch, which keeps padding short.
        order = np.argsort(lengths, kind="stable")
        for start in range(0, count, self.prompts_per_call):
            chosen = order[start : start + self.prompts_per_call]
            batch = self._batch([prompts[i] for i in chosen], lengths[chosen], ids[chosen])
            rows = self._rows(len(chosen))
            for whole, part in zip(out, self._run(moved, batch, key), strict=True):
                whole[chosen] = part.reshape(-1, *whole.shape[1:])[rows]
        # A token that was chosen from logits that are not finite has such a log-probability.
        if len(bad := np.argwhere(~np.isfinite(out[2]))):
            written = {
                i: ("the distribution of a next token", np.concatenate([prompts[i], out[0][i, j, :t]]))
                for i, j, t in reversed(bad.tolist())
            }
            raise nonfinite_error(self.definition, params, "the policy", dict(sorted(written.items())))
        return Rollouts(*(whole.reshape(count * groups, *whole.shape[2:]) for whole in out))

    def warm_up(self, params: Any, lengths: Sequence[int] | np.ndarray) -> None:
        """Start to compile the programs for prompts of `lengths` tokens; a call waits for its own program.

        params: with the shardings of later calls, whose keys must have jax.random.key's default implementation.

        Raises InputError as a call does.
        """
        check_prompts(lengths, self.max_prompt_length)
        weights = params
        if self.shares_layers:
            self._ahead.compile("weights", move_weights(self.definition, self.mesh).lower(params))
            weights = abstract_weights(self.definition, self.mesh)
        for time in sorted({bucket(int(length), self.max_prompt_length) for length in lengths}):
            self._ahead.compile(time, self.lower(weights, time))

    def lower(self, weights: Any, time: int) -> Any:
        """Lower the program for prompts padded to `time` tokens. weights: as the program reads them."""
        rows = self.prompts_per_call
        tokens, none = np.zeros((rows, time), np.int32), np.zeros(rows, np.int32)
        ids = np.zeros(rows * self.num_generations, np.uint32)
        batch = abstract_rows(self.mesh, (tokens, none, none, ids))
        key_data, program = self._program(jax.random.key(0))
        table = self._stop_table
        shape = None
        if table is not None:
            shape = jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=replicated_sharding(self.mesh))
        return generate.lower(weights, *batch, key_data, shape, program=program)

    def _moved(self, params: Any) -> Any:
        """Return the parameters as the program reads them."""
        if not self.shares_layers:
            return params
        self._ahead.wait("weights")
        return move_weights(self.definition, self.mesh)(params)

    def _run(self, params: Any, batch: Any, key: jax.Array) -> Any:
        """Sample one batch of `_batch`: the first four fields of `Rollouts` for all its rows, on the host."""
        self._ahead.wait(batch[0].shape[1])
        key_data, program = self._program(key)
        rows = put_rows(self.mesh, batch)
        written, step, slot = jax.device_get(
            generate(params, *rows, key_data, self._stop_table_on_devices, program=program)
        )
        return read_completions(written, step, slot, self.options.max_completion_length)

    def _program(self, key: jax.Array) -> tuple[np.ndarray, SamplingProgram]:
        slots = self.room.slots
        fewer = slots // 4
        program = SamplingProgram(
            self.definition,
            self.options,
            self.mesh,
            self.stop_ids,
            self.num_generations,
            slots,
            fewer if fewer >= LAST_SLOTS else 0,
            str(jax.random.key_impl(key)),
            self.shares_layers,
            self.room.shares_prompts,
            self.room.prefill_tokens,
        )
        return np.asarray(jax.random.key_data(key)), program

    @cached_property
    def _stop_table_on_devices(self) -> jax.Array | None:
        return None if self._stop_table is None else replicated(self.mesh, self._stop_table)

    def _batch(
        self, prompts: Sequence[np.ndarray], lengths: np.ndarray, ids: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Lay out the arguments of `generate`: prompts, lengths, last tokens and ids."""
        time = bucket(int(lengths.max()), self.max_prompt_length)
        count = self.prompts_per_call
        tokens, last, sizes = (
            np.zeros((count, time), np.int32),
            np.zeros(count, np.int32),
            np.zeros(count, np.int32),
        )
        batch_ids = np.zeros((count, self.num_generations), np.uint32)
        rows = self._rows(len(prompts))
        for row, prompt in zip(rows, prompts, strict=True):
            tokens[row, time - len(prompt) + 1 :] = prompt[:-1]
            last[row] = prompt[-1]
        sizes[rows], batch_ids[rows] = lengths, ids
        return tokens, sizes, last, batch_ids.reshape(-1)

    def _rows(self, count: int) -> np.ndarray:
        """Deal `count` prompts out to rows: every shard gets as many, in its first rows."""
        shards = row_multiple(self.mesh)
        i = np.arange(count)
        return i % shards * (self.prompts_per_call // shards) + i // shards


def bucket(length: int, longest: int) -> int:
    """Return the padded length of a prompt: SHORTEST_BUCKET times a power of two, at most that of the longest.

    A prompt's last token is not prefilled.
    """
    size = SHORTEST_BUCKET
    while size < length - 1:
        size *= 2
    return min(size, -(-max(longest - 1, 1) // ALIGNED) * ALIGNED)


def make_sampler(inputs: SamplerInputs) -> Any:
    """Make the sampler "jax" of the registry.

    For a model whose caches cannot stay on the devices from turn to turn, it is one without `converse`.
    """
    if inputs.conversation_length is None or not keeps_caches(inputs.definition, inputs.mesh):
        return Sampler(inputs)
    return ConversationSampler(inputs)
