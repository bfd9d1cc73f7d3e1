"""JSON lines of files that grow: what was added since the last reading, or their end and samples of the rest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

END = 64 * 1024
"""Bytes of a file's end that `ends` reads."""
PIECES = 64
"""How many pieces of the rest it reads, evenly spread."""
PIECE = 4 * 1024
"""Bytes of such a piece."""
LONGEST = 16 * 2**20
"""Bytes of a line; a file with a longer one is read up to it."""

Row = dict[str, Any]


@dataclass
class GrowingRows:
    """The rows of a file of JSON lines, of which `refresh` reads what was added.

    damaged: lines that are no JSON object. torn: whether the last line does not end, as while it is written.
    replaced: how often the file was written anew, and read from its start.
    """

    path: Path
    rows: list[Row] = field(default_factory=list)
    damaged: int = 0
    torn: bool = False
    replaced: int = 0
    _offset: int = 0
    _inode: int = 0
    _last: bytes = b""
    """The last bytes that were read, which are not there any more where the file was cut and has grown again."""

    def refresh(self) -> None:
        """Read the lines that were added and end; none where the file is missing. Raises OSError."""
        try:
            with open(self.path, "rb") as file:
                self._read(file)
        except FileNotFoundError:
            self._restart(0)

    def _read(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._offset or not self._continues(file):
            self._restart(status.st_ino)
        file.seek(self._offset)
        for line in _whole_lines(file):
            self._offset += len(line)
            self._last = line[-64:]
            self._add(line)
        self.torn = self._offset < status.st_size

    def _continues(self, file: BinaryIO) -> bool:
        file.seek(self._offset - len(self._last))
        return file.read(len(self._last)) == self._last

    def _restart(self, inode: int) -> None:
        self.replaced += self._offset > 0
        self.rows, self.damaged = [], 0
        self._offset, self._inode, self._last = 0, inode, b""

    def _add(self, line: bytes) -> None:
        row = parse(line)
        if row is not None:
            self.rows.append(row)
        elif line.strip():
            self.damaged += 1


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines that end, up to one that is too long."""
    while True:
        line = file.readline(LONGEST)
        if not line.endswith(b"\n"):
            return
        yield line


def parse(line: bytes) -> Row | None:
    """Read a line; None for what is no JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def ends(path: Path) -> tuple[list[Row], list[Row]]:
    """Return (one row of each of at most `PIECES` pieces, the rows of the file's last `END` bytes).

    A file is read whole where it is no longer than its end. Raises OSError.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = max(size - END, 0)
        spread = []
        count = min(PIECES, start // PIECE)
        for place in range(count):
            file.seek(place * start // count)
            row = _first_row(file.read(PIECE), whole=place == 0)
            if row is not None:
                spread.append(row)
        file.seek(start)
        lines = file.read(END).split(b"\n")
    if start:
        lines = lines[1:]
    rows = [parse(line) for line in lines[:-1]]
    return spread, [row for row in rows if row is not None]


def _first_row(piece: bytes, *, whole: bool) -> Row | None:
    """Return the first row that a piece holds from its beginning to its end. whole: a row begins with the piece."""
    lines = piece.split(b"\n")[:-1]
    return next((row for row in map(parse, lines if whole else lines[1:]) if row is not None), None)
