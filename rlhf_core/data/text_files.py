"""Files of text, a record or more on lines of their own: gone through once, and their rows stay in them."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.cache import Arrays, cached, code
from rlhf_core.data.column_kinds import Kinds, from_json, kinds_of, note, to_json
from rlhf_core.data.conversations import bad_text
from rlhf_core.data.lazy_rows import Content, FileRows, Row
from rlhf_core.data.report import Problems
from rlhf_core.data.source import digest
from rlhf_core.errors import InputError

Numbers = Sequence[int] | NDArray[np.int64]
Found = tuple[Sequence[Mapping[str, Any]], Numbers, Kinds]


PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstandard", b"PK\x03\x04": "zip", b"PAR1": "parquet"}
"""How files that are no text begin."""
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
    """Where the records of a text file are, gathered while it is gone through."""

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
        note(self.kinds, row)

    def arrays(self) -> Arrays:
        return {
            "starts": np.array(self.starts, np.int64),
            "stops": np.array(self.stops, np.int64),
            "numbers": np.array(self.numbers, np.int64),
            "checks": np.array(self.checks, np.uint32),
            "kinds": np.frombuffer(to_json(self.kinds).encode(), np.uint8),
        }


def indexed(
    content: Content,
    kind: str,
    parse: Callable[[bytes], Row],
    records: Callable[[Content], Iterator[tuple[int, int, int, bytes]]],
    checked: Callable[[int, bytes, Problems], Row | None],
) -> Found:
    """Rows of the records of a text file, all of which are parsed once unless that was done before.

    records: (start, stop, number, bytes) of each. checked: its row, or None and a problem.
    """
    require_text(content)

    def build() -> list[Arrays]:
        index, problems = _Index(), Problems()
        for start, stop, number, record in records(content):
            row = checked(number, record, problems)
            if row is not None:
                index.add(start, stop, number, record, row)
        problems.stop()
        return [index.arrays()]

    found = build()[0] if content.held else cached(f"rows-{digest(kind, content.sha256, code())[:40]}", build)
    starts, stops, checks, numbers = (found[name] for name in ("starts", "stops", "checks", "numbers"))
    kinds = from_json(bytes(found["kinds"]).decode())
    return FileRows(content, parse, starts, stops, checks, numbers), numbers, kinds


def lines(content: Content) -> Iterator[tuple[int, int, int, bytes]]:
    """Lines that are not blank. Only a line feed ends one: JSON strings may hold U+2028 and its kin."""
    start = 0
    for number, line in enumerate(content.stream(), 1):
        stop = start + len(line)
        if number == 1 and line.startswith(BOM):
            start, line = len(BOM), line[len(BOM) :]
        if line.strip():
            line = line.removesuffix(b"\n")
            yield start, start + len(line), number, line
        start = stop


def decoded(name: str, number: int, line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(name, number, line, error.start) from error


HALVES = re.compile(rb"\\u[dD][89a-fA-F]")
"""How JSON writes halves of surrogate pairs, most of which belong to whole ones."""


def jsonl(content: Content) -> Found:
    name = content.name

    def checked(number: int, record: bytes, problems: Problems) -> Row | None:
        text = decoded(name, number, record)
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            problems.add(
                f"{name} row {number} is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
            )
            return None
        except (RecursionError, ValueError) as error:
            problems.add(f"{name} row {number} cannot be read: {_too_much(error)}")
            return None
        if not isinstance(row, dict):
            hint = "; a JSON array goes in a .json file" if isinstance(row, list) else ""
            problems.add(f"{name} row {number} is not a JSON object, but {_kind(row)}{hint}")
            return None
        if HALVES.search(record) and (problem := bad_text(row)):
            problems.add(f"{name} row {number}: {problem}")
            return None
        return row

    return indexed(content, "jsonl", json.loads, lines, checked)


def json_array(content: Content) -> Found:
    """An array, all of whose rows are held in memory."""
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
        if error.msg == "Extra data":  # one object a line under the other name
            return jsonl(content)
        raise InputError(
            f"{name} line {error.lineno} is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        ) from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"{name} cannot be read: {_too_much(error)}") from None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise InputError(f"{name} is {_kind(value)}: a .json file holds an array of objects")
    problems, halves = Problems(), HALVES.search(text.encode())
    for number, row in enumerate(value, 1):
        if not isinstance(row, dict):
            problems.add(f"{name} row {number} is not a JSON object, but {_kind(row)}")
        elif halves and (problem := bad_text(row)):
            problems.add(f"{name} row {number}: {problem}")
    problems.stop()
    return value, range(1, len(value) + 1), kinds_of(value)


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


def txt(content: Content) -> Found:
    def checked(number: int, record: bytes, problems: Problems) -> Row | None:
        text = decoded(content.name, number, record)
        if "\0" in text:
            problems.add(f"{content.name} row {number} has a NUL byte")
            return None
        return _line(text)

    return indexed(content, "txt", lambda record: _line(record.decode()), lines, checked)


def _line(text: str) -> Row:
    return {"text": text.removesuffix("\r")}
