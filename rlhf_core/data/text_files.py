"""Read text files (jsonl, json, txt): index their records in one pass, and parse them on access."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.cache import Arrays, code_hash, load_or_build
from rlhf_core.data.column_kinds import Kinds, count_kinds, count_values, kinds_from_json, kinds_to_json
from rlhf_core.data.conversations import row_text_problem
from rlhf_core.data.lazy_rows import Content, FileRows, Row
from rlhf_core.data.report import Problems
from rlhf_core.data.source import digest
from rlhf_core.errors import InputError

Numbers = Sequence[int] | NDArray[np.int64]
ParsedFile = tuple[Sequence[Mapping[str, Any]], Numbers, Kinds]


PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstandard", b"PK\x03\x04": "zip", b"PAR1": "parquet"}
"""First bytes of common binary files."""
BOM = b"\xef\xbb\xbf"


def require_text(content: Content) -> None:
    name, head = content.name, content.read(0, 1000)
    for start, what in PACKED.items():
        if head.startswith(start):
            remedy = {
                "parquet": "name it .parquet",
                "gzip": "unpack it first, or name it .gz",
                "zstandard": "unpack it first, or name it .zst",
            }.get(what, "unpack it first")
            raise InputError(f"{name} is a {what} file, not text: {remedy}")
    if head[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in head:
        raise InputError(f"{name} is UTF-16: save it as UTF-8")


def _not_utf8(name: str, number: int, line: bytes, at: int) -> InputError:
    return InputError(
        f"{name} row {number} is not UTF-8 (byte 0x{line[at]:02x} at column {at + 1}): save the file as UTF-8"
    )


class _Index:
    """Byte ranges, line numbers and checksums of a text file's records, collected in one pass."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.numbers: list[int] = []
        self.checks: list[int] = []
        self.kinds: Kinds = {}

    def add(self, start: int, stop: int, number: int, record: bytes, row: Mapping[str, Any]) -> None:
        self.starts.append(start)
        self.stops.append(stop)
        self.numbers.append(number)
        self.checks.append(zlib.crc32(record))
        count_values(self.kinds, row)

    def arrays(self) -> Arrays:
        return {
            "starts": np.array(self.starts, np.int64),
            "stops": np.array(self.stops, np.int64),
            "numbers": np.array(self.numbers, np.int64),
            "checks": np.array(self.checks, np.uint32),
            "kinds": np.frombuffer(kinds_to_json(self.kinds).encode(), np.uint8),
        }


def index_records(
    content: Content,
    kind: str,
    parse: Callable[[bytes], Row],
    records: Callable[[Content], Iterator[tuple[int, int, int, bytes]]],
    check_record: Callable[[int, bytes, Problems], Row | None],
) -> ParsedFile:
    """Index the records of a text file, checking each once, or read a large file's index from the cache.

    records: yields (start, stop, line number, bytes). check_record: parses one, or adds a problem and returns None.
    """
    require_text(content)

    def build() -> list[Arrays]:
        entries, problems = _Index(), Problems()
        for start, stop, number, record in records(content):
            row = check_record(number, record, problems)
            if row is not None:
                entries.add(start, stop, number, record, row)
        problems.raise_if_any()
        return [entries.arrays()]

    if content.in_memory:
        index = build()[0]
    else:
        index = load_or_build(f"rows-{digest(kind, content.sha256, code_hash())[:40]}", build)
    starts, stops, checks, numbers = (index[name] for name in ("starts", "stops", "checks", "numbers"))
    kinds = kinds_from_json(bytes(index["kinds"]).decode())
    return FileRows(content, parse, starts, stops, checks, numbers), numbers, kinds


def iterate_lines(content: Content) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (start, stop, number, line) of lines that are not blank; only a line feed ends one, never U+2028."""
    start = 0
    for number, line in enumerate(content.stream(), 1):
        stop = start + len(line)
        if number == 1 and line.startswith(BOM):
            start, line = len(BOM), line[len(BOM) :]
        if line.strip():
            line = line.removesuffix(b"\n")
            yield start, start + len(line), number, line
        start = stop


def decode_line(name: str, number: int, line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(name, number, line, error.start) from error


HALVES = re.compile(rb"\\u[dD][89a-fA-F]")
"""JSON escapes of surrogates, which are valid only in pairs."""


def read_jsonl(content: Content) -> ParsedFile:
    name = content.name

    def check_record(number: int, record: bytes, problems: Problems) -> Row | None:
        text = decode_line(name, number, record)
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            problems.add(
                f"{name} row {number} is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
            )
            return None
        except (RecursionError, ValueError) as error:
            problems.add(f"{name} row {number} cannot be read: {_parser_limit(error)}")
            return None
        if not isinstance(row, dict):
            hint = "; a JSON array goes in a .json file" if isinstance(row, list) else ""
            problems.add(f"{name} row {number} is not a JSON object, but {_json_kind(row)}{hint}")
            return None
        if HALVES.search(record) and (problem := row_text_problem(row)):
            problems.add(f"{name} row {number}: {problem}")
            return None
        return row

    return index_records(content, "jsonl", json.loads, iterate_lines, check_record)


def read_json_array(content: Content) -> ParsedFile:
    """Read a JSON array, holding all its rows in memory."""
    name = content.name
    require_text(content)
    whole = content.read(0, content.size).removeprefix(BOM)
    try:
        text = whole.decode()
    except UnicodeDecodeError as error:
        row = whole.count(b"\n", 0, error.start)
        line = whole.split(b"\n", row + 1)[row]
        raise _not_utf8(name, row + 1, line, error.start - whole.rfind(b"\n", 0, error.start) - 1) from error
    del whole
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # jsonl in a file named .json
            return read_jsonl(content)
        raise InputError(
            f"{name} line {error.lineno} is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        ) from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"{name} cannot be read: {_parser_limit(error)}") from None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise InputError(f"{name} is {_json_kind(value)}: a .json file holds an array of objects")
    problems, halves = Problems(), HALVES.search(text.encode())
    for number, row in enumerate(value, 1):
        if not isinstance(row, dict):
            problems.add(f"{name} row {number} is not a JSON object, but {_json_kind(row)}")
        elif halves and (problem := row_text_problem(row)):
            problems.add(f"{name} row {number}: {problem}")
    problems.raise_if_any()
    return value, range(1, len(value) + 1), count_kinds(value)


def _parser_limit(error: Exception) -> str:
    """Explain why the parser refuses JSON that is valid."""
    return (
        "it is nested too deeply"
        if isinstance(error, RecursionError)
        else "it has a number of too many digits"
    )


def _json_kind(value: Any) -> str:
    kinds = {list: "an array", str: "a text", bool: "a truth value", int: "a number", float: "a number"}
    return kinds.get(type(value), "null" if value is None else "an object")


def read_txt(content: Content) -> ParsedFile:
    def check_record(number: int, record: bytes, problems: Problems) -> Row | None:
        text = decode_line(content.name, number, record)
        if "\0" in text:
            problems.add(f"{content.name} row {number} has a NUL byte")
            return None
        return _text_row(text)

    return index_records(
        content, "txt", lambda record: _text_row(record.decode()), iterate_lines, check_record
    )


def _text_row(text: str) -> Row:
    return {"text": text.removesuffix("\r")}
