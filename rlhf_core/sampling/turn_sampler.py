"""Sample the turns of conversations on the devices of a sampler, whose caches stay from turn to turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from rlhf_core.contracts import PARAMETERS, Program, ProgramShape, World
from rlhf_core.mesh import abstract_rows, replicated_sharding
from rlhf_core.runtime.background import BackgroundCompiler
from rlhf_core.sampling import turns
from rlhf_core.sampling.conversations import Holder, begin_conversations
from rlhf_core.sampling.layout import (
    Room,
    abstract_prepared,
    abstract_weights,
    bring,
    prepare,
    replicated,
    weight_bytes,
)
from rlhf_core.sampling.slot_devices import Devices
from rlhf_core.sampling.turns import TurnsProgram


class TurnSampler:
    """Samples the turns of any number of conversations.

    program: its `key_type` is replaced by that of a call's key. max_prompt_length, conversation_length: tokens of the
    longest prompt, and of what follows it. room: what `program.slots` was made of.
    """

    def __init__(
        self,
        program: TurnsProgram,
        room: Room,
        *,
        max_prompt_length: int,
        conversation_length: int,
        stop_table: np.ndarray | None,
        compiling: BackgroundCompiler,
    ) -> None:
        self.program, self.room = program, room
        self.max_prompt_length, self.conversation_length = max_prompt_length, conversation_length
        self._stop_table, self._compiling = stop_table, compiling
        layout = bring if program.shared_layers else prepare
        self._prepare = layout(program.definition, program.mesh)

    def converse(
        self, params: Any, prompts: Sequence[np.ndarray], key: jax.Array, ids: np.ndarray, world: World
    ) -> None:
        """Do what `Sampler.converse` does."""
        program = self._program(key)
        self._compiling.wait("weights")
        table = None if self._stop_table is None else replicated(program.mesh, self._stop_table)
        devices = Devices(program, self._prepare(params), key, table, self._compiling)
        longest = program.options.max_completion_length
        Holder(devices, begin_conversations(prompts, self.conversation_length, longest), ids, world).hold()

    def warm_up(self, params: Any) -> None:
        """Start to compile the programs, for keys of jax.random.key's default implementation."""
        self._compiling.compile("weights", self._prepare.lower(params))
        weights = self._abstract_weights()
        self._compiling.compile("decode", self._lower_decode(weights))
        for chunk in self.program.chunks:
            self._compiling.compile(("extend", chunk), self._lower_extend(weights, chunk))

    def programs(self, params: Any, conversations: int) -> list[Program]:
        """Describe the programs of so many conversations of full length, in which the policy writes everything."""
        program, room = self.program, self.room
        model, weights = program.definition, self._abstract_weights()
        rows = program.slots * program.shards
        described = []
        if program.shared_layers:
            size = weight_bytes(model, program.mesh, room.tensor)
            shape = ProgramShape(model, 0, 0, room.tensor, size)
            lower = partial(self._prepare.lower, params)
            described.append(Program("bring the weights", lower, "sample", reads=PARAMETERS, shape=shape))
        chunk = program.chunks[-1]
        fed = program.rows(chunk) * program.shards
        pieces = -(-self.max_prompt_length // chunk)
        shape = ProgramShape(model, fed, chunk, room.tensor, room.bytes)
        described.append(
            Program(
                f"extend {fed} × {chunk}",
                partial(self._lower_extend, weights, chunk),
                "read",
                calls=-(-conversations // fed) * pieces,
                tokens=min(fed * chunk, conversations * self.max_prompt_length),
                shape=shape,
            )
        )
        steps = -(-conversations // rows) * self.conversation_length
        shape = ProgramShape(model, rows, program.length, room.tensor, room.bytes)
        described.append(
            Program(
                f"decode {rows} conversations, {self.max_prompt_length} + {self.conversation_length} tokens",
                partial(self._lower_decode, weights),
                "sample",
                calls=-(-steps // turns.STEPS),
                tokens=conversations * self.conversation_length / -(-steps // turns.STEPS),
                steps=turns.STEPS,
                shape=shape,
            )
        )
        return described

    def _program(self, key: jax.Array) -> TurnsProgram:
        return dataclasses.replace(self.program, key_type=str(jax.random.key_impl(key)))

    def _abstract_weights(self) -> Any:
        describe = abstract_weights if self.program.shared_layers else abstract_prepared
        return describe(self.program.definition, self.program.mesh)

    def _lower_extend(self, weights: Any, chunk: int) -> Any:
        program = self._program(jax.random.key(0))
        cache, _ = self._abstract_state(weights, program)
        count = program.rows(chunk) * program.shards
        numbers = np.zeros(count, np.int32)
        fed = turns.Fed(numbers, np.zeros(count, np.bool_), np.zeros((count, chunk), np.int32), numbers)
        return turns.extend.lower(weights, cache, abstract_rows(program.mesh, fed), program=program)

    def _lower_decode(self, weights: Any) -> Any:
        key = jax.random.key(0)
        program = self._program(key)
        cache, seen = self._abstract_state(weights, program)
        slots = abstract_rows(program.mesh, turns.empty_slots(program.slots * program.shards))
        table = self._stop_table
        shape = None
        if table is not None:
            shape = jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=replicated_sharding(program.mesh))
        key_data = np.asarray(jax.random.key_data(key))
        return turns.decode.lower(weights, cache, seen, slots, key_data, shape, np.int32(0), program=program)

    def _abstract_state(self, weights: Any, program: TurnsProgram) -> Any:
        return turns.begin.eval_shape(weights, program=program)
