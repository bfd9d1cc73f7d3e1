"""Sample the turns of conversations on the devices of a sampler, whose caches stay from turn to turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from rlhf_core.contracts import PARAMETERS, Program, ProgramShape, World
from rlhf_core.mesh import abstract_rows
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
        lower = _Lowered(self._program(jax.random.key(0)), self._stop_table)
        self._compiling.compile("decode", lower.decode())
        for chunk in self.program.chunks:
            self._compiling.compile(("extend", chunk), lower.extend(chunk))
        self._compiling.compile("begin", lower.begin())
        self._compiling.compile("copy", lower.copy())
        if lower.seen is not None:
            self._compiling.compile("note", lower.note())

    def programs(self, params: Any, conversations: int) -> list[Program]:
        """Describe the programs of so many conversations of full length, in which the policy writes everything."""
        program, room = self.program, self.room
        model, lower = program.definition, _Lowered(program, self._stop_table)
        rows = program.slots * program.shards
        described = []
        if program.shared_layers:
            size = weight_bytes(model, program.mesh, room.tensor)
            shape = ProgramShape(model, 0, 0, room.tensor, size)
            bringing = partial(self._prepare.lower, params)
            described.append(Program("bring the weights", bringing, "sample", reads=PARAMETERS, shape=shape))
        chunk = program.chunks[-1]
        fed = program.rows(chunk) * program.shards
        pieces = -(-self.max_prompt_length // chunk)
        shape = ProgramShape(model, fed, chunk, room.tensor, room.bytes)
        described.append(
            Program(
                f"extend {fed} × {chunk}",
                partial(lower.extend, chunk),
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
                lower.decode,
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


class _Lowered:
    """The programs, lowered from shapes alone. seen: as of `turns.begin`."""

    def __init__(self, program: TurnsProgram, stop_table: np.ndarray | None) -> None:
        self._program = program
        describe = abstract_weights if program.shared_layers else abstract_prepared
        self._weights = describe(program.definition, program.mesh)
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
