"""Files to rows, each with its number in the file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from rlhf_core.data.report import Problems
from rlhf_core.errors import InputError


class Rows(NamedTuple):
    """The rows of a file."""

    rows: list[dict[str, Any]]
    numbers: list[int]
    """1-based line (jsonl, csv, txt) or row of each."""


def read(name: str, kind: str, content: bytes) -> Rows:
    """Rows of a file's content. `name` is what messages call it; `kind` one of `FORMATS`.

    Raises InputError for what cannot be read, naming the rows, and for a file without rows.
    """
    if not content.strip():
        raise InputError(f"{name} is empty")
    found = FORMATS[kind](name, content)
    if not found.rows:
        raise InputError(f"{name} has no rows")
    return found


PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstandard", b"PK\x03\x04": "zip", b"PAR1": "parquet"}
"""How files that are no text begin."""


def _decode(name: str, content: bytes) -> str:
    for start, what in PACKED.items():
        if content.startswith(start):
            remedy = "name it .parquet" if what == "parquet" else "unpack it first"
            raise InputError(f"{name} is a {what} file, not text: {remedy}")
    if content[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in content[:1000]:
        raise InputError(f"{name} is UTF-16: save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = error.start
        row = content.count(b"\n", 0, at) + 1
        column = at - content.rfind(b"\n", 0, at)
        raise InputError(
            f"{name} row {row} is not UTF-8 (byte 0x{content[at]:02x} at column {column}): save the file "
            "as UTF-8"
        ) from error


def _jsonl(name: str, content: bytes) -> Rows:
    rows, numbers, problems = [], [], Problems()
    # Not splitlines: JSON strings may hold U+2028 and its kin, which are no line ends in a file.
    for number, line in enumerate(_decode(name, content).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            problems.add(
                f"{name} row {number} is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
            )
            continue
        except (RecursionError, ValueError) as error:
            problems.add(f"{name} row {number} cannot be read: {_too_much(error)}")
            continue
        if not isinstance(row, dict):
            hint = "; a JSON array goes in a .json file" if isinstance(row, list) else ""
            problems.add(f"{name} row {number} is not a JSON object, but {_kind(row)}{hint}")
            continue
        rows.append(row)
        numbers.append(number)
    problems.stop()
    return Rows(rows, numbers)


def _json(name: str, content: bytes) -> Rows:
    try:
        value = json.loads(_decode(name, content))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one object a line under the other name
            return _jsonl(name, content)
        raise InputError(
            f"{name} line {error.lineno} is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        ) from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"{name} cannot be read: {_too_much(error)}") from None
    if isinstance(value, dict):
        return Rows([value], [1])
    if not isinstance(value, list):
        raise InputError(f"{name} is {_kind(value)}: a .json file holds an array of objects")
    problems = Problems()
    for number, row in enumerate(value, 1):
        if not isinstance(row, dict):
            problems.add(f"{name} row {number} is not a JSON object, but {_kind(row)}")
    problems.stop()
    return Rows(value, list(range(1, len(value) + 1)))


def _too_much(error: Exception) -> str:
    """What of JSON that is right the parser refuses."""
    return (
        "it is nested too deeply"
        if isinstance(error, RecursionError)
        else "it has a number of too many digits"
    )


def _kind(value: Any) -> str:
    kinds = {list: "an array", str: "a text", bool: "a truth value", int: "a number", float: "a number"}
    return kinds.get(type(value), "null" if value is None else "an object")


def _csv(name: str, content: bytes) -> Rows:
    csv.field_size_limit(1 << 30)
    reader = csv.reader(io.StringIO(_decode(name, content), newline=""), strict=True)
    rows, numbers, problems = [], [], Problems()
    start = 1
    try:
        header = next(reader)
        if len(set(header)) < len(header):
            twice = sorted({column for column in header if header.count(column) > 1})
            raise InputError(f"{name} row 1 names a column twice: {', '.join(twice)}")
        start = reader.line_num + 1
        for values in reader:
            if values and len(values) != len(header):
                problems.add(f"{name} row {start} has {len(values)} fields, its header has {len(header)}")
            elif values:
                rows.append(dict(zip(header, values, strict=True)))
                numbers.append(start)
            start = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"{name} row {start} is not CSV: {error}") from error
    problems.stop()
    return Rows(rows, numbers)


def _txt(name: str, content: bytes) -> Rows:
    lines = _decode(name, content).split("\n")
    numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
    return Rows([{"text": lines[number - 1].removesuffix("\r")} for number in numbers], numbers)


def _parquet(name: str, content: bytes) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(pa.BufferReader(content)).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{name} is not a readable parquet file: {error}") from error
    return Rows(unfilled(rows), list(range(1, len(rows) + 1)))


def _arrow(name: str, content: bytes) -> Rows:
    import pyarrow as pa

    try:
        opener = pa.ipc.open_file if content.startswith(b"ARROW1") else pa.ipc.open_stream
        rows = opener(pa.BufferReader(content)).read_all().to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{name} is not a readable arrow file: {error}") from error
    return Rows(unfilled(rows), list(range(1, len(rows) + 1)))


def unfilled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of an Arrow table without the nulls inside of conversations and tools.

    Arrow gives every object of a column the keys that any of them has, so that a message gets a null `tool_calls`
    and a tool the parameters of all others. Columns that are null stay so.
    """
    structured = ("prompt", "completion", "chosen", "rejected", "messages", "tools", "chat_template_kwargs")
    return [
        {name: _given(cell) if name in structured else cell for name, cell in row.items()} for row in rows
    ]


def _given(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _given(each) for key, each in value.items() if each is not None}
    return [_given(each) for each in value] if isinstance(value, list) else value


FORMATS: dict[str, Callable[[str, bytes], Rows]] = {
    "jsonl": _jsonl,
    "json": _json,
    "csv": _csv,
    "parquet": _parquet,
    "arrow": _arrow,
    "txt": _txt,
}
