"""The slots of conversations as the host sees them: what it feeds, copies and decodes, in calls of a fixed size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from rlhf_core.mesh import put_rows
from rlhf_core.runtime.background import BackgroundCompiler
from rlhf_core.sampling import turns
from rlhf_core.sampling.turns import Fed, Slots, TurnsProgram


class Devices:
    """The state of the slots on the devices, and the programs over it. Lists of slots have numbers of all shards."""

    def __init__(
        self,
        program: TurnsProgram,
        weights: Any,
        key: jax.Array,
        stop_table: jax.Array | None,
        compiling: BackgroundCompiler,
    ) -> None:
        self.program = program
        self._weights = weights
        self._key_data = np.asarray(jax.random.key_data(key))
        self._stop_table = stop_table
        self._compiling = compiling
        compiling.wait("begin")
        self._cache, self._seen = turns.begin(weights, program=program)

    def feed(self, pieces: Sequence[tuple[int, int, int, np.ndarray]]) -> None:
        """Feed slots: (slot, chunk, start, tokens int32 [n ≤ chunk]) each, different slots."""
        for chunk in sorted({piece[1] for piece in pieces}):
            self._compiling.wait(("extend", chunk))
            same = [(slot, start, tokens) for slot, size, start, tokens in pieces if size == chunk]
            for batch in self._batches(same, self.program.rows(chunk)):
                fed = put_rows(self.program.mesh, self._fed(batch, self.program.rows(chunk), chunk))
                self._cache = turns.extend(self._weights, self._cache, fed, program=self.program)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy caches: (slot, slot that it is copied from) each, of the same shard."""
        self._compiling.wait("copy")
        for batch in self._batches(pairs, self.program.copies):
            copies = turns.padded_copies(self.program)
            for row, pair in batch:
                copies.slot[row], copies.source[row] = (slot % self.program.slots for slot in pair)
                copies.used[row] = True
            rows = put_rows(self.program.mesh, copies)
            self._cache = turns.copy(self._cache, rows, program=self.program)

    def note(self, contexts: Sequence[tuple[int, np.ndarray]]) -> None:
        """Set what slots have seen, where a repetition penalty needs it: (slot, its whole context) each."""
        if self._seen is None:
            return
        self._compiling.wait("note")
        size = self.program.copies
        for batch in self._batches([(slot, 0, context) for slot, context in contexts], size):
            lengths = np.zeros(size * self.program.shards, np.int32)
            for row, (_, _, context) in batch:
                lengths[row] = len(context)
            rows = put_rows(self.program.mesh, (self._fed(batch, size, self.program.length), lengths))
            self._seen = turns.note(self._seen, *rows, program=self.program)

    def decode(self, slots: Slots, steps: int) -> turns.Decoded:
        """Decode the active slots by at most so many tokens."""
        self._compiling.wait("decode")
        rows = put_rows(self.program.mesh, slots)
        self._cache, self._seen, words = turns.decode(
            self._weights,
            self._cache,
            self._seen,
            rows,
            self._key_data,
            self._stop_table,
            np.int32(steps),
            program=self.program,
        )
        return turns.Decoded.of(jax.device_get(words))

    def _batches(self, items: Iterable[Any], rows: int) -> Iterator[list[tuple[int, Any]]]:
        """Yield (row, item) of the items of each call, `rows` of each shard; an item begins with its slot."""
        shards: list[deque[Any]] = [deque() for _ in range(self.program.shards)]
        for item in items:
            shards[item[0] // self.program.slots].append(item)
        while any(shards):
            yield [
                (number * rows + i, shard.popleft())
                for number, shard in enumerate(shards)
                for i in range(min(rows, len(shard)))
            ]

    def _fed(self, batch: list[tuple[int, Any]], rows: int, chunk: int) -> Fed:
        fed = turns.padded_fed(self.program, rows, chunk)
        for row, (slot, start, tokens) in batch:
            fed.slot[row], fed.used[row], fed.start[row] = slot % self.program.slots, True, start
            fed.tokens[row, : len(tokens)] = tokens
        return fed
