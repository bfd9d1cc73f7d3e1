"""Sequences of rows that are parsed on access, from text files and Arrow tables."""

from __future__ import annotations

import io
import os
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.cache import cache_directory
from rlhf_core.errors import InputError

IN_MEMORY = 1 << 23
"""Bytes: files up to this size are held in memory, so later changes to them do not matter."""
RECENT = 256
"""Parsed rows to keep, because callers read several columns of one row one after another."""
BLOCK = 1 << 20

Row = dict[str, Any]


class Content:
    """The bytes of a file, in memory if it is small, else read through its open descriptor."""

    def __init__(self, name: str, file: BinaryIO) -> None:
        """name: what messages call it."""
        self.name = name
        self.size = os.fstat(file.fileno()).st_size
        self._file: BinaryIO | None = file
        self._bytes = b""
        if self.size <= IN_MEMORY:
            self._bytes, self._file = file.read(), None
            self.size = len(self._bytes)
            file.close()

    @property
    def in_memory(self) -> bool:
        """Whether the whole file is in memory."""
        return self._file is None

    def read(self, start: int, stop: int) -> bytes:
        if self._file is None:
            return self._bytes[start:stop]
        parts = []
        while start < stop and (part := os.pread(self._file.fileno(), stop - start, start)):
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def stream(self) -> BinaryIO:
        """Open a stream at the beginning, independent of other streams."""
        return io.BufferedReader(_Stream(self), BLOCK)

    @cached_property
    def sha256(self) -> str:
        content_hash = sha256()
        for start in range(0, self.size, BLOCK):
            content_hash.update(self.read(start, start + BLOCK))
        return content_hash.hexdigest()


class _Stream(io.RawIOBase):
    def __init__(self, content: Content) -> None:
        self._content, self._at = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._content.size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._content.read(self._at, self._at + len(buffer))
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def spool(write: Callable[[BinaryIO], object]) -> BinaryIO:
    """Fill an unnamed temporary file with `write`, in the cache directory if possible, since /tmp may be memory."""
    directory: Path | None = cache_directory()
    with suppress(OSError):
        assert directory is not None
        directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory or ".", os.W_OK):
        directory = None
    file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
    write(file)
    file.seek(0)
    return file


class FileRows(Sequence[Row]):
    """Records of a text file, each parsed on access."""

    def __init__(
        self,
        content: Content,
        parse: Callable[[bytes], Row],
        starts: NDArray[np.int64],
        stops: NDArray[np.int64],
        checks: NDArray[np.uint32],
        numbers: NDArray[np.int64],
    ) -> None:
        """parse: makes a row of a record's bytes. starts, stops: byte range of each record. checks: its CRC-32.
        numbers: its first line, 1-based.
        """
        self.content, self.parse = content, parse
        self.starts, self.stops, self.checks, self.numbers = starts, stops, checks, numbers
        self._recent: OrderedDict[int, Row] = OrderedDict()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return self._read_range(range(len(self))[i])
        i = range(len(self))[i]
        row = self._recent.pop(i, None)
        self._recent[i] = row = self._parse_row(i, self._read_record(i)) if row is None else row
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        return row

    def _read_range(self, rows: range) -> list[Row]:
        if len(rows) < 2 or rows.step != 1:
            return [self._parse_row(i, self._read_record(i)) for i in rows]
        first = int(self.starts[rows[0]])
        block = self.content.read(first, int(self.stops[rows[-1]]))
        starts, stops = ((x[rows.start : rows.stop] - first).tolist() for x in (self.starts, self.stops))
        return [self._parse_row(i, block[a:b]) for i, a, b in zip(rows, starts, stops, strict=True)]

    def _read_record(self, i: int) -> bytes:
        return self.content.read(int(self.starts[i]), int(self.stops[i]))

    def _parse_row(self, i: int, record: bytes) -> Row:
        if not self.content.in_memory and zlib.crc32(record) != self.checks[i]:
            raise InputError(
                f"{self.content.name} row {self.numbers[i]} has changed since the file was read: start again, and "
                "leave the file as it is meanwhile"
            )
        return self.parse(record)


class TableRows(Sequence[Row]):
    """Rows of an Arrow table, converted on access."""

    def __init__(self, table: Any, owner: Any = None) -> None:
        """owner: an object that must live as long as the table."""
        self.table, self.owner = table, owner

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            rows = range(len(self))[i]
            if rows.step != 1:
                return [self[k] for k in rows]
            return drop_nulls(self.table.slice(rows.start, len(rows)).to_pylist())
        return drop_nulls(self.table.slice(range(len(self))[i], 1).to_pylist())[0]


class DatasetRows(Sequence[Row]):
    """Rows of a `datasets.Dataset`, read from its files on access."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            rows = range(len(self))[i]
            if rows.step != 1:
                return [self[k] for k in rows]
            return drop_nulls(self.dataset[rows.start : rows.stop].to_pylist()) if len(rows) else []
        i = range(len(self))[i]
        return drop_nulls(self.dataset[i : i + 1].to_pylist())[0]


def drop_nulls(rows: Iterable[Row]) -> list[Row]:
    """Drop the nulls inside conversations and tools of an Arrow table's rows; null columns stay null.

    Arrow gives every object of a column the keys of all of them, so a message gets a null `tool_calls`, and a tool
    gets the parameters of all other tools.
    """
    structured = {"prompt", "completion", "chosen", "rejected", "messages", "conversations", "tools"}
    structured.add("chat_template_kwargs")
    return [
        {name: _without_nulls(cell) if name in structured else cell for name, cell in row.items()}
        for row in rows
    ]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
