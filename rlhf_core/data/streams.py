"""Data that are read in order: a generator function, an `IterableDataset`, files and hub datasets that are streamed."""

from __future__ import annotations

import copy
import io
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from rlhf_core.contracts import DATASET
from rlhf_core.data.files import COMPRESSIONS, FORMATS, array_records, format_of, limited_rows, parse_line
from rlhf_core.data.records import (
    drop_columns,
    hub_dataset,
    is_endless,
    is_stream,
    load,
    missing_file,
    require_weight,
    resolve,
    with_columns,
)
from rlhf_core.data.source import (
    SAMPLE,
    Block,
    BlockEncoder,
    NumberedRow,
    Source,
    State,
    Taken,
    outcomes,
)
from rlhf_core.data.table import Records, Table
from rlhf_core.errors import InputError, RunError, error_line, reading

if TYPE_CHECKING:
    from rlhf_core.plugins.registry import Registry

HEAD = 1000
"""Rows that show which columns a stream has, and what they hold."""
LINES = ("jsonl", "txt")
"""Formats that are read line by line here; `datasets` streams the others."""

Numbered = tuple[int, Mapping[str, Any]]
"""A row and its number, from 1."""
Start = Callable[[State], Iterator[tuple[Numbered, State]]]
"""Iterates from a state, {} at the start; each row comes with the state after it."""
STREAM_BITS = 40
"""A row of several streams has the number of its stream above its own in the stream."""


@dataclass(frozen=True)
class Stream:
    """Rows that are read in order, and from the start again where they end."""

    name: str
    """What messages call it."""
    start: Start
    head: Table
    """Its first rows, as the stream has them."""
    weight: float = 1.0
    """Its share of the rows, in proportion to the other streams'."""
    columns: Mapping[str, Any] | None = None
    """As of `load`."""
    drop: tuple[str, ...] = ()
    """Columns to leave out."""
    ordered: bool = False
    """Whether its rows keep their order: whoever made it shuffles them."""

    @property
    def columns_read(self) -> tuple[str, ...]:
        """The columns of its first rows, as they are named here, with those to leave out."""
        return with_columns(self.head, self.columns).columns

    def finished(self, part: Table) -> Table:
        """Rename, convert and drop the columns of some rows, in memory, so that another process can have them."""
        (table,) = drop_columns(Records([with_columns(part, self.columns)]), self.drop).tables
        return replace(table, rows=list(table.rows), fingerprint="", known_kinds=table.kinds, origin="")


def open_streams(
    spec: Any,
    *,
    registry: Registry | None = None,
    columns: Mapping[str, Any] | None = None,
    drop: Sequence[str] | None = None,
) -> list[Stream]:
    """Open the streams that `spec` names, and read the first rows of each.

    A list may mix streams with what `load` reads; each takes part in proportion to its `weight`. columns: as in `load`.
    drop: columns to leave out.
    Raises InputError for data that are missing or cannot be read.
    """
    items = spec if isinstance(spec, list | tuple) else [spec]
    streams = []
    for item in items:
        options = dict(item) if isinstance(item, Mapping) else {}
        mine = options.pop("columns", columns)
        weight = options.pop("weight", 1.0)
        require_weight(weight, options.get("name"))
        opened = _opened(item, options, registry)
        if opened is None:
            records = load(options or item, registry=registry, columns=mine)
            records = drop_columns(records, drop or ())
            streams += [_of_source(table, weight) for table in records.tables]
            continue
        name, start = opened
        head = [row for row, _ in islice(start({}), HEAD)]
        if not head:
            raise InputError(f"{name} has no rows")
        table = Table(name, [row for _, row in head], [number for number, _ in head], "")
        with_columns(table, mine)  # raises where its columns cannot be read
        ordered = isinstance(item, grain.MapDataset | grain.IterDataset | grain.DataLoader)
        streams.append(Stream(name, start, table, weight, mine, tuple(drop or ()), ordered))
    return streams


def _opened(item: Any, options: dict[str, Any], registry: Registry | None) -> tuple[str, Start] | None:
    """Return the name of a stream and what starts it; None for data that `load` reads.

    options: of a table that names data, without its columns and weight.
    """
    if options.pop("streaming", False):
        return _of_table(options, registry)
    if is_endless(item) or isinstance(item, grain.IterDataset | grain.DataLoader):
        return "dataset", _of_grain(item, "dataset")
    return ("dataset", _of_iterable(item, "dataset")) if is_stream(item) else None


def _of_source(table: Table, weight: float) -> Stream:
    def start(state: State) -> Iterator[tuple[Numbered, State]]:
        for i in range(state.get("rows", 0), len(table.rows)):
            yield (int(table.numbers[i]), table.rows[i]), {"rows": i + 1}

    return Stream(table.name, start, table, weight)


def _of_iterable(data: Any, name: str) -> Start:
    """Read what a function yields, or what is iterated; to continue, rows that were read are passed over."""
    if isinstance(data, Iterator):
        raise InputError(
            f"{name} is {type(data).__name__}, which can be read once, and a run that resumes reads it again: give the "
            "function that makes it"
        )

    def start(state: State) -> Iterator[tuple[Numbered, State]]:
        number = done = state.get("rows", 0)
        try:
            if done and hasattr(data, "skip"):
                rows: Iterable[Any] = data.skip(done)
            else:
                rows = islice(data() if callable(data) else data, done, None)
            for number, row in enumerate(rows, done + 1):
                if not isinstance(row, Mapping):
                    raise InputError(f"{name} row {number} is {type(row).__name__}, not a mapping of columns")
                yield (number, row), {"rows": number}
        except (InputError, RunError):
            raise
        except Exception as error:  # the author's code
            raise RunError(f"{name}, after row {number}: {error_line(error, __file__)}") from error

    return start


def _of_grain(data: Any, name: str) -> Start:
    """Read a dataset or a loader of grain, whose own iterator says where it is after each row."""

    def start(state: State) -> Iterator[tuple[Numbered, State]]:
        number = done = state.get("rows", 0)
        try:
            rows = iter(data)
            if "grain" in state:
                rows.set_state(_unpacked(state["grain"]))
            for number, row in enumerate(rows, done + 1):
                if not isinstance(row, Mapping):
                    raise InputError(f"{name} row {number} is {type(row).__name__}, not a mapping of columns")
                yield (number, row), {"rows": number, "grain": _packed(rows.get_state())}
        except (InputError, RunError):
            raise
        except Exception as error:  # the author's code
            raise RunError(f"{name}, after row {number}: {error_line(error, __file__)}") from error

    return start


def _packed(state: Any) -> Any:
    """Make a position of grain JSON: a loader's is the bytes of a text."""
    return {"text": state.decode()} if isinstance(state, bytes) else state


def _unpacked(state: Any) -> Any:
    return state["text"].encode() if isinstance(state, dict) and set(state) == {"text"} else state


def _of_table(options: dict[str, Any], registry: Registry | None) -> tuple[str, Start]:
    name, path = options.pop("name", None), options.pop("path", None)
    if registry is not None and name in registry.names(DATASET) and name not in FORMATS:
        given = options if path is None else {**options, "path": path}
        return str(name), _of_iterable(registry.get(DATASET, name, **given), str(name))
    if path is None:
        return str(name), _of_iterable(hub_dataset(str(name), options, streaming=True), str(name))
    file = resolve(str(path))
    kind = name or format_of(Path(path))
    if options or kind not in FORMATS:
        raise InputError(
            f"data table {path}: {', '.join(options) or kind} cannot be streamed; a table of a file has name (one of "
            f"{', '.join(FORMATS)}), path, streaming, weight, columns"
        )
    if not file.exists():
        raise InputError(missing_file(file, str(path)))
    if kind == "array_record":
        return str(path), _of_array_record(file, str(path))
    if kind in LINES:
        return str(path), _of_lines(file, str(path), kind)
    import datasets

    with reading(str(path)):
        data = datasets.load_dataset(str(kind), data_files=str(file), split="train", streaming=True)
    return str(path), _of_iterable(data, str(path))


def _of_array_record(path: Path, name: str) -> Start:
    def start(state: State) -> Iterator[tuple[Numbered, State]]:
        records = array_records(path, name)
        for i in range(state.get("rows", 0), len(records)):
            yield (i + 1, parse_line(records[i], "jsonl", f"{name} row {i + 1}")), {"rows": i + 1}

    return start


def _of_lines(path: Path, name: str, kind: str) -> Start:
    def start(state: State) -> Iterator[tuple[Numbered, State]]:
        with reading(name), _open(path) as lines:
            at, number = state.get("offset", 0), state.get("line", 0)
            if lines.seekable():
                lines.seek(at)
            else:  # compressed
                deque(islice(limited_rows(lines, name), number), maxlen=0)
            for line in limited_rows(lines, name, number):
                at = at + len(line)
                number = number + 1
                if line.strip():
                    row = parse_line(line, kind, f"{name} row {number}")
                    yield (number, row), {"offset": at, "line": number}

    return start


def _open(path: Path) -> Any:
    compression = COMPRESSIONS.get(path.suffix.lstrip(".").lower())
    if compression is None:
        return open(path, "rb")
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(str(path), compression), 1 << 20)


class _Rows(grain.IterDataset[Any]):
    """The rows of a stream, again and again, each with the number of its stream."""

    def __init__(self, number: int, stream: Stream) -> None:
        super().__init__()
        self.number, self.stream = number, stream

    def __iter__(self) -> _RowIterator:
        return _RowIterator(self)


class _RowIterator(grain.DatasetIterator[Any]):
    def __init__(self, rows: _Rows) -> None:
        super().__init__()
        self._source, self._state = rows, State()
        self._rows: Iterator[tuple[Numbered, State]] | None = None

    def __next__(self) -> tuple[int, Numbered]:
        for _ in range(2):
            if self._rows is None:
                self._rows = self._source.stream.start(self._state)
            found = next(self._rows, None)
            if found is not None:
                row, self._state = found
                return self._source.number, row
            self._rows, self._state = None, {}  # an epoch has ended
        raise InputError(f"{self._source.stream.name} has no rows, where it had some before")

    def get_state(self) -> State:
        return dict(self._state)

    def set_state(self, state: State) -> None:
        self._rows, self._state = None, dict(state)


class _Shuffled(grain.IterDataset[Any]):
    """The rows of a stream, shuffled by windows of `size`. Grain's takes milliseconds a row where there are few."""

    def __init__(self, rows: _Rows, size: int, seed: int) -> None:
        super().__init__(rows)
        self.rows, self.size, self.seed = rows, size, seed

    def __iter__(self) -> _ShuffledIterator:
        return _ShuffledIterator(self, iter(self.rows))


class _ShuffledIterator(grain.DatasetIterator[Any]):
    """state: where the window begins, its number, and the rows that were taken from it."""

    def __init__(self, rows: _Shuffled, parent: _RowIterator) -> None:
        super().__init__(parent)
        self._rows = rows
        self._window: list[tuple[int, Numbered]] = []
        self._start = parent.get_state()
        self._number = -1
        self._used = 0

    def __next__(self) -> tuple[int, Numbered]:
        if self._used == len(self._window):
            self._start = self._parent.get_state()
            self._number = self._number + 1
            self._used = 0
            self._fill()
        self._used += 1
        return self._window[self._used - 1]

    def _fill(self) -> None:
        read = [next(self._parent) for _ in range(self._rows.size)]
        order = np.random.RandomState([self._rows.seed, self._rows.rows.number, self._number])
        self._window = [read[i] for i in order.permutation(len(read))]

    def get_state(self) -> State:
        return {"start": self._start, "window": self._number, "used": self._used}

    def set_state(self, state: State) -> None:
        self._start = dict(state["start"])
        self._number = state["window"]
        self._used = state["used"]
        self._parent.set_state(self._start)
        self._window = []
        if self._used:
            self._fill()


def _mixed(streams: list[Stream], window: int, seed: int) -> Any:
    """Mix streams by their weights, each shuffled by a window: (number of the stream, row), without end."""
    datasets: list[Any] = [_Rows(number, stream) for number, stream in enumerate(streams)]
    if window > 1:
        datasets = [rows if rows.stream.ordered else _Shuffled(rows, window, seed) for rows in datasets]
    if len(streams) == 1:
        return datasets[0]
    return grain.IterDataset.mix(datasets, [stream.weight for stream in streams])


def _block(streams: list[Stream], rows: list[tuple[int, Numbered]]) -> Block:
    """Make a block of (number of the stream, row)."""
    block = Block.of(
        [
            NumberedRow(streams[stream].head, number, row, (stream << STREAM_BITS) + number - 1)
            for stream, (number, row) in rows
        ]
    )
    finished = [streams[stream].finished for stream in dict.fromkeys(stream for stream, _ in rows)]
    return block._replace(parts=[finish(part) for finish, part in zip(finished, block.parts, strict=True)])


def first_rows(streams: list[Stream], count: int) -> Records:
    """Read the first rows of the streams, shared out by their weights; fewer, where one ends before."""
    total = sum(stream.weight for stream in streams)
    rows = [
        (number, row)
        for number, stream in enumerate(streams)
        for row, _ in islice(stream.start({}), math.ceil(count * stream.weight / total))
    ]
    return Records(_block(streams, rows).parts)


class StreamRows:
    """Rows of streams, each shuffled by a window, mixed by their weights.

    A window is shuffled whole, and the next one begins after its last row: grain's `WindowShuffleIterDataset` has
    another order.
    """

    def __init__(self, streams: list[Stream], *, seed: int, window: int) -> None:
        """window: rows of each stream that are shuffled together; 1: they keep their order."""
        self.streams = streams
        self._dataset = _mixed(streams, window, seed)
        self._rows = iter(self._dataset)

    def __len__(self) -> int:
        return 0

    @property
    def name(self) -> str:
        return ", ".join(dict.fromkeys(stream.name for stream in self.streams))

    def where(self, row: int) -> str:
        stream = row >> STREAM_BITS
        number = row & ((1 << STREAM_BITS) - 1)
        return f"{self.streams[stream].name} row {number + 1}"

    def seek(self, state: State) -> None:
        self._rows = iter(self._dataset)
        if state:
            self._rows.set_state(state)

    def take(self, count: int) -> Taken:
        rows: list[tuple[int, Numbered]] = []
        after: list[State] = []
        for _ in range(count):
            rows.append(next(self._rows))
            after.append(copy.deepcopy(self._rows.get_state()))
        return Taken(after, _block(self.streams, rows))


def open_source(
    streams: list[Stream], encode: partial[Any], tokenizer: Any, *, seed: int, window: int, workers: int = 0
) -> Source:
    """Make the source of streams. window: as of `StreamRows`.

    Raises InputError naming file and row of the first few problems of the first rows.
    """
    order = StreamRows(streams, seed=seed, window=window)
    block = order.take(SAMPLE).block
    assert block is not None
    records = Records(block.parts)
    sample = encode(records, tokenizer)
    report = f"{order.name}: of the first {SAMPLE:,} rows of the stream: {sample.report}"
    source = Source(order, sample, report, encoder=BlockEncoder(encode, tokenizer), workers=workers)
    source.first = partial(outcomes, block, records, sample)
    return source
