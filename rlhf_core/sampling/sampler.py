"""Sample completions from a policy, or its turns in conversations, with the log-probability of every token.

Completions have a separate loop, although they are conversations of one turn: as such they take 1.0 to 2.2 times as
long on a CPU, and memory for the prompt of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from pydantic import Field

import rlhf_core.sampling.packed as packed
import rlhf_core.sampling.turns as turns
from rlhf_core.config import Options
from rlhf_core.contracts import OpenWorld, Rollouts, SamplerInputs, Weights, World
from rlhf_core.errors import InputError
from rlhf_core.mesh import abstract_rows, put_rows, replicated_sharding, row_multiple
from rlhf_core.models import Definition
from rlhf_core.models.experts import route_shape
from rlhf_core.models.finite import nonfinite_output_error
from rlhf_core.runtime.background import BackgroundCompiler
from rlhf_core.sampling.devices import Devices
from rlhf_core.sampling.loop import SamplingProgram, generate, read_completions
from rlhf_core.sampling.placement import (
    Room,
    abstract_weights,
    allowed_sizes,
    move_weights,
    plan_conversations,
    plan_room,
    replicated,
    sampling_mesh,
)
from rlhf_core.sampling.schedule import NonFiniteTurnError, Schedule, begin_conversations
from rlhf_core.sampling.stop_strings import stop_table
from rlhf_core.sampling.turns import ALIGNED, TurnsProgram, cache_length

if TYPE_CHECKING:
    from jax.sharding import Mesh

LAST_SLOTS = 4
"""The remaining sequences move into a quarter of the slots once that holds them, unless it is fewer than this."""
SHORTEST_BUCKET = 32
"""Tokens; prompts are padded to this times a power of two, or to the longest allowed."""


class SamplingMesh(Options):
    """The sampler's own arrangement of the devices; the rest of them sample other prompts with the same weights."""

    tensor: int | None = Field(
        default=None,
        ge=1,
        description="devices that share each layer, within a machine or TPU slice; none: the fewest with enough memory",
    )


class SamplingOptions(Options):
    """How tokens are sampled (repetition_penalty, temperature, top_k, top_p, min_p, in transformers' order), and what
    ends a completion besides the model's own stop tokens.
    """

    temperature: float = Field(
        default=1.0, ge=0, description="logits are divided by it; 0: always the most likely token"
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="smallest set of tokens with this total probability; 1: all"
    )
    top_k: int | None = Field(default=None, ge=1, description="number of most likely tokens to sample from")
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="minimum probability, relative to the most likely token's"
    )
    repetition_penalty: float = Field(
        default=1.0,
        gt=0,
        description="logits of the prompt's and the completion's tokens are divided by it where positive, "
        "multiplied where negative; 1: off",
    )
    max_completion_length: int = Field(
        default=256, ge=1, le=2**31 - 1, description="tokens, the stop token included"
    )
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="strings that end a completion, after the token that completes one"
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="tokens that end a completion, in addition to the model's own"
    )
    mesh: SamplingMesh = Field(
        default=SamplingMesh(), description="how devices share the model while they sample"
    )


class _PlacedModel:
    """A model on the sampler's own mesh, and what ends its completions.

    Raises InputError for stop strings without a tokenizer or that it cannot write, and for stop tokens that the
    model does not have.
    """

    def __init__(self, inputs: SamplerInputs, room: Room) -> None:
        self.definition, self.options, self.room = inputs.policy, inputs.options, room
        self.num_generations, self.max_prompt_length = inputs.num_generations, inputs.max_prompt_length
        shared = sampling_mesh(self.definition, inputs.mesh, room.tensor)
        self.shares_layers = shared is not None
        self.mesh = inputs.mesh if shared is None else shared
        self.stop_ids, self._stop_table = stops_of(inputs)
        self._ahead = BackgroundCompiler()

    @cached_property
    def _stop_table_on_devices(self) -> jax.Array | None:
        return None if self._stop_table is None else replicated(self.mesh, self._stop_table)

    @property
    def _abstract_stop_table(self) -> Any:
        table = self._stop_table
        if table is None:
            return None
        return jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=replicated_sharding(self.mesh))


class Sampler(_PlacedModel):
    """Samples `num_generations` completions for each of any number of prompts.

    A prompt is prefilled once, however many completions it gets. Where every sequence of a call has a slot, completions
    share their prompt's cache; otherwise a sequence that ends makes room for the next. Prompts are padded on the left
    to one of a few lengths. Prefill and decoding are one program. Each sequence has its own key: its tokens depend
    neither on its neighbours nor on how prompts are split into calls.

    Every call takes the parameters, which may be spread over the mesh; on several devices it first moves them into the
    layout of `sampling.placement`. Prompts are sampled together if they fit: `room` says how many. Stop strings match a
    completion's bytes as `token_bytes` gives them: across token borders, but not across the border of prompt and
    completion.

    One program is compiled for each padded prompt length: 32, 64, 128, … and max_prompt_length; `warm_up` compiles them
    ahead of time.
    """

    def __init__(self, inputs: SamplerInputs) -> None:
        """Raise InputError for stop strings and stop tokens that cannot be used."""
        if min(inputs.num_generations, inputs.prompts_per_call, inputs.max_prompt_length) < 1:
            raise ValueError(
                "num_generations, prompts_per_call and max_prompt_length must be positive; got "
                f"{inputs.num_generations}, {inputs.prompts_per_call} and {inputs.max_prompt_length}"
            )
        definition, options = inputs.policy, inputs.options
        prompt_length = bucket(inputs.max_prompt_length, inputs.max_prompt_length)
        room = plan_room(
            definition,
            inputs.mesh,
            allowed_sizes(definition, inputs.mesh, options.mesh.tensor),
            memory=inputs.memory,
            prompts=inputs.prompts_per_call,
            num_generations=inputs.num_generations,
            prompt_length=prompt_length,
            length=prompt_length + options.max_completion_length,
        )
        super().__init__(inputs, room)
        self.prompts_per_call = room.prompts
        self._routes = route_shape(definition) if inputs.routes else None

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
        count = len(prompts)
        groups = self.num_generations
        longest = self.options.max_completion_length
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        check_prompts(lengths, self.max_prompt_length)
        ids = np.arange(count * groups) if ids is None else np.asarray(ids)
        if ids.shape != (count * groups,):
            raise ValueError(
                f"ids must have one entry per completion, [{count * groups}]; its shape is {ids.shape}"
            )
        ids = ids.astype(np.uint32).reshape(count, groups)
        out: tuple[np.ndarray, ...] = (
            np.zeros((count, groups, longest), np.int32),
            np.zeros((count, groups), np.int32),
            np.zeros((count, groups, longest), np.float32),
            np.zeros((count, groups), np.bool_),
        )
        if self._routes is not None:
            out = (*out, np.full((count, groups, longest, *self._routes.shape), -1, self._routes.dtype))
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
        bad = np.argwhere(~np.isfinite(out[2]))
        if len(bad):
            written = {
                i: ("the distribution of a next token", np.concatenate([prompts[i], out[0][i, j, :t]]))
                for i, j, t in reversed(bad.tolist())
            }
            raise nonfinite_output_error(self.definition, params, "the policy", dict(sorted(written.items())))
        tokens, sizes, logps, finished, *routes = (
            whole.reshape(count * groups, *whole.shape[2:]) for whole in out
        )
        return Rollouts(tokens, sizes, logps, finished, routes=routes[0] if routes else None)

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
        tokens = np.zeros((rows, time), np.int32)
        none = np.zeros(rows, np.int32)
        ids = np.zeros(rows * self.num_generations, np.uint32)
        batch = abstract_rows(self.mesh, (tokens, none, none, ids))
        key_data, program = self._program(jax.random.key(0))
        return generate.lower(weights, *batch, key_data, self._abstract_stop_table, program=program)

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
            self._routes is not None,
        )
        return np.asarray(jax.random.key_data(key)), program

    def _batch(
        self, prompts: Sequence[np.ndarray], lengths: np.ndarray, ids: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Lay out the arguments of `generate`: prompts, lengths, last tokens and ids."""
        time = bucket(int(lengths.max()), self.max_prompt_length)
        count = self.prompts_per_call
        tokens = np.zeros((count, time), np.int32)
        last = np.zeros(count, np.int32)
        sizes = np.zeros(count, np.int32)
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
    """Return the padded length of a prompt: SHORTEST_BUCKET times a power of two, at most the padded `longest`.

    A prompt's last token is not prefilled.
    """
    size = SHORTEST_BUCKET
    while size < length - 1:
        size *= 2
    return min(size, -(-max(longest - 1, 1) // ALIGNED) * ALIGNED)


def keeps_caches(definition: Definition, mesh: Mesh) -> bool:
    """Return whether the caches of a model's conversations can stay on the devices of `mesh` from turn to turn."""
    return definition.has("extend") and (mesh.size == 1 or definition.tensor_parallel is not None)


class ConversationSampler(_PlacedModel):
    """Samples the turns of any number of conversations, of models that `keeps_caches`.

    The usual number of conversations of a call is prompts_per_call × num_generations; `room` says how many have a slot
    at a time.
    """

    def __init__(self, inputs: SamplerInputs, alternatives: int | None = None) -> None:
        """Raise InputError as `Sampler` does. alternatives: how many likeliest tokens `open` reports, if it is used."""
        assert inputs.conversation_length is not None
        definition, options = inputs.policy, inputs.options
        length = cache_length(inputs.max_prompt_length + inputs.conversation_length)
        if alternatives is not None:  # their contexts may come in packed rows
            length = -(-length // packed.PACKED) * packed.PACKED
        room = plan_conversations(
            definition,
            inputs.mesh,
            allowed_sizes(definition, inputs.mesh, options.mesh.tensor),
            memory=inputs.memory,
            conversations=inputs.prompts_per_call * inputs.num_generations,
            length=length,
        )
        super().__init__(inputs, room)
        self.conversation_length = inputs.conversation_length
        self.program = TurnsProgram(
            definition,
            options,
            self.mesh,
            self.stop_ids,
            room.slots,
            length,
            str(jax.random.key_impl(jax.random.key(0))),
            self.shares_layers,
            alternatives,
        )
        self._prepare = move_weights(definition, self.mesh, self.shares_layers)

    def open(self, weights: Weights, world: OpenWorld) -> Schedule:
        """Begin what never ends by itself: `Schedule.step` samples a little of the conversations of `world`, which have
        settings. weights: any that fit.
        """
        devices = Devices(self.program, weights, jax.random.key(0), None, self._ahead)
        return Schedule(devices, [], np.zeros(0, np.uint32), world)

    def place(self, params: Any) -> Weights:
        """Lay parameters out for `TurnSettings`."""
        self._ahead.wait("weights")
        return Weights(self._prepare(params))

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
        token of the first turn of conversation j is sampled with fold_in(fold_in(key, ids[j]), t), as in a
        completion; for turn k ≥ 1, fold_in(key, 2**31 + k) replaces the key.

        A turn ends as a completion does, or at its `Continuation.limit`, or where the conversation has
        conversation_length tokens after its prompt.

        Raises InputError for prompts that are empty or longer than max_prompt_length, and ValueError for a continuation
        after which no token fits.
        """
        check_prompts([len(prompt) for prompt in prompts], self.max_prompt_length)
        ids = np.arange(len(prompts)) if ids is None else np.asarray(ids)
        if ids.shape != (len(prompts),):
            raise ValueError(
                f"ids must have one entry per conversation, [{len(prompts)}]; its shape is {ids.shape}"
            )
        program = dataclasses.replace(self.program, key_type=str(jax.random.key_impl(key)))
        self._ahead.wait("weights")
        weights = Weights(self._prepare(params))
        devices = Devices(program, weights, key, self._stop_table_on_devices, self._ahead)
        longest = program.options.max_completion_length
        conversations = begin_conversations(prompts, self.conversation_length, longest)
        try:
            Schedule(devices, conversations, ids.astype(np.uint32), world).run()
        except NonFiniteTurnError as error:
            what = {error.conversation: ("the distribution of a next token", error.context)}
            raise nonfinite_output_error(program.definition, params, "the policy", what) from None

    def warm_up(self, params: Any, lengths: Sequence[int] | np.ndarray) -> None:
        """Start to compile the programs, which are the same for prompts of any `lengths`, for keys of jax.random.key's
        default implementation.

        Raises InputError as a call does.
        """
        check_prompts(lengths, self.max_prompt_length)
        self._ahead.compile("weights", self._prepare.lower(params))
        for name in self._names():
            self._ahead.compile(name, self.lower(name))

    def _names(self) -> list[Hashable]:
        """List the programs, as `lower` calls them."""
        program = self.program
        names: list[Hashable] = ["copy", "begin", ("decode", program.length)]
        if program.short is not None:
            names.append(("decode", program.short.length))
        if program.packs:
            names += ["place", "prefill"]
        if not program.packs or program.length > packed.PACKED:
            names += [("extend", chunk) for chunk in program.chunks]
        if program.alternatives is not None:
            names += [("read", chunk) for chunk in program.chunks]
        if program.penalised:
            names.append("note")
        return names

    def lower(self, name: Hashable) -> Any:
        """Lower a program from shapes: "begin", "copy", "note", "prefill", "place", ("extend", chunk), ("read", chunk),
        or ("decode", length of the caches).
        """
        program = self.program
        rows = partial(abstract_rows, self.mesh)
        weights = abstract_weights(program.definition, self.mesh, shared=program.shared_layers)

        def placed(spec: Any, tree: Any) -> Any:
            sharding = NamedSharding(self.mesh, spec)
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

        shapes = turns.begin.eval_shape(weights, program=program)
        cache, seen = placed(turns.CACHE, shapes[0]), placed(turns.ROWS, shapes[1])
        if name == "begin":
            return turns.begin.lower(weights, program=program)
        if name == "copy":
            return turns.copy.lower(cache, rows(turns.padded_copies(program)), program=program)
        if name == "note":
            fed = rows(turns.padded_fed(program, program.copies, program.length))
            return turns.note.lower(seen, fed, program=program)
        if name in ("prefill", "place"):
            contexts = rows(packed.padded_packed(program))
            if name == "prefill":
                return packed.prefill.lower(weights, contexts, program=program)
            read = placed(turns.CACHE, packed.prefill.eval_shape(weights, contexts, program=program))
            return packed.place.lower(cache, read, rows(packed.padded_pieces(program)), program=program)
        assert isinstance(name, tuple)
        if name[0] == "decode":
            if program.short is not None and name[1] == program.short.length:
                program, cache = program.short, turns.first_part(cache, program)
            slots = rows(turns.empty_slots(program))
            key = np.asarray(jax.random.key_data(jax.random.key(0, impl=program.key_type)))
            arguments = (weights, cache, seen, slots, key, self._abstract_stop_table, np.int32(0))
            return turns.decode.lower(*arguments, program=program)
        fed = rows(turns.padded_fed(program, program.rows(name[1]), name[1]))
        if name[0] == "read":
            return turns.read.lower(weights, cache, fed, fed.tokens, program=program)
        return turns.extend.lower(weights, cache, fed, program=program)


def stops_of(inputs: SamplerInputs) -> tuple[tuple[int, ...], np.ndarray | None]:
    """Return (all stop tokens, the table of the stop strings, None where there are none).

    Raises InputError for stop strings without a tokenizer or that it cannot write, and for stop tokens that the model
    does not have.
    """
    options, vocab_size = inputs.options, inputs.definition.vocab_size
    unknown = [i for i in options.stop_token_ids if i >= vocab_size]
    if unknown:
        raise InputError(
            f"sampling.stop_token_ids: no tokens of the model: {', '.join(map(str, unknown))}; its ids end at "
            f"{vocab_size - 1}"
        )
    ids = tuple(int(i) for i in (*inputs.stop_ids, *options.stop_token_ids))
    if not options.stop_strings:
        return ids, None
    if inputs.tokenizer is None:
        raise InputError(
            "sampling.stop_strings: there is no tokenizer to decode tokens; give one, or use "
            "sampling.stop_token_ids"
        )
    return ids, stop_table(options.stop_strings, inputs.tokenizer, vocab_size)


def check_prompts(lengths: Sequence[int] | np.ndarray, longest: int) -> None:
    """Raise InputError for prompts of no tokens, or of more than `longest`."""
    lengths = np.asarray(lengths, np.int32)
    problems = [f"prompt {i + 1} has no tokens" for i in np.flatnonzero(lengths == 0)]
    problems += [
        f"prompt {i + 1} has {lengths[i]} tokens, more than max_prompt_length={longest}; "
        "shorten it or raise max_prompt_length"
        for i in np.flatnonzero(lengths > longest)
    ]
    if problems:
        raise InputError(*problems)


def make_sampler(inputs: SamplerInputs) -> Any:
    """Make the sampler "jax" of the registry.

    For a model whose caches cannot stay on the devices from turn to turn, it is one without `converse`.
    """
    if inputs.conversation_length is None or not keeps_caches(inputs.definition, inputs.mesh):
        return Sampler(inputs)
    return ConversationSampler(inputs)
