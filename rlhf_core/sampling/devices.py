"""The slots of conversations on the devices, and the compiled programs over them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

import rlhf_core.sampling.packed as packed
import rlhf_core.sampling.turns as turns
from rlhf_core.contracts import Weights
from rlhf_core.mesh import put_rows
from rlhf_core.runtime.background import BackgroundCompiler
from rlhf_core.runtime.machine import platform
from rlhf_core.sampling.packed import PackedContexts, Prefilled, padded_pieces, prefill_all
from rlhf_core.sampling.turns import Decoded, Fed, Slots, TurnsProgram, padded_copies, padded_fed


class Devices:
    """The state of the slots on the devices, and the programs over it. Lists of slots have numbers of all shards."""

    def __init__(
        self,
        program: TurnsProgram,
        weights: Weights,
        key: jax.Array,
        stop_table: jax.Array | None,
        compiling: BackgroundCompiler,
    ) -> None:
        self.program = program
        self._weights = weights
        self._key_data = np.asarray(jax.random.key_data(key))
        self._stop_table = stop_table
        self._compiling = compiling
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="prefill")
        self._compiling.wait("begin")
        self._cache, self._seen = turns.begin(weights.value, program=self.program)

    def prefill(self, contexts: Sequence[tuple[int, np.ndarray]], own: Weights | None = None) -> None:
        """Feed slots from their start: (slot, tokens int32 [n], which fit a row of `packed.PACKED`) each.

        own: as for `feed`.
        """
        shards: list[list[int]] = [[] for _ in range(self.program.shards)]
        for i, (slot, _) in enumerate(contexts):
            shards[slot // self.program.slots].append(i)

        def run(rows: PackedContexts) -> Future[Any]:
            done: Future[Any] = Future()
            done.set_result(self._prefill(rows, own))
            return done

        found = prefill_all(self.program, [[contexts[i][1] for i in shard] for shard in shards], run)
        numbers = [i for shard in shards for i in shard]
        each = [prefilled for shard in found for prefilled in shard]
        self.place([(contexts[i][0], prefilled) for i, prefilled in zip(numbers, each, strict=True)])

    @property
    def looks_ahead(self) -> bool:
        """Whether contexts without a slot are worth prefilling: where that runs while others decode."""
        return self.program.packs and self.program.shards == 1 and platform() == "cpu"

    def prefill_ahead(self, contexts: Sequence[np.ndarray], own: Weights | None = None) -> list[Prefilled]:
        """Begin to compute what `place` writes, in a thread: programs of one thread run one after the other."""

        def run(rows: PackedContexts) -> Future[Any]:
            return self._ahead.submit(self._prefill, rows, own)

        return prefill_all(self.program, [contexts], run)[0]

    def _prefill(self, rows: PackedContexts, own: Weights | None) -> Any:
        self._compiling.wait("prefill")
        weights = (own or self._weights).value
        return packed.prefill(weights, put_rows(self.program.mesh, rows), program=self.program)

    def place(self, contexts: Sequence[tuple[int, Prefilled]]) -> None:
        """Write contexts into the caches of their slots."""
        for cache in {id(prefilled.cache): prefilled.cache for _, prefilled in contexts}.values():
            pieces = padded_pieces(self.program)
            used = [0] * self.program.shards
            for slot, prefilled in contexts:
                if prefilled.cache is cache:
                    shard, slot = divmod(slot, self.program.slots)
                    number = shard * (len(pieces.slot) // self.program.shards) + used[shard]
                    pieces.slot[number], pieces.used[number] = slot, True
                    pieces.row[number], pieces.start[number] = prefilled.row, prefilled.start
                    used[shard] += 1
            self._compiling.wait("place")
            rows = put_rows(self.program.mesh, pieces)
            self._cache = packed.place(self._cache, cache.result(), rows, program=self.program)

    def feed(self, pieces: Sequence[tuple[int, int, int, np.ndarray]], own: Weights | None = None) -> None:
        """Feed slots: (slot, chunk, start, tokens int32 [n ≤ chunk]) each, different slots.

        own: weights to use in place of the usual ones.
        """
        weights = (own or self._weights).value
        for chunk in sorted({piece[1] for piece in pieces}):
            self._compiling.wait(("extend", chunk))
            same = [(slot, start, tokens) for slot, size, start, tokens in pieces if size == chunk]
            for batch in self._batches(same, self.program.rows(chunk)):
                fed = put_rows(self.program.mesh, self._fed(batch, self.program.rows(chunk), chunk))
                self._cache = turns.extend(weights, self._cache, fed, program=self.program)

    def read(
        self, pieces: Sequence[tuple[int, int, int, np.ndarray, np.ndarray]], own: Weights
    ) -> list[tuple[np.ndarray, ...]]:
        """Feed slots, and judge the tokens that follow those of a piece, its last item: what `TokenSampler.judge`
        returns, of each piece.
        """
        judged: dict[int, tuple[np.ndarray, ...]] = {}
        for chunk in sorted({piece[1] for piece in pieces}):
            self._compiling.wait(("read", chunk))
            rows = self.program.rows(chunk)
            same = [(slot, start, tokens) for slot, size, start, tokens, _ in pieces if size == chunk]
            follow = {slot: targets for slot, size, _, _, targets in pieces if size == chunk}
            for batch in self._batches(same, rows):
                targets = np.zeros((rows * self.program.shards, chunk), np.int32)
                for row, (slot, _, tokens) in batch:
                    targets[row, : len(tokens)] = follow[slot]
                fed = put_rows(self.program.mesh, (self._fed(batch, rows, chunk), targets))
                self._cache, result = turns.read(own.value, self._cache, *fed, program=self.program)
                found = jax.device_get(result)
                for row, (slot, _, tokens) in batch:
                    judged[slot] = tuple(each[row, : len(tokens)] for each in found)
        return [judged[piece[0]] for piece in pieces]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy caches: (slot, slot that it is copied from) each, of the same shard."""
        self._compiling.wait("copy")
        for batch in self._batches(pairs, self.program.copies):
            copies = padded_copies(self.program)
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
            fed = put_rows(self.program.mesh, self._fed(batch, size, self.program.length))
            self._seen = turns.note(self._seen, fed, program=self.program)

    def decode(self, slots: Slots, steps: int, own: Weights | None = None) -> Decoded:
        """Decode the active slots by at most so many tokens. own: as for `feed`."""
        program, cache = self.program, self._cache
        ends = (slots.position + np.minimum(slots.limit - slots.drawn, steps))[slots.active]
        if program.short is not None and ends.max(initial=0) <= program.short.length:
            program, cache = program.short, turns.first_part(cache, program)
        self._compiling.wait(("decode", program.length))
        rows = put_rows(program.mesh, slots)
        cache, self._seen, words = turns.decode(
            (own or self._weights).value,
            cache,
            self._seen,
            rows,
            self._key_data,
            self._stop_table,
            np.int32(steps),
            program=program,
        )
        self._cache = cache if program is self.program else turns.with_first_part(self._cache, cache, program)
        return Decoded.of(jax.device_get(words))

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
        fed = padded_fed(self.program, rows, chunk)
        for row, (slot, start, tokens) in batch:
            fed.slot[row] = slot % self.program.slots
            fed.used[row] = True
            fed.start[row] = start
            fed.tokens[row, : len(tokens)], fed.count[row] = tokens, len(tokens)
        return fed
