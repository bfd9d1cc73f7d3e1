"""Examples in the order of training: of data that are encoded already, of large files, and of streams."""

from __future__ import annotations

import copy
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.batch_order import rows_at, visited_rows
from rlhf_core.data.examples import Examples
from rlhf_core.data.report import Report
from rlhf_core.data.table import Records, Table, View
from rlhf_core.errors import InputError, RunError, Stopped, counted
from rlhf_core.packing.trees import Tree, Trees, lengths_of, sizes_of
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


class Example(NamedTuple):
    """A row that is trained on."""

    tree: Tree
    where: str
    """Its name, such as "pairs.jsonl row 17"."""
    row: int
    """Its number among all rows of the data, from 0."""
    columns: Mapping[str, Any] = {}
    """Of a prompt: its row of the data."""


class Dropped(NamedTuple):
    """A row that is not trained on."""

    where: str
    why: str


Outcome: TypeAlias = Example | Dropped
"""What becomes of a row."""
REASONS = {
    "empty": "nothing to learn",
    "identical": "both completions are the same",
    "filtered": "too long",
    "alike_once_cut": "both completions are the same once cut",
}
"""{list of a report: why its rows are dropped}."""


def dropped_rows(report: Report) -> dict[str, str]:
    """Return why rows were dropped, by their names."""
    return {place: why for name, why in REASONS.items() for place in getattr(report, name)}


class NumberedRow(NamedTuple):
    """A row as it is read."""

    table: Table
    number: int
    """Of the row in the table, from 1."""
    values: Mapping[str, Any]
    row: int
    """As of `Example`."""


class Block(NamedTuple):
    """Rows in the order of training, in memory, grouped by their table."""

    parts: list[Table]
    order: NDArray[np.int64]
    """int64 [rows]: the place in the block of each row of the parts."""
    rows: list[int]
    """By place: `Example.row`."""

    @classmethod
    def of(cls, rows: Sequence[NumberedRow]) -> Block:
        places: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(id(row.table), []).append(place)
        parts = [
            replace(
                rows[which[0]].table,
                rows=[rows[place].values for place in which],
                numbers=[rows[place].number for place in which],
                fingerprint="",  # not cached
                known_kinds=rows[which[0]].table.kinds,
            )
            for which in places.values()
        ]
        order = np.concatenate([np.array(which, np.int64) for which in places.values()])
        return cls(parts, order, [row.row for row in rows])


class Taken(NamedTuple):
    """The next rows of an order: a block to encode, or what became of rows that are encoded already."""

    after: list[State]
    """The position after each row."""
    block: Block | None
    outcomes: Sequence[Outcome] = ()


class RowOrder(Protocol):
    """Rows in the order of training, without end."""

    def __len__(self) -> int:
        """Return the rows of an epoch; 0: unknown."""
        ...

    def take(self, count: int) -> Taken:
        """Read the next rows."""
        ...

    def seek(self, state: State) -> None:
        """Go to a position; {} is the start."""
        ...

    def where(self, row: int) -> str:
        """Name a row by its `Example.row`."""
        ...


@dataclass(frozen=True)
class BlockEncoder:
    """Encode blocks, in any process. encode: `encode_pairs` or the like with all options but the tokenizer."""

    encode: partial[Any]
    tokenizer: Any

    @cached_property
    def _encoder(self) -> Any:
        if self.tokenizer is None:
            return None
        return Encoder(self.tokenizer, self.encode.keywords["chat_template"])

    def encoded(self, records: Records) -> Any:
        """Encode rows of a larger whole."""
        return self.encode(records, self._encoder, part=True)

    def __call__(self, block: Block) -> list[Outcome]:
        records = Records(block.parts)
        return outcomes(block, records, self.encoded(records))

    def copy(self) -> BlockEncoder:
        """Copy the encoder for another thread: a tokenizer may not be used by two."""
        return replace(self, tokenizer=copy.deepcopy(self.tokenizer))


def outcomes(block: Block, records: Records, encoded: Any) -> list[Outcome]:
    """Say what became of each row of a block, by place. records: of its parts. encoded: those that are used."""
    why = dropped_rows(encoded.report)
    # Rows themselves are kept of prompts alone.
    trained = isinstance(encoded, Examples) and encoded.branches > 0
    trees = trees_of(encoded)
    used = {int(row): i for i, row in enumerate(encoded.rows)}
    found: list[Any] = [None] * len(block.order)
    for k, place in enumerate(block.order.tolist()):
        where = records.where(k)
        i = used.get(k)
        if i is None:
            found[place] = Dropped(where, why.get(where, REASONS["empty"]))
        else:
            found[place] = Example(trees[i], where, block.rows[place], {} if trained else encoded.row(i))
    return found


def trees_of(rows: Any) -> Any:
    """Return the trees of encoded rows, one each: `Examples` are their own, rows of episodes have no tokens yet."""
    return rows if isinstance(rows, Trees) else rows.trees()


class FileRows:
    """Rows that are read in any order: of files, and of data in memory; every epoch is another permutation.

    Those that are encoded already are looked up. The order is grain's, `MapDataset.source(…).seed(…).shuffle().
    repeat(None)`, with the permutations of few rows made once, see `batch_order`.
    """

    def __init__(
        self,
        used: NDArray[np.int64],
        *,
        seed: int,
        shuffle: bool,
        records: Records | None = None,
        encoded: Any = None,
        trees: Sequence[Tree] | None = None,
    ) -> None:
        """used: numbers of the rows that are ordered, ascending. encoded: all of them; None: none yet, or `cache`'s.

        trees: of the encoded rows; None: their own.
        """
        self.used, self.records, self.seed, self.shuffle = used, records, seed, shuffle
        self.position = 0
        self.complete = encoded is not None
        """Whether all rows were encoded before the first was taken."""
        self._whole: Any = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        if encoded is not None:
            self._know(encoded, trees_of(encoded) if trees is None else trees)

    def __len__(self) -> int:
        return len(self.used)

    def where(self, row: int) -> str:
        if self.records is not None:
            return self.records.where(row)
        return str(self._whole.where(row))

    def seek(self, state: State) -> None:
        # A position of earlier versions counts blocks.
        self.position = state.get("row", BLOCK * state.get("block", 0))

    def take(self, count: int) -> Taken:
        if not self.complete and self.position >= len(self):
            self.wait()
        which = self.at(self.position, count)
        after = [{"row": self.position + n} for n in range(1, count + 1)]
        self.position += count
        if self._whole is None:
            return Taken(after, self.block(which))
        return Taken(after, None, self.known(which))

    def at(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the rows at `count` positions from `first` on, int64 [count]."""
        which = rows_at(len(self), first, first + count, seed=self.seed, shuffle=self.shuffle)
        return self.used[which]

    def block(self, rows: NDArray[np.int64]) -> Block:
        """Read rows by their numbers."""
        assert self.records is not None
        found = []
        for row in rows.tolist():
            table, k = self.records.find(row)
            found.append(NumberedRow(table, int(table.numbers[k]), table.rows[k], row))
        return Block.of(found)

    def known(self, rows: NDArray[np.int64]) -> list[Outcome]:
        """Look up rows that are encoded already."""
        at = np.minimum(np.searchsorted(self._known, rows), max(len(self._known) - 1, 0))
        there = self._known[at] == rows if len(self._known) else np.zeros(len(rows), bool)
        found: list[Outcome] = []
        for row, i, used in zip(rows.tolist(), at.tolist(), there.tolist(), strict=True):
            where = self.where(row)
            if used:
                found.append(Example(self._trees[i], where, row))
            else:
                found.append(Dropped(where, self._why.get(where, REASONS["empty"])))
        return found

    def _know(self, encoded: Any, trees: Any) -> None:
        self._trees = trees
        self._known = np.asarray(getattr(encoded, "rows", self.used), np.int64)
        self._why = dropped_rows(encoded.report) if hasattr(encoded, "report") else {}
        self._whole = encoded

    def cache(self, encoder: BlockEncoder) -> None:
        """Start to encode all rows in a thread, for the token cache, which later updates read."""
        if self._thread is None and not self.complete:
            self._thread = threading.Thread(
                target=self._encode_all, args=[encoder.copy()], daemon=True, name="token cache"
            )
            self._thread.start()
            at_stage_end(self._end)

    def _encode_all(self, encoder: BlockEncoder) -> None:
        def rows_of(rows: Sequence[Any], which: Sequence[int]) -> list[Any]:
            if self._stop.is_set():
                raise Stopped("the stage has ended")
            return View.of(rows).take(which)

        assert self.records is not None
        tables = [
            replace(table, rows=View(len(table.rows), partial(rows_of, table.rows)), known_kinds=table.kinds)
            for table in self.records.tables
        ]
        with suppress(Exception):  # the update that reads the row raises the error
            encoded = encoder.encoded(Records(tables))
            self._know(encoded, encoded)

    def wait(self) -> None:
        """Wait until all rows are in the token cache, if they are being encoded and the run is not asked to stop."""
        while self._thread is not None and self._thread.is_alive() and not stop_requested():
            self._thread.join(0.5)

    def _end(self) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    def summary(self) -> str | None:
        """Say what became of all rows, where all are encoded by now."""
        return None if self._whole is None else "; ".join(self._whole.report.lines())


class SourceDescription(NamedTuple):
    """What a source says of itself before the first example."""

    report: str
    rows: int
    """Of an epoch; 0: unknown."""
    sizes: NDArray[np.int64]
    """int64 [examples of the sample]: tokens of each, shared prompts once."""
    lengths: NDArray[np.int64]
    """int64: tokens of the longest sequence of each."""


Read: TypeAlias = Callable[[Any, Any, Any], Any]
"""(definition, parameters, batch) → float32 [rows, sequences] or [rows, trained]."""


@dataclass(frozen=True)
class AddedValues:
    """Values that a model gives each example; see `with_values`."""

    name: str
    read: Read
    reads: Literal["frozen", "state"]
    per: Literal["sequence", "token"]
    what: str
    over_update: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = field(default=None)


class Source:
    """Examples in the order of training.

    The examples after a position depend on the data, the seed and the position alone. They are looked up where all rows
    are encoded, else encoded a little ahead: by a thread, or by `workers` processes, which run until the stage ends.
    """

    def __init__(
        self,
        order: RowOrder,
        sample: Any,
        report: Any,
        *,
        encoder: BlockEncoder | None = None,
        workers: int = 0,
        trees: Sequence[Tree] | None = None,
    ) -> None:
        """sample: the encoded rows, or the first ones in the order of training, that layouts are made from.

        report: what is known of the rows. encoder: None: `order` has all of them encoded. trees: of the sample.
        """
        self.order, self.sample, self.report = order, sample, report
        self.unit, self.field = "rows", "train_data"
        self.first: Callable[[], list[Outcome]] = list
        """Of a stream: what became of the rows of the sample, in their order."""
        self.values: tuple[AddedValues, ...] = ()
        self._sample_trees = trees
        self._encoder, self._workers = encoder, workers
        self._changes: tuple[Callable[[Tree], Tree], ...] = ()
        self._submit: Callable[[Block], Future[list[Outcome]]] | None = None
        self.restore({"at": {}})

    @classmethod
    def of(
        cls, rows: Any, trees: Sequence[Tree] | None = None, *, seed: int = 0, shuffle: bool = True
    ) -> Source:
        """Order rows that are encoded. trees: of the rows, one each; None: their own."""
        trees = trees_of(rows) if trees is None else trees
        used = np.asarray(getattr(rows, "rows", np.arange(len(trees))), np.int64)
        records = getattr(rows, "records", None)
        order = FileRows(used, seed=seed, shuffle=shuffle, records=records, encoded=rows, trees=trees)
        return cls(order, rows, getattr(rows, "report", ""), trees=trees)

    def copy(self, **changes: Any) -> Source:
        """Return the same examples from the start, read apart from these, with other attributes."""
        made = copy.copy(self)
        made.order = copy.copy(self.order)
        for name, value in changes.items():
            setattr(made, name, value)
        made.restore({"at": {}})
        return made

    def map(self, change: Callable[[Tree], Tree]) -> Source:
        """Change every example's tree; its tokens stay."""
        return self.copy(_changes=(*self._changes, change))

    def __len__(self) -> int:
        """Return the rows of an epoch; 0: unknown."""
        return len(self.order)

    def __bool__(self) -> bool:
        """Return True: a source whose length is not known is not an empty one."""
        return True

    def where(self, row: int) -> str:
        """Name a row by its number, `Example.row`."""
        return self.order.where(row)

    @property
    def complete(self) -> bool:
        """Whether all rows are encoded: the sample then has every example."""
        return self._encoder is None

    @property
    def trees(self) -> Any:
        """The trees of the sample."""
        trees = trees_of(self.sample) if self._sample_trees is None else self._sample_trees
        if not self._changes:
            return trees
        if isinstance(trees, Trees):
            return trees.changed(lambda i, tree: self._changed(tree))
        return [self._changed(tree) for tree in trees]

    def _changed(self, tree: Tree) -> Tree:
        for change in self._changes:
            tree = change(tree)
        return tree

    def describe(self) -> SourceDescription:
        trees = self.trees
        return SourceDescription(str(self.report), len(self), sizes_of(trees), lengths_of(trees))

    @property
    def state(self) -> State:
        """The position of the next example, as JSON."""
        return {"at": self._at, "dropped": dict(self.dropped)}

    def restore(self, state: State) -> None:
        """Go to a position."""
        self._at = state["at"]
        self.order.seek(copy.deepcopy(self._at))
        self._queue: deque[tuple[list[State], Future[list[Outcome]]]] = deque()
        self._waiting: deque[tuple[Outcome, State]] = deque()
        dropped = state.get("dropped", {})
        # Earlier versions counted without reasons, and from the start of a block.
        counts = dropped if isinstance(dropped, Mapping) else {"": dropped}
        self.dropped: Counter[str] = Counter(counts)
        """Rows that were met and dropped, by reason."""
        if state.get("used"):
            self.next(state["used"])

    def position(self, examples: int) -> State | None:
        """Return the position after so many examples from the start; None where it depends on what is dropped."""
        return {"at": {"row": examples}} if self.complete else None

    def rows_reached(self, examples: int) -> NDArray[np.int64]:
        """Return which examples of a complete source are among the first ones, ascending."""
        assert isinstance(self.order, FileRows)
        return visited_rows(len(self), examples, seed=self.order.seed, shuffle=self.order.shuffle)

    @property
    def numbers(self) -> NDArray[np.int64]:
        """int64 [examples], ascending: `Example.row` of each of a complete source."""
        assert isinstance(self.order, FileRows)
        return self.order.used

    def index(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices in the sample of rows by their numbers, of a complete source."""
        return np.searchsorted(self.numbers, rows)

    def digests(self) -> NDArray[np.uint64]:
        """Hash what is trained on in each row of a complete source, uint64 [rows]."""
        return np.asarray(self.sample.digests, np.uint64)

    def next(self, n: int) -> list[Example]:
        """Return the next `n` examples. Raises InputError and RunError for a row that cannot be read."""
        found: list[Example] = []
        while len(found) < n:
            if not self._waiting:
                self._read(n - len(found))
            outcome, self._at = self._waiting.popleft()
            if isinstance(outcome, Dropped):
                self.dropped[outcome.why] += 1
            else:
                found.append(outcome._replace(tree=self._changed(outcome.tree)))
        return found

    def _read(self, n: int) -> None:
        """Wait for the next rows; there are others of which something is known then, if there is an encoder."""
        if self._encoder is None:
            taken = self.order.take(n)
            self._waiting.extend(zip(taken.outcomes, taken.after, strict=True))
            return
        while len(self._queue) < 2 * max(self._workers, 1):
            self._queue.append(self._start())
        after, future = self._queue.popleft()
        self._waiting.extend(zip(future.result(), after, strict=True))

    def _start(self) -> tuple[list[State], Future[list[Outcome]]]:
        """Start to encode the next block; what is wrong with its rows is raised when they are used."""
        future = Future[list[Outcome]]()
        try:
            taken = self.order.take(BLOCK)
        except (InputError, RunError) as error:
            future.set_exception(error)
            return [], future
        if taken.block is not None:
            return taken.after, self._encode(taken.block)
        future.set_result(list(taken.outcomes))
        return taken.after, future

    def _encode(self, block: Block) -> Future[list[Outcome]]:
        if self._submit is None:
            self._submit = self._open_workers()
        return self._submit(block)

    def _open_workers(self) -> Callable[[Block], Future[list[Outcome]]]:
        assert self._encoder is not None
        if not self._workers:
            thread = ThreadPoolExecutor(1, thread_name_prefix="encoding")
            at_stage_end(partial(thread.shutdown, cancel_futures=True))
            encoder = self._encoder.copy()
            return lambda block: thread.submit(encoder, block)
        try:
            return Pool(self._encoder, self._workers).submit
        except UnsendableError as error:
            raise InputError(
                f"dataloader_num_workers: the tokenizer cannot be sent to another process: {error}"
            ) from error

    def begin(self, examples: int) -> None:
        """Prepare for so many examples: where they take all rows of a file, its tokens are cached on the way."""
        if isinstance(self.order, FileRows) and self._encoder is not None and examples >= len(self):
            self.order.cache(self._encoder)

    def end(self) -> str | None:
        """Say what became of the rows, after the last example; None: all were used."""
        summary = None
        if isinstance(self.order, FileRows):
            self.order.wait()
            summary = self.order.summary()
        if not self.dropped:
            return None
        if summary is not None:
            return summary
        # Checkpoints of earlier versions counted without reasons.
        reasons = [
            f"{why or 'for reasons that were not recorded'} ({count:,})"
            for why, count in self.dropped.most_common()
        ]
        return f"{counted(self.dropped.total(), 'rows')} passed over: {', '.join(reasons)}"


def open_files(
    records: Records,
    usable: Callable[[Table], NDArray[np.bool_]],
    encode: partial[Any],
    tokenizer: Any,
    *,
    seed: int,
    shuffle: bool,
    workers: int = 0,
) -> Source:
    """Make the source of files too large to encode before the first update.

    What needs no tokenizer is checked of all rows; those with nothing to learn are left out before they are ordered.
    usable: as `usable_pairs`. Raises InputError naming file and row of the first few problems of all rows.
    """
    marks = [usable(part) for table in records.tables for part in table.parts()]
    used = np.flatnonzero(np.concatenate(marks))
    if not len(used):
        raise InputError(f"{records.name}: no row has something to learn")
    order = FileRows(used, seed=seed, shuffle=shuffle, records=records)
    first = order.at(0, min(SAMPLE, len(used)))
    sample = encode(Records(order.block(first).parts), tokenizer)
    report = f"{len(records):,} rows, {len(used):,} of them with something to learn"
    report += f"; of the first {len(first):,} in the order of training: {sample.report}"
    return Source(order, sample, report, encoder=BlockEncoder(encode, tokenizer), workers=workers)


def with_values(
    source: Source,
    name: str,
    read: Read,
    *,
    reads: Literal["frozen", "state"],
    per: Literal["sequence", "token"] = "sequence",
    what: str | None = None,
    over_update: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None,
) -> Source:
    """Add values that a model gives to the tree of every example, which the objective then finds in its batches.

    name: the objective finds them as `batch.sequence_values[name]`, float32 [rows, sequences], or, per="token", as
        `batch.token_values[name]`, float32 [rows, trained]. read: (definition, parameters, batch) → an array of that
        shape; it is traced, and has no gradient.
    reads: "frozen": the parameters that training starts from. Of data that are read whole the values are computed once,
        before the first update, and kept in checkpoints; else before each update, from a copy of the parameters that
        are trained. "state": the parameters before each update.
    what: what messages call the values, such as "log-probabilities"; None: the name.
    over_update: what the trees get instead, from the values of all examples of an update, float32 [examples, sequences
        of an example], per="sequence": for estimates over an update. Not for frozen values of data that are read whole.

    `Context.updates` and `Context.held_out` take the source, and compute the values.
    """
    added = AddedValues(name, read, reads, per, what or name, over_update)
    return source.copy(values=(*source.values, added))
