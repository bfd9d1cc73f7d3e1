"""Rows that are encoded while updates use them: of large files, and of streams, which are read again after a kill."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.batch_order import batch_rows
from rlhf_core.data.examples import Examples
from rlhf_core.data.table import Records, Table, View
from rlhf_core.errors import InputError, RunError, Stopped
from rlhf_core.packing.trees import Tree, Trees
from rlhf_core.runtime.signals import stop_requested
from rlhf_core.tokenizer.encoding import Encoder
from rlhf_core.workers.pickling import UnsendableError
from rlhf_core.workers.pool import Pool, at_stage_end

WHOLE = 16_384
"""Data of at most this many rows are encoded before the first update: what is dropped is then known."""
SAMPLE = 4096
"""Rows, the first in the order of training, that layouts and forecasts are made from where not all are encoded."""
BLOCK = 128
"""Rows that are encoded together."""

State: TypeAlias = dict[str, Any]
"""A position in the order of training, as JSON."""


class Block(NamedTuple):
    """Rows in the order of training, in memory, grouped by their table."""

    parts: list[Table]
    order: NDArray[np.int64]
    """int64 [rows]: the place in the block of each row of the parts."""

    @classmethod
    def of(cls, rows: Sequence[tuple[Table, int, Mapping[str, Any]]]) -> Block:
        """Make a block of (table, number of the row in it, row)."""
        places: dict[int, list[int]] = {}
        for place, (table, _, _) in enumerate(rows):
            places.setdefault(id(table), []).append(place)
        parts = [
            replace(
                rows[which[0]][0],
                rows=[rows[place][2] for place in which],
                numbers=[rows[place][1] for place in which],
                fingerprint="",  # not cached
                known_kinds=rows[which[0]][0].kinds,
            )
            for which in places.values()
        ]
        return cls(parts, np.concatenate([np.array(which, np.int64) for which in places.values()]))


class Example(NamedTuple):
    """A row that is trained on."""

    where: str
    """Its name, such as "pairs.jsonl row 17"."""
    tree: Tree
    row: Mapping[str, Any] = {}
    """Of a prompt: its row of the data."""


class Encoded(NamedTuple):
    """What happened to a block."""

    examples: list[Example]
    dropped: int
    """Rows with nothing to learn, or over the limit."""


@dataclass(frozen=True)
class BlockEncoder:
    """Encode blocks, in any process. encode: `encode_pairs` or the like with all options but the tokenizer."""

    encode: partial[Any]
    tokenizer: Any

    @cached_property
    def _encoder(self) -> Any:
        return (
            self.tokenizer
            if self.tokenizer is None
            else Encoder(self.tokenizer, self.encode.keywords["chat_template"])
        )

    def rows(self, records: Records) -> Any:
        return self.encode(records, self._encoder, part=True)

    def __call__(self, block: Block) -> Encoded:
        rows = self.rows(Records(block.parts))
        trees = rows if isinstance(rows, Examples) else rows.trees()
        by_place = sorted((int(block.order[row]), i) for i, row in enumerate(rows.rows))
        trained = isinstance(rows, Examples) and rows.branches > 0
        examples = [Example(rows.where(i), trees[i], {} if trained else rows.row(i)) for _, i in by_place]
        return Encoded(examples, len(block.order) - len(examples))


class BlockStream(Protocol):
    """Blocks in the order of training, without end. The state says which one is next."""

    def __next__(self) -> Block | Encoded: ...
    def get_state(self) -> State: ...
    def set_state(self, state: State) -> None: ...


class LazyRows:
    """Training data that are encoded while updates use them."""

    sample: Any
    """The first rows in the order of training, encoded: `Examples`, or of a stream also rows of episodes."""
    report: str
    """What is known of the rows: counts of all, and what became of the sample."""
    encoder: BlockEncoder

    def __len__(self) -> int:
        """Return the rows of an epoch; 0: unknown."""
        raise NotImplementedError

    def blocks(self) -> BlockStream:
        """Read the blocks from the first one."""
        raise NotImplementedError

    def where(self, i: int) -> str:
        """Name row `i` of the sample."""
        return self.sample.where(i)

    def trees(self) -> Trees:
        """Return the trees of the sample."""
        return self.sample

    def summary(self, dropped: int) -> str | None:
        """Say what became of the rows, after the last update; None: all were used. dropped: of those that were met."""
        return f"{dropped:,} rows were passed over: nothing to learn, or too long" if dropped else None


class LazyRecords(LazyRows):
    """The rows of files too large to encode before the first update.

    What needs no tokenizer is checked of all rows; those with nothing to learn are left out before they are ordered.
    In a thread all rows are encoded too, and written to the token cache, which later updates read.
    """

    def __init__(
        self,
        records: Records,
        usable: Callable[[Table], NDArray[np.bool_]],
        encode: partial[Examples],
        tokenizer: Any,
        *,
        seed: int,
        shuffle: bool,
    ) -> None:
        """usable: as `usable_pairs`. Raises InputError naming file and row of the first few problems of all rows."""
        self.records, self._seed, self._shuffle = records, seed, shuffle
        marks = [usable(part) for table in records.tables for part in table.parts()]
        self.used = np.flatnonzero(np.concatenate(marks))
        """int64 [rows]: indices of the rows that are ordered."""
        if not len(self.used):
            raise InputError(f"{records.name}: no row has something to learn")
        first = next(batch_rows(len(self), min(SAMPLE, len(self)), seed=seed, shuffle=shuffle))
        self.sample = encode(Records(self.block(first).parts), tokenizer)
        self.report = f"{len(records):,} rows, {len(self):,} of them with something to learn"
        self.report += f"; of the first {len(first):,} in the order of training: {self.sample.report}"
        self.encoder = BlockEncoder(encode, tokenizer)
        self._whole: Examples | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def __len__(self) -> int:
        return len(self.used)

    def block(self, which: NDArray[np.int64]) -> Block:
        """Read rows. which: int64 [n], indices into `used`."""
        rows = []
        for i in self.used[which].tolist():
            table, k = self.records.find(i)
            rows.append((table, int(table.numbers[k]), table.rows[k]))
        return Block.of(rows)

    def blocks(self) -> _OrderedBlocks:
        return _OrderedBlocks(self)

    def order(self, start: int) -> Iterator[NDArray[np.int64]]:
        """Yield the rows of block `start` and the ones after it."""
        return batch_rows(len(self), BLOCK, seed=self._seed, shuffle=self._shuffle, start=start)

    def known(self, which: NDArray[np.int64]) -> Encoded | None:
        """Return what `block` would be encoded as, where all rows are."""
        if self._whole is None:
            return None
        which = self.used[which]
        at = np.minimum(np.searchsorted(self._whole.rows, which), max(len(self._whole) - 1, 0))
        found = at[self._whole.rows[at] == which].tolist() if len(self._whole) else []
        whole = self._whole
        return Encoded([Example(whole.where(i), whole[i]) for i in found], len(which) - len(found))

    def summary(self, dropped: int) -> str | None:
        if self._whole is None or not dropped:
            return super().summary(dropped)
        return "; ".join(self._whole.report.lines())

    def cache(self) -> None:
        """Start to encode all rows for the token cache."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._encode_all, daemon=True, name="token cache")
            self._thread.start()
            at_stage_end(self._end)

    def _encode_all(self) -> None:
        def rows_of(rows: Sequence[Any], which: Sequence[int]) -> list[Any]:
            if self._stop.is_set():
                raise Stopped("the stage has ended")
            return View.of(rows).take(which)

        tables = [
            replace(table, rows=View(len(table.rows), partial(rows_of, table.rows)), known_kinds=table.kinds)
            for table in self.records.tables
        ]
        with suppress(Exception):  # the update that reads the row raises the error
            self._whole = own_copy(self.encoder).rows(Records(tables))

    def wait(self) -> None:
        """Wait until all rows are in the token cache, if they are being encoded and the run is not asked to stop."""
        while self._thread is not None and self._thread.is_alive() and not stop_requested():
            self._thread.join(0.5)

    def _end(self) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()


class _OrderedBlocks:
    def __init__(self, rows: LazyRecords) -> None:
        self._rows, self.number = rows, 0
        self._order = rows.order(0)

    def __next__(self) -> Block | Encoded:
        if self.number * BLOCK >= len(self._rows):
            self._rows.wait()
        self.number += 1
        which = next(self._order)
        return self._rows.known(which) or self._rows.block(which)

    def get_state(self) -> State:
        return {"block": self.number}

    def set_state(self, state: State) -> None:
        self.number = state["block"]
        self._order = self._rows.order(self.number)


def own_copy(encoder: BlockEncoder) -> BlockEncoder:
    """Copy the encoder for another thread: a tokenizer may not be used by two."""
    return replace(encoder, tokenizer=copy.deepcopy(encoder.tokenizer))


class Encoding:
    """Encode blocks in a thread, or in `workers` processes, which run until the stage ends."""

    def __init__(self, encoder: BlockEncoder, workers: int) -> None:
        self.ahead = 2 * max(workers, 1)
        """Blocks to encode ahead of their use."""
        if not workers:
            thread = ThreadPoolExecutor(1, thread_name_prefix="encoding")
            at_stage_end(partial(thread.shutdown, cancel_futures=True))
            copied = own_copy(encoder)
            self.submit: Callable[[Block], Future[Encoded]] = lambda block: thread.submit(copied, block)
            return
        try:
            self.submit = Pool(encoder, workers).submit
        except UnsendableError as error:
            raise InputError(
                f"dataloader_num_workers: the tokenizer cannot be sent to another process: {error}"
            ) from error


class ExampleReader:
    """Examples one after another, from a position; they and their order depend on the data and the position alone."""

    def __init__(self, rows: LazyRows, encoding: Encoding, state: State | None = None) -> None:
        self._blocks, self._encoding = rows.blocks(), encoding
        self._queue: deque[tuple[State, Future[Encoded]]] = deque()
        self._examples: list[Example] = []
        self._block, self._used, self._dropped, self._newly = self._blocks.get_state(), 0, 0, 0
        if state is not None:
            self._blocks.set_state(state["at"])
            self._dropped = state["dropped"]
            self._next_block()
            self._used = state["used"]

    @property
    def state(self) -> State:
        """The position of the next example, from which a later `ExampleReader` continues."""
        return {"at": self._block, "used": self._used, "dropped": self._dropped}

    @property
    def dropped(self) -> int:
        """Rows that were met and dropped."""
        return self._dropped + self._newly

    def __next__(self) -> Example:
        while self._used == len(self._examples):
            self._next_block()
        self._used += 1
        return self._examples[self._used - 1]

    def _next_block(self) -> None:
        while len(self._queue) < self._encoding.ahead:
            self._queue.append((copy.deepcopy(self._blocks.get_state()), self._read()))
        self._dropped += self._newly
        self._block, future = self._queue.popleft()
        self._examples, self._newly = future.result()
        self._used = 0

    def _read(self) -> Future[Encoded]:
        """Start to encode the next block; what is wrong with its rows is raised when they are used."""
        future = Future[Encoded]()
        try:
            block = next(self._blocks)
            if isinstance(block, Block):
                return self._encoding.submit(block)
            future.set_result(block)
        except (InputError, RunError) as error:
            future.set_exception(error)
        return future
