"""Read data files of every supported format, with the number of each row in its file."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core import runtime
from rlhf_core.data.report import Problems
from rlhf_core.data.table import Kinds, Table, View, count_kinds, count_values, digest
from rlhf_core.errors import InputError, library_words, reading
from rlhf_core.tokenizer.options import text_problem

IN_MEMORY = 1 << 23
"""Bytes: files up to this size are held in memory, so later changes to them do not matter."""
COMPRESSIONS = {"gz": "gzip", "zst": "zstd"}
PACKED = {
    b"\x1f\x8b": "a gzip file, not text: unpack it first, or rename it to end in .gz",
    b"\x28\xb5\x2f\xfd": "a zstandard file, not text: unpack it first, or rename it to end in .zst",
    b"PK\x03\x04": "a zip file, not text: unpack it first",
    b"PAR1": "a parquet file, not text: rename it to end in .parquet",
}
"""{first bytes of a binary file: what to say of it}."""
BOM = b"\xef\xbb\xbf"
CHUNK = 4096
MOST_LINE = 2**27
"""Bytes of a line that is a row."""

Row = dict[str, Any]


def format_of(path: Path) -> str | None:
    """Tell a file's format from its suffix, ignoring .gz and .zst; None if it is unknown."""
    suffixes = [suffix.lstrip(".").lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def read_file(path: Path, name: str, kind: str) -> Table:
    """Read the rows of a file. name: what messages call it. kind: one of `FORMATS`.

    Raises InputError naming unreadable rows, and for a file without rows.
    """
    with reading(name):
        file = _open(path)
        fingerprint = digest(kind, hashlib.file_digest(file, "sha256").hexdigest())
        file.seek(0)
        if not file.read(1000).strip() and not file.read(1):
            raise InputError(f"{name} is empty")
        file.seek(0)
        table = FORMATS[kind](path if kind == "array_record" else file, name)
    if not len(table.rows):
        raise InputError(f"{name} has no rows")
    return replace(table, fingerprint=fingerprint)


def _numbered(name: str, rows: Sequence[Mapping[str, Any]], kinds: Kinds) -> Table:
    """Make a table of rows that are numbered from 1, without a fingerprint."""
    return Table(name, rows, range(1, len(rows) + 1), "", kinds)


def _open(path: Path) -> io.BufferedIOBase:
    """Open a file, unpacked if its name says that it is compressed; a small one is read into memory."""
    file: Any = open(path, "rb")  # noqa: SIM115  (rows are read from it as long as they live)
    compression = COMPRESSIONS.get(path.suffix.lstrip(".").lower())
    if compression is not None:
        import pyarrow as pa

        unpacked = _scratch_file()
        with file, pa.CompressedInputStream(file, compression) as stream:
            while block := stream.read(1 << 20):
                unpacked.write(block)
        unpacked.seek(0)
        file = unpacked
    if os.fstat(file.fileno()).st_size > IN_MEMORY:
        return file
    with file:
        return io.BytesIO(file.read())


def limited_rows(file: Any, name: str, number: int = 0, *, most: int | None = MOST_LINE) -> Iterator[bytes]:
    """Yield the lines of a file after line `number`. Raises InputError for one of more than `most` bytes."""
    if most is None:
        yield from file
        return
    while line := file.readline(most + 1):
        number += 1
        if len(line) > most:
            raise InputError(
                f"{name} row {number} has more than {most:,} bytes: a line is one row; break it up, or check that the "
                "file is what its name says"
            )
        yield line


def _lines(
    file: io.BufferedIOBase, name: str, most: int | None = MOST_LINE, *, unit: str = "row"
) -> Iterator[tuple[int, int, str]]:
    """Yield (offset, 1-based number, text) of every line; only a line feed ends one, never U+2028.

    unit: "row" where a line is one. Raises InputError for a file that is not UTF-8 text.
    """
    head = file.read(1000)
    for start, what in PACKED.items():
        if head.startswith(start):
            raise InputError(f"{name} is {what}")
    if head[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in head:
        raise InputError(f"{name} is UTF-16: save it as UTF-8")
    at = len(BOM) if head.startswith(BOM) else 0
    file.seek(at)
    for number, line in enumerate(limited_rows(file, name, most=most), 1):
        try:
            yield at, number, line.decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name} {unit} {number} is not UTF-8 (byte 0x{line[error.start]:02x} at column {error.start + 1}): "
                "save the file as UTF-8"
            ) from error
        at += len(line)


def _read_lines(file: io.BufferedIOBase, name: str, parse: Callable[[str], Row]) -> Table:
    """Check every line that is not blank, and parse it again on access.

    parse: raises ValueError or RecursionError for a line that is not a row.
    """
    starts = array("q")
    numbers = array("q")
    kinds = Kinds()
    problems = Problems()
    for start, number, line in _lines(file, name):
        if not line.strip():
            continue
        try:
            count_values(kinds, parse(line.removesuffix("\n")))
        except (ValueError, RecursionError) as error:
            problems.add(f"{name} row {number}{_line_problem(error)}")
            continue
        starts.append(start)
        numbers.append(number)
    problems.raise_if_any()
    starts.append(file.seek(0, os.SEEK_END))
    lines = np.array(numbers, np.int64)

    def read(start: int, stop: int) -> bytes:
        if isinstance(file, io.BytesIO):
            return file.getvalue()[start:stop]
        return os.pread(file.fileno(), stop - start, start)

    def take(which: Sequence[int]) -> list[Mapping[str, Any]]:
        if isinstance(which, range) and which.step == 1 and len(which) > 1:
            block = read(starts[which[0]], starts[which[-1] + 1])
            first = starts[which[0]]
            records = [block[starts[i] - first : starts[i + 1] - first] for i in which]
        else:
            records = [read(starts[i], starts[i + 1]) for i in which]
        return [parse_again(i, record) for i, record in zip(which, records, strict=True)]

    def parse_again(i: int, record: bytes) -> Row:
        try:
            return parse(record.partition(b"\n")[0].decode())
        except (ValueError, RecursionError):
            raise InputError(
                f"{name} row {lines[i]} has changed since the file was read; rerun, and do not modify the file "
                "during a run"
            ) from None

    return Table(name, View(len(lines), take), lines, "", kinds)


def _line_problem(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f" is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
    return str(error) if isinstance(error, NotARow) else f" cannot be read: {library_words(error)}"


class NotARow(ValueError):
    """A value that is not a row; the text, which follows the row's number in a message, says why."""


def as_row(value: Any) -> Row:
    """Return a row's value unchanged. Raises NotARow for anything but an object."""
    if not isinstance(value, dict):
        hint = "; a JSON array goes in a .json file" if isinstance(value, list) else ""
        raise NotARow(f" is not a JSON object, but {_json_kind(value)}{hint}")
    return value


def _json_kind(value: Any) -> str:
    kinds = {list: "an array", str: "a text", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


HALVES = re.compile(r"\\u[dD][89a-fA-F]")
"""JSON escapes of surrogates, which are valid only in pairs."""


def require_unicode(row: Mapping[Any, Any]) -> None:
    """Raise NotARow if a text of a row has half of a surrogate pair, as one cut inside a JSON escape has."""
    for name, cell in row.items():
        text = cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False, default=str)
        problem = text_problem(str(name)) or text_problem(text)
        if problem:
            raise NotARow(f": {name!r} {problem}")


def _json_row(line: str) -> Row:
    row = as_row(json.loads(line))
    if HALVES.search(line):
        require_unicode(row)
    return row


def parse_line(line: bytes, kind: str, place: str) -> Row:
    """Parse a line of a jsonl or txt file. Raises InputError that begins with `place`."""
    try:
        text = line.removeprefix(BOM).decode().removesuffix("\n")
        return _json_row(text) if kind == "jsonl" else {"text": text.removesuffix("\r")}
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}{_line_problem(error)}") from error


def _read_json(file: io.BufferedIOBase, name: str) -> Table:
    """Read a JSON array, holding all its rows in memory."""
    text = "".join(line for _, _, line in _lines(file, name, most=None, unit="line"))
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # jsonl in a file named .json
            file.seek(0)
            return _read_lines(file, name, _json_row)
        raise InputError(
            f"{name} line {error.lineno} is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        ) from error
    rows = [value] if isinstance(value, dict) else value
    if not isinstance(rows, list):
        raise InputError(f"{name} is {_json_kind(value)}: a .json file holds an array of objects")
    problems = Problems()
    has_halves = HALVES.search(text) is not None
    for number, row in enumerate(rows, 1):
        try:
            as_row(row)
            if has_halves:
                require_unicode(row)
        except NotARow as error:
            problems.add(f"{name} row {number}{error}")
    problems.raise_if_any()
    return _numbered(name, rows, count_kinds(rows))


FIELD = re.compile(r'"(?:[^"]|"")*"|[^,\r\n]*')


def _read_csv(file: io.BufferedIOBase, name: str) -> Table:
    """Read CSV rows into an Arrow table: an empty cell is null if unquoted, and an empty text if quoted."""
    import pyarrow as pa

    csv.field_size_limit(1 << 30)
    record: list[str] = []

    def lines() -> Iterator[str]:
        for _, _, line in _lines(file, name, unit="line"):
            record.append(line)
            yield line

    reader = csv.reader(lines(), strict=True)
    problems, kinds = Problems(), Kinds()
    number = 0

    def batches(schema: Any) -> Iterator[Any]:
        nonlocal number
        rows: list[Row] = []
        number = 1
        record.clear()
        for values in reader:
            if values and len(values) != len(schema.names):
                problems.add(
                    f"{name} row {number} has {len(values)} fields, its header has {len(schema.names)}"
                )
            elif values:
                rows.append(dict(zip(schema.names, _with_nulls(values, record), strict=True)))
                count_values(kinds, rows[-1])
            if len(rows) == CHUNK:
                yield pa.RecordBatch.from_pylist(rows, schema)
                rows = []
            number += bool(values)  # a blank line is no row
            record.clear()
        yield pa.RecordBatch.from_pylist(rows, schema)

    try:
        header = next(reader)
        twice = sorted({column for column in header if header.count(column) > 1})
        if twice:
            raise InputError(f"the header of {name} names a column twice: {', '.join(twice)}")
        schema = pa.schema([(column, pa.large_string()) for column in header])
        table = _table(schema, batches(schema), in_memory=isinstance(file, io.BytesIO))
    except csv.Error as error:
        place = f"{name} row {number}" if number else f"the header of {name}"
        raise InputError(f"{place} is not CSV: {error}") from error
    problems.raise_if_any()
    return _numbered(name, table_rows(table), kinds)


def _with_nulls(values: list[str], record: Sequence[str]) -> list[str | None]:
    """Replace empty values by None where the record's text has no quotes there."""
    if "" not in values:
        return list(values)
    found = []
    at = 0
    text = "".join(record)
    for value in values:
        field = FIELD.match(text, at)
        assert field is not None
        found.append(value if value or field.group() else None)
        at = field.end() + 1  # the comma
    return found


def _read_table(file: io.BufferedIOBase, name: str, kind: str) -> Table:
    """Read a Parquet or Arrow file as a table; a large one is mapped, Parquet from an uncompressed copy."""
    import pyarrow as pa

    try:
        table = _parquet_table(file) if kind == "parquet" else _arrow_table(file)
        table.validate(full=True)
        rows = table_rows(table)
        kinds = Kinds()
        for start in range(0, len(rows), CHUNK):
            for row in rows[start : start + CHUNK]:
                count_values(kinds, row)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, NotImplementedError) as error:
        raise InputError(f"{name} is not a readable {kind} file: {error}") from error
    return _numbered(name, rows, kinds)


def _parquet_table(file: io.BufferedIOBase) -> Any:
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(file)
    return _table(parquet.schema_arrow, parquet.iter_batches(CHUNK), in_memory=isinstance(file, io.BytesIO))


def _table(schema: Any, batches: Iterable[Any], *, in_memory: bool) -> Any:
    """Make a table of record batches, in memory or mapped from a temporary file."""
    import pyarrow as pa

    if in_memory:
        return pa.Table.from_batches(batches, schema)
    copy = _scratch_file()
    with pa.ipc.new_file(copy, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    copy.flush()
    return _arrow_table(copy)


def _scratch_file() -> Any:
    """Open an unnamed temporary file, in the cache directory if possible, since /tmp may be memory."""
    try:
        directory = runtime.cache_root()
        directory.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=directory)
    except OSError:
        return tempfile.TemporaryFile()


def _arrow_table(file: io.BufferedIOBase) -> Any:
    import pyarrow as pa

    in_memory = isinstance(file, io.BytesIO)
    file.seek(0)
    content = pa.BufferReader(file.read()) if in_memory else pa.memory_map(f"/dev/fd/{file.fileno()}")
    file.seek(0)
    opener = pa.ipc.open_file if file.read(6) == b"ARROW1" else pa.ipc.open_stream
    return opener(content).read_all()


def array_records(path: Path, name: str) -> Any:
    """Open an ArrayRecord file, whose records are read by index. Raises InputError for another file."""
    from grain.sources import ArrayRecordDataSource

    try:
        return ArrayRecordDataSource(str(path))
    except RuntimeError as error:
        raise InputError(f"{name} is not an ArrayRecord file: {library_words(error)}") from error


def _read_array_record(path: Path, name: str) -> Table:
    """Check every record, the JSON of a row, and parse it again on access."""
    records = array_records(path, name)
    kinds = Kinds()
    problems = Problems()
    for start in range(0, len(records), CHUNK):
        which = range(start, min(start + CHUNK, len(records)))
        for number, record in zip(which, records.__getitems__(which), strict=True):
            try:
                count_values(kinds, parse_line(record, "jsonl", f"{name} row {number + 1}"))
            except InputError as error:
                problems.add(str(error))
    problems.raise_if_any()

    def take(which: Sequence[int]) -> list[Mapping[str, Any]]:
        found = zip(which, records.__getitems__(list(which)), strict=True)
        return [parse_line(record, "jsonl", f"{name} row {i + 1}") for i, record in found]

    return _numbered(name, View(len(records), take), kinds)


FORMATS: dict[str, Callable[[Any, str], Table]] = {
    "jsonl": partial(_read_lines, parse=_json_row),
    "json": _read_json,
    "csv": _read_csv,
    "parquet": partial(_read_table, kind="parquet"),
    "arrow": partial(_read_table, kind="arrow"),
    "array_record": _read_array_record,
    "txt": partial(_read_lines, parse=lambda line: {"text": line.removesuffix("\n").removesuffix("\r")}),
}


def table_rows(table: Any) -> View:
    """View an Arrow table, or a `datasets.Dataset` in Arrow's format, as rows that are converted on access."""

    def take(which: Sequence[int]) -> list[Row]:
        if isinstance(which, range) and which.step == 1:
            part = table[which.start : which.stop] if len(which) else table[:0]
            return drop_nulls(part.to_pylist())
        return [row for i in which for row in drop_nulls(table[i : i + 1].to_pylist())]

    return View(len(table), take)


STRUCTURED = {"prompt", "completion", "chosen", "rejected", "messages", "conversations", "tools"}
STRUCTURED.add("chat_template_kwargs")


def drop_nulls(rows: Iterable[Row]) -> list[Row]:
    """Drop the nulls inside conversations and tools of an Arrow table's rows; null columns stay null.

    Arrow gives every object of a column the keys of all of them, so a message gets a null `tool_calls`, and a tool
    gets the parameters of all other tools.
    """
    return [
        {name: _without_nulls(cell) if name in STRUCTURED else cell for name, cell in row.items()}
        for row in rows
    ]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
