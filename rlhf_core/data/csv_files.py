"""Read CSV files."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

from rlhf_core.data.lazy_rows import Content, Row
from rlhf_core.data.report import Problems
from rlhf_core.data.text_files import BOM, ParsedFile, decode_line, index_records, iterate_lines, require_text
from rlhf_core.errors import InputError

FIELD = re.compile(r'"(?:[^"]|"")*"|[^,\r\n]*')


def read_csv(content: Content) -> ParsedFile:
    """Read CSV rows: an empty cell is null if unquoted, and an empty text if quoted."""
    name = content.name
    csv.field_size_limit(1 << 30)
    require_text(content)
    header: list[str] = []

    def records(content: Content) -> Iterator[tuple[int, int, int, bytes]]:
        source = _CsvLines(content)
        reader = csv.reader(source, strict=True)
        number = 1
        try:
            header.extend(next(reader))
            if len(set(header)) < len(header):
                twice = sorted({column for column in header if header.count(column) > 1})
                raise InputError(f"{name} row 1 names a column twice: {', '.join(twice)}")
            number, start = reader.line_num + 1, source.at
            source.lines.clear()
            for values in reader:
                if values:
                    yield start, source.at, number, "".join(source.lines).encode()
                number, start = reader.line_num + 1, source.at
                source.lines.clear()
        except csv.Error as error:
            raise InputError(f"{name} row {number} is not CSV: {error}") from error
        except UnicodeDecodeError as error:
            raise _encoding_error(content) or error from error

    def check_record(number: int, record: bytes, problems: Problems) -> Row | None:
        values = _split_fields(record.decode())
        if len(values) != len(header):
            problems.add(f"{name} row {number} has {len(values)} fields, its header has {len(header)}")
            return None
        if b"\0" in record:
            problems.add(f"{name} row {number} has a NUL byte")
            return None
        return dict(zip(header, values, strict=True))

    def parse(record: bytes) -> Row:
        if not header:  # the file's index came from the cache
            header.extend(next(csv.reader(_CsvLines(content), strict=True)))
        return dict(zip(header, _split_fields(record.decode()), strict=True))

    return index_records(content, "csv", parse, records, check_record)


def _split_fields(record: str) -> list[str | None]:
    """Split one record into fields, with None for empty unquoted ones."""
    values: list[str | None] = list(next(csv.reader(io.StringIO(record, newline=""), strict=True)))
    if "" not in values:
        return values
    at = 0
    for i, value in enumerate(values):
        field = FIELD.match(record, at)
        assert field is not None
        if value == "" and not field.group():
            values[i] = None
        at = field.end() + 1  # the comma
    return values


class _CsvLines:
    """Iterate over the lines of a file for `csv`, with their line ends, tracking the byte offset."""

    def __init__(self, content: Content) -> None:
        stream = content.stream()
        self.at = len(BOM) if content.read(0, len(BOM)) == BOM else 0
        stream.seek(self.at)
        self._text = io.TextIOWrapper(stream, "utf-8", newline="")
        self.lines: list[str] = []

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        line = next(self._text)
        self.at += len(line) if line.isascii() else len(line.encode())
        self.lines.append(line)
        return line


def _encoding_error(content: Content) -> InputError | None:
    """Make the error for the first line that is not UTF-8."""
    for _, _, number, line in iterate_lines(content):
        try:
            decode_line(content.name, number, line)
        except InputError as error:
            return error
    return None
