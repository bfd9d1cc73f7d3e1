"""Sample the turns of conversations on the devices of a sampler, whose caches stay from turn to turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from rlhf_core.contracts import (
    SamplerInputs,
    World,
)
from rlhf_core.mesh import abstract_rows
from rlhf_core.models import Definition
from rlhf_core.models.finite import nonfinite_error
from rlhf_core.runtime.background import BackgroundCompiler
from rlhf_core.sampling import turns
from rlhf_core.sampling.conversations import NonFiniteTurnError, Schedule, begin_conversations
from rlhf_core.sampling.options import check_prompts, stops_of
from rlhf_core.sampling.placement import (
    abstract_weights,
    allowed_sizes,
    move_weights,
    plan_conversations,
    replicated,
    sampling_mesh,
)
from rlhf_core.sampling.slot_devices import Devices
from rlhf_core.sampling.turns import TurnsProgram, cache_length

if TYPE_CHECKING:
    from jax.sharding import Mesh


def keeps_caches(definition: Definition, mesh: Mesh) -> bool:
    """Return whether the caches of a model's conversations can stay on the devices of `mesh` from turn to turn."""
    return definition.has("extend") and (mesh.size == 1 or definition.tensor_parallel is not None)


class ConversationSampler:
    """Samples the turns of any number of conversations, of models that `keeps_caches`.

    The usual number of conversations of a call is prompts_per_call × num_generations; `conversation_room` says how many
    have a slot at a time. Raises InputError as `Sampler` does.
    """

    def __init__(self, inputs: SamplerInputs) -> None:
        assert inputs.conversation_length is not None
        self.max_prompt_length, self.conversation_length = (
            inputs.max_prompt_length,
            inputs.conversation_length,
        )
        self.num_generations = inputs.num_generations
        definition, options = inputs.policy, inputs.options
        length = cache_length(self.max_prompt_length + self.conversation_length)
        self.conversation_room = plan_conversations(
            definition,
            inputs.mesh,
            allowed_sizes(definition, inputs.mesh, options.mesh.tensor),
            memory=inputs.memory,
            conversations=inputs.prompts_per_call * inputs.num_generations,
            length=length,
        )
        shared = sampling_mesh(definition, inputs.mesh, self.conversation_room.tensor)
        stop_ids, self._stop_table = stops_of(inputs)
        self.program = TurnsProgram(
            definition,
            options,
            inputs.mesh if shared is None else shared,
            stop_ids,
            self.conversation_room.slots,
            length,
            str(jax.random.key_impl(jax.random.key(0))),
            shared is not None,
        )
        self._ahead = BackgroundCompiler()
        self._prepare = move_weights(definition, self.program.mesh, self.program.shared_layers)

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

        Raises InputError for prompts that are empty or longer than max_prompt_length, and ValueError for a continuation
        after which no token fits.
        """
        check_prompts([len(prompt) for prompt in prompts], self.max_prompt_length)
        ids = np.arange(len(prompts)) if ids is None else np.asarray(ids)
        if ids.shape != (len(prompts),):
            raise ValueError(
                f"ids must have one entry per conversation, [{len(prompts)}]; its shape is {ids.shape}"
            )
        program = self._program(key)
        self._ahead.wait("weights")
        table = None if self._stop_table is None else replicated(program.mesh, self._stop_table)
        devices = Devices(program, self._prepare(params), key, table, self._ahead)
        longest = program.options.max_completion_length
        conversations = begin_conversations(prompts, self.conversation_length, longest)
        try:
            Schedule(devices, conversations, ids.astype(np.uint32), world).run()
        except NonFiniteTurnError as error:
            what = {error.conversation: ("the distribution of a next token", error.context)}
            raise nonfinite_error(program.definition, params, "the policy", what) from None

    def warm_up(self, params: Any, lengths: Sequence[int] | np.ndarray) -> None:
        """Start to compile the programs, which are the same for prompts of any `lengths`, for keys of jax.random.key's
        default implementation.

        Raises InputError as a call does.
        """
        check_prompts(lengths, self.max_prompt_length)
        self._ahead.compile("weights", self._prepare.lower(params))
        lower = self.lowered()
        self._ahead.compile("decode", lower.decode())
        for chunk in self.program.chunks:
            self._ahead.compile(("extend", chunk), lower.extend(chunk))
        self._ahead.compile("begin", lower.begin())
        self._ahead.compile("copy", lower.copy())
        if lower.seen is not None:
            self._ahead.compile("note", lower.note())

    def lowered(self) -> Lowered:
        """Return what lowers the programs, for keys of jax.random.key's default implementation."""
        return Lowered(self._program(jax.random.key(0)), self._stop_table)

    def _program(self, key: jax.Array) -> TurnsProgram:
        return dataclasses.replace(self.program, key_type=str(jax.random.key_impl(key)))


class Lowered:
    """The programs, lowered from shapes alone. seen: as of `turns.begin`."""

    def __init__(self, program: TurnsProgram, stop_table: np.ndarray | None) -> None:
        self._program = program
        self._weights = abstract_weights(program.definition, program.mesh, shared=program.shared_layers)
        shapes = turns.begin.eval_shape(self._weights, program=program)
        self._cache, self.seen = (
            jax.tree.map(partial(self._placed, spec), tree)
            for spec, tree in zip((turns.CACHE, turns.ROWS), shapes, strict=True)
        )
        self._table = None if stop_table is None else self._placed(turns.WHOLE, stop_table)

    def begin(self) -> Any:
        return turns.begin.lower(self._weights, program=self._program)

    def extend(self, chunk: int) -> Any:
        fed = self._rows(turns.padded_fed(self._program, self._program.rows(chunk), chunk))
        return turns.extend.lower(self._weights, self._cache, fed, program=self._program)

    def copy(self) -> Any:
        copies = self._rows(turns.padded_copies(self._program))
        return turns.copy.lower(self._cache, copies, program=self._program)

    def note(self) -> Any:
        fed = self._rows(turns.padded_fed(self._program, self._program.copies, self._program.length))
        return turns.note.lower(self.seen, fed, fed.start, program=self._program)

    def decode(self) -> Any:
        program = self._program
        slots = self._rows(turns.empty_slots(program.slots * program.shards))
        key = np.asarray(jax.random.key_data(jax.random.key(0, impl=program.key_type)))
        arguments = (self._weights, self._cache, self.seen, slots, key, self._table, np.int32(0))
        return turns.decode.lower(*arguments, program=program)

    def _rows(self, batch: Any) -> Any:
        return abstract_rows(self._program.mesh, batch)

    def _placed(self, spec: Any, x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self._program.mesh, spec))
