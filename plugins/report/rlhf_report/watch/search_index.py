"""The index of a stage's completions for searches, in the user's cache directory: a run is never written."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from rlhf_core.runs import StageDirectory
from rlhf_report.samples import text_of
from rlhf_report.watch.listing import finite
from rlhf_report.watch.rollout_view import group_size

VERSION = 1
"""Of the tables; an index of another version is made anew."""
SORTS = ("order", "reward", "length")
"""What the index can sort by."""


def cache_directory() -> Path:
    """Return the folder of the indices, under XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "rlhf" / "watch"


class SearchIndex:
    """Texts of a stage's completions by rollout, of which those are added that the journal has gained."""

    def __init__(self, stage: StageDirectory) -> None:
        name = hashlib.sha256(os.fsencode(stage.dir)).hexdigest()[:24]
        self.path = cache_directory() / f"{name}-{VERSION}.sqlite"

    def refresh(self, stage: StageDirectory) -> None:
        """Add rollouts that are new or were written anew, and drop those that are gone. Raises OSError."""
        with closing(self._open()) as database, database:
            known = dict(database.execute("SELECT number, mark FROM rollouts"))
            there = {number: _mark(stage, number) for number in stage.rollout_numbers}
            for number in [n for n, mark in known.items() if there.get(n) != mark]:
                database.execute("DELETE FROM rollouts WHERE number = ?", (number,))
                database.execute("DELETE FROM texts WHERE number = ?", (number,))
            for number, mark in there.items():
                if known.get(number) != mark:
                    database.executemany("INSERT INTO texts VALUES (?, ?, ?, ?, ?)", _rows(stage, number))
                    database.execute("INSERT INTO rollouts VALUES (?, ?)", (number, mark))

    def find(self, text: str, sort: str) -> list[tuple[int, int]]:
        """Return (rollout, group) of the groups with a text in a completion, capital letters or not.

        sort: one of `SORTS`, with a - for the largest first; of a group, by its completion that comes first so.
        """
        by = sort.removeprefix("-")
        largest = sort.startswith("-")
        first = f"{'MAX' if largest else 'MIN'}({by})"
        order = "" if by == "order" else f"{first} IS NULL, {first} {'DESC' if largest else 'ASC'}, "
        query = (
            "SELECT number, place FROM texts WHERE instr(text, ?) GROUP BY number, place "
            f"ORDER BY {order}number, place"
        )
        with closing(self._open()) as database:
            return list(database.execute(query, (text.lower(),)))

    def _open(self) -> sqlite3.Connection:
        """Open the file, made anew where it is damaged. It is the user's alone: completions may be private."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            return self._connected()
        except sqlite3.DatabaseError:
            self.path.unlink(missing_ok=True)
            return self._connected()

    def _connected(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, timeout=30)
        os.chmod(self.path, 0o600)
        database.execute("CREATE TABLE IF NOT EXISTS rollouts (number INTEGER PRIMARY KEY, mark TEXT)")
        database.execute(
            "CREATE TABLE IF NOT EXISTS texts (number INTEGER, place INTEGER, reward REAL, length REAL, text TEXT)"
        )
        database.execute("CREATE INDEX IF NOT EXISTS by_number ON texts (number)")
        return database


def _mark(stage: StageDirectory, number: int) -> str:
    try:
        status = (stage.dir / "journal" / f"rollout-{number:06d}.zip").stat()
    except OSError:
        return ""
    return f"{status.st_mtime_ns} {status.st_size}"


def _rows(stage: StageDirectory, number: int) -> Iterator[tuple[int, int, float | None, float | None, str]]:
    """Yield a row for each completion: rollout, group, reward, length and text without half characters."""
    file = stage.rollout_file(number)
    if file is None:
        return
    group = group_size(stage, file.samples, file.arrays)
    for place, sample in enumerate(file.samples):
        text = text_of(sample.get("completion")).lower().encode(errors="replace").decode()
        yield number, place // group, finite(sample.get("reward")), finite(sample.get("length")), text
