"""Sample completions from a policy, with the log-probability of every token.

A prompt is prefilled once, however many completions it gets. Where every sequence of a call has a slot, completions
share their prompt's cache; otherwise a sequence that ends makes room for the next. Prompts are padded on the left to
one of a few lengths. Prefill and decoding are one program.
Each sequence has its own key: its tokens depend neither on its neighbours nor on how prompts are split into calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any

import jax
import numpy as np
from pydantic import Field

from rlhf_core.config import Options
from rlhf_core.contracts import (
    PARAMETERS,
    ModelDefinition,
    Program,
    ProgramShape,
    SamplerInputs,
    SamplingSettings,
    World,
)
from rlhf_core.contracts import Rollouts as Rollouts
from rlhf_core.errors import InputError
from rlhf_core.mesh import abstract_rows, put_rows, replicated_sharding, row_multiple
from rlhf_core.models.finite import nonfinite_error
from rlhf_core.runtime.background import BackgroundCompiler
from rlhf_core.runtime.devices import platform
from rlhf_core.sampling.by_turns import converse_by_turns as converse_by_turns
from rlhf_core.sampling.conversations import NonFiniteTurnError
from rlhf_core.sampling.layout import (
    Room,
    abstract_weights,
    allowed_sizes,
    bring,
    cache_bytes,
    plan_conversations,
    plan_room,
    replicated,
    sampling_mesh,
    weight_bytes,
)
from rlhf_core.sampling.loop import SamplingProgram, generate, most_steps, read_completions
from rlhf_core.sampling.stop_strings import stop_table
from rlhf_core.sampling.turn_sampler import TurnSampler
from rlhf_core.sampling.turns import TurnsProgram, cache_length

if TYPE_CHECKING:
    from jax.sharding import Mesh

__all__ = ["SamplingOptions"]


LAST_SLOTS = 4
"""The remaining sequences move into a quarter of the slots once that holds them, unless it is fewer than this."""
SHORTEST_BUCKET = 32
"""Tokens; prompts are padded to this times a power of two, or to the longest allowed."""
ALIGNED = 8
"""Prompts are padded to a multiple of this: products over another number of keys make XLA copy the cache on GPUs."""


class SamplingMesh(Options):
    """The sampler's own arrangement of the devices; the rest of them sample other prompts with the same weights."""

    tensor: int | None = Field(
        default=None,
        ge=1,
        description="devices that share each layer, of one machine or TPU slice; none: as few as have the memory",
    )


class SamplingOptions(Options):
    """How tokens are sampled (repetition_penalty, temperature, top_k, top_p, min_p, in transformers' order), and what
    ends a completion besides the model's own stop tokens.
    """

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
    repetition_penalty: float = Field(
        default=1.0,
        gt=0,
        description="logits of the prompt's and the completion's tokens are divided by it where positive, "
        "multiplied where negative; 1: off",
    )
    max_completion_length: int = Field(default=256, ge=1, description="tokens, the stop token included")
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="texts that end a completion, with the token that completes one"
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="tokens that end a completion, besides the model's own"
    )
    mesh: SamplingMesh = Field(
        default=SamplingMesh(), description="how devices share the model while they sample"
    )


class Sampler:
    """Samples `num_generations` completions for each of any number of prompts.

    definition: a language model; every call takes its parameters, which may be spread over `mesh`. On several devices
        a call first brings them into the layout of `sampling.layout`.
    stop_ids: tokens that end a completion, besides options.stop_token_ids.
    prompts_per_call: prompts that are sampled at once if they fit, rounded up to a multiple of the mesh's rows.
        memory: bytes per device for that; None: unknown. `room` is what was made of both.
    max_prompt_length: tokens; longer prompts are refused.
    tokenizer: only its tokens are sampled: other ids of the vocabulary have probability 0, as in `Definition.absent`;
        None: any id. Needed for options.stop_strings, which match a completion's bytes as `token_bytes` gives them:
        across token borders, but not across the border of prompt and completion.
    conversation_length: tokens that a conversation may have after its prompt; None: `converse` is not called. What is
        held at once is `conversation_room`, None where turns are whole calls.

    One program is compiled for each padded prompt length: 32, 64, 128, … and max_prompt_length; `warm_up` compiles them
    ahead of time.

    Raises InputError for stop strings without a tokenizer or that it cannot write, and for stop tokens that the
    model does not have.
    """

    def __init__(
        self,
        definition: ModelDefinition,
        options: SamplingSettings,
        *,
        mesh: Mesh,
        stop_ids: Sequence[int],
        num_generations: int = 1,
        prompts_per_call: int,
        max_prompt_length: int,
        tokenizer: Any = None,
        memory: int | None = None,
        conversation_length: int | None = None,
    ) -> None:
        if min(num_generations, prompts_per_call, max_prompt_length, conversation_length or 1) < 1:
            raise ValueError(
                "num_generations, prompts_per_call, max_prompt_length and conversation_length must be positive; got "
                f"{num_generations}, {prompts_per_call}, {max_prompt_length} and {conversation_length}"
            )
        if tokenizer is not None and not definition.absent:
            definition = definition.as_policy(tokenizer)
        self.definition = definition
        self.options = options
        prompt_length = bucket(max_prompt_length, max_prompt_length)
        sizes = allowed_sizes(definition, mesh, options.mesh.tensor)
        conversations = prompts_per_call * num_generations
        whole, held = max_prompt_length + (conversation_length or 0), None
        if conversation_length is not None and keeps_caches(definition, mesh):
            length = cache_length(whole)
            held = plan_conversations(
                definition, mesh, sizes, memory=memory, conversations=conversations, length=length
            )
            sizes = [held.tensor]
        self.room = plan_room(
            definition,
            mesh,
            sizes,
            memory=memory,
            prompts=prompts_per_call,
            num_generations=num_generations,
            prompt_length=prompt_length,
            length=prompt_length + options.max_completion_length,
        )
        shared = sampling_mesh(definition, mesh, self.room.tensor)
        self.shares_layers = shared is not None
        trained_on, self.mesh = mesh, mesh if shared is None else shared
        self.stop_ids = tuple(int(i) for i in (*stop_ids, *options.stop_token_ids))
        self.num_generations = num_generations
        self.prompts_per_call = self.room.prompts
        self.max_prompt_length = max_prompt_length
        self._stop_table = self._table(tokenizer)
        self._ahead = BackgroundCompiler()
        self.conversation_room = held
        self._turns: TurnSampler | Sampler | None = None
        self._converse: Any = None
        if conversation_length is None:
            return
        if held is not None:
            self._turns = self._turn_sampler(held, conversation_length)
            self._converse = self._turns.converse
        else:
            self._turns = Sampler(
                definition,
                options,
                mesh=trained_on,
                stop_ids=stop_ids,
                prompts_per_call=conversations,
                max_prompt_length=whole,
                tokenizer=tokenizer,
                memory=memory,
            )
            self._converse = partial(converse_by_turns, self._turns, conversation_length=conversation_length)

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
        self._check(lengths)
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
        brought = self._brought(params)
        # Prompts of similar lengths share a batch, which keeps padding short.
        order = np.argsort(lengths, kind="stable")
        for start in range(0, count, self.prompts_per_call):
            chosen = order[start : start + self.prompts_per_call]
            batch = self._batch([prompts[i] for i in chosen], lengths[chosen], ids[chosen])
            rows = self._rows(len(chosen))
            for whole, part in zip(out, self._run(brought, batch, key), strict=True):
                whole[chosen] = part.reshape(-1, *whole.shape[1:])[rows]
        # A token that was chosen from logits that are not finite has such a log-probability.
        if len(bad := np.argwhere(~np.isfinite(out[2]))):
            written = {
                i: np.concatenate([prompts[i], out[0][i, j, :t]]) for i, j, t in reversed(bad.tolist())
            }
            raise self._nonfinite(params, dict(sorted(written.items())))
        return Rollouts(*(whole.reshape(count * groups, *whole.shape[2:]) for whole in out))

    def converse(
        self,
        params: Any,
        prompts: Sequence[np.ndarray],
        key: jax.Array,
        ids: np.ndarray | None,
        world: World,
    ) -> None:
        """Sample the turns of the policy in conversations with `world`, which gets them, until all are over.

        prompts: int [length] each, one per conversation; those of a group, which are equal, are adjacent and are
        computed once. key: a typed key, the same on every process. ids: int [len(prompts)], default 0 … N - 1. The t-th
        token of the first turn of conversation j is sampled with fold_in(fold_in(key, ids[j]), t), as that of a
        completion; for turn k ≥ 1, fold_in(key, 2**31 + k) replaces the key.

        A turn ends as a completion does, or at its `Continuation.limit`, or where the conversation has
        conversation_length tokens after its prompt.

        Raises InputError for prompts that are empty or longer than max_prompt_length, and ValueError without a
        conversation_length and for a continuation after which no token fits.
        """
        if self._converse is None:
            raise ValueError("this sampler was made without conversation_length")
        self._check(np.array([len(prompt) for prompt in prompts], np.int32))
        ids = np.arange(len(prompts)) if ids is None else np.asarray(ids)
        if ids.shape != (len(prompts),):
            raise ValueError(
                f"ids must have one entry per conversation, [{len(prompts)}]; its shape is {ids.shape}"
            )
        try:
            self._converse(params, prompts, key, ids.astype(np.uint32), world)
        except NonFiniteTurnError as error:
            raise self._nonfinite(params, {error.conversation: error.context}) from None

    def _nonfinite(self, params: Any, contexts: Mapping[int, np.ndarray]) -> Exception:
        """Make the error for prompts or conversations after which outputs are not finite."""
        what = {i: ("the distribution of a next token", ids) for i, ids in contexts.items()}
        return nonfinite_error(self.definition, params, "the policy", what)

    def warm_up(self, params: Any, lengths: Sequence[int] | np.ndarray) -> None:
        """Start to compile the programs for prompts of `lengths` tokens; a call waits for its own program.

        params: with the shardings of later calls, whose keys must have jax.random.key's default implementation.

        Raises InputError as a call does.
        """
        lengths = np.asarray(lengths, np.int32)
        self._check(lengths)
        if self._turns is not None:
            self._turns.warm_up(params, lengths)
            return
        weights = params
        if self.shares_layers:
            self._ahead.compile("weights", bring(self.definition, self.mesh).lower(params))
            weights = abstract_weights(self.definition, self.mesh)
        for time in sorted({bucket(int(length), self.max_prompt_length) for length in lengths}):
            self._ahead.compile(time, self._lower(weights, time))

    def programs(self, params: Any, prompts: int) -> list[Program]:
        """Describe the programs of a rollout of `prompts` of the greatest length, with completions of full length.

        params: shapes with shardings will do. `Program.calls` are those of a rollout, or with a conversation_length of
        the conversations of so many prompts.
        """
        if self._turns is not None:
            return self._turns.programs(params, prompts * self.num_generations)
        time, room = bucket(self.max_prompt_length, self.max_prompt_length), self.room
        longest, sequences = self.options.max_completion_length, self.prompts_per_call * self.num_generations
        calls, lengths = -(-prompts // self.prompts_per_call), f"{self.max_prompt_length} + {longest}"
        weights, described = params, []
        if self.shares_layers:
            weights = abstract_weights(self.definition, self.mesh)
            # The weights in the sampler's layout lie beside those that are trained, until the rollout ends.
            moving = partial(bring(self.definition, self.mesh).lower, params)
            size = weight_bytes(self.definition, self.mesh, room.tensor)
            shape = ProgramShape(self.definition, 0, 0, room.tensor, size)
            described.append(Program("bring the weights", moving, "sample", reads=PARAMETERS, shape=shape))
        groups = row_multiple(self.mesh)
        steps = most_steps(sequences // groups, room.slots, longest)
        read = room.bytes
        if read is not None and room.shares_prompts and platform() != "cpu":
            # Kernels read what is written of the completions' caches, half of them on average.
            read -= cache_bytes(self.definition, room.slots, longest) // 2 // room.tensor
        rows = groups * room.slots
        shape = ProgramShape(self.definition, rows, time + longest, room.tensor, room.bytes, read)
        return [
            *described,
            Program(
                f"generate {self.prompts_per_call} × {self.num_generations}, {lengths} tokens",
                partial(self._lower, weights, time),
                "sample",
                calls=calls,
                tokens=prompts * self.num_generations * longest / calls,
                steps=steps,
                reads=() if self.shares_layers else PARAMETERS,
                shape=shape,
            ),
        ]

    def _turn_sampler(self, room: Room, conversation_length: int) -> TurnSampler:
        program = TurnsProgram(
            self.definition,
            self.options,
            self.mesh,
            self.stop_ids,
            room.slots,
            cache_length(self.max_prompt_length + conversation_length),
            str(jax.random.key_impl(jax.random.key(0))),
            self.shares_layers,
        )
        return TurnSampler(
            program,
            room,
            max_prompt_length=self.max_prompt_length,
            conversation_length=conversation_length,
            stop_table=self._stop_table,
            compiling=self._ahead,
        )

    def _lower(self, weights: Any, time: int) -> Any:
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

    def _brought(self, params: Any) -> Any:
        """Return the parameters as the program reads them."""
        if not self.shares_layers:
            return params
        self._ahead.wait("weights")
        return bring(self.definition, self.mesh)(params)

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

    def _table(self, tokenizer: Any) -> np.ndarray | None:
        """Make the table of the stop strings; None where there are none."""
        if unknown := [i for i in self.options.stop_token_ids if i >= self.definition.vocab_size]:
            raise InputError(
                f"sampling.stop_token_ids: the model has no token {', '.join(map(str, unknown))}; its ids end at "
                f"{self.definition.vocab_size - 1}"
            )
        if not self.options.stop_strings:
            return None
        if tokenizer is None:
            raise InputError(
                "sampling.stop_strings: there is no tokenizer to turn tokens into text; give one, or use "
                "sampling.stop_token_ids"
            )
        return stop_table(self.options.stop_strings, tokenizer, self.definition.vocab_size)

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


def keeps_caches(definition: ModelDefinition, mesh: Mesh) -> bool:
    """Whether the caches of a model's conversations can stay on the devices of `mesh` from turn to turn."""
    family = definition.family
    return family.extend is not None and (mesh.size == 1 or family.tensor_parallel is not None)


def bucket(length: int, longest: int) -> int:
    """Return the padded length of a prompt: SHORTEST_BUCKET times a power of two, at most that of the longest.

    A prompt's last token is not prefilled.
    """
    size = SHORTEST_BUCKET
    while size < length - 1:
        size *= 2
    return min(size, -(-max(longest - 1, 1) // ALIGNED) * ALIGNED)


def make_sampler(inputs: SamplerInputs) -> Sampler:
    """Make the sampler "jax" of the registry."""
    return Sampler(
        inputs.definition,
        inputs.options,
        mesh=inputs.mesh,
        stop_ids=inputs.stop_ids,
        num_generations=inputs.num_generations,
        prompts_per_call=inputs.prompts_per_call,
        max_prompt_length=inputs.max_prompt_length,
        tokenizer=inputs.tokenizer,
        memory=inputs.memory,
        conversation_length=inputs.conversation_length,
    )
