"""The index of a stage's completions for searches, in the user's cache directory: a run is never written."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rlhf_core.runs import StageDirectory
from rlhf_report.watch.rollout_view import WantedRollouts, groups_of, read_sampled, updates_per_rollout

VERSION = 2
"""Of the tables; an index of another version is made anew."""
PLAIN = WantedRollouts()
"""A group with all its completions, as sampled."""


def cache_directory() -> Path:
    """Return the folder of the indices, under XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "rlhf" / "watch"


class SearchIndex:
    """Groups of a stage's completions by rollout, of which those are added that the journal has gained."""

    def __init__(self, stage: StageDirectory) -> None:
        name = hashlib.sha256(os.fsencode(stage.dir)).hexdigest()[:24]
        self.path = cache_directory() / f"{name}-{VERSION}.sqlite"

    def refresh(self, stage: StageDirectory) -> None:
        """Add rollouts that are new or were written anew, and drop those that are gone. Raises OSError."""
        times = updates_per_rollout(stage)
        with closing(self._open()) as database, database:
            known = dict(database.execute("SELECT number, mark FROM rollouts"))
            there = {number: _mark(stage, number, times) for number in stage.rollout_numbers}
            for number in [n for n, mark in known.items() if there.get(n) != mark]:
                for table in ("rollouts", "texts", "groups"):
                    database.execute(f"DELETE FROM {table} WHERE number = ?", (number,))
            for number, mark in there.items():
                if known.get(number) != mark:
                    for place, group in enumerate(_groups(stage, number, times)):
                        content = json.dumps(group)
                        database.execute(
                            "INSERT INTO groups VALUES (?, ?, ?, ?)",
                            (number, place, group["spread"], content),
                        )
                        database.executemany(
                            "INSERT INTO texts VALUES (?, ?, ?, ?, ?, ?)", _texts(number, place, group)
                        )
                    database.execute("INSERT INTO rollouts VALUES (?, ?)", (number, mark))

    def find(self, text: str, sort: str) -> list[tuple[int, int]]:
        """Return (rollout, group) of the groups with a text in a completion, capital letters or not.

        sort: as of `WantedRollouts`, - for the largest first; of a group, by its completion that comes first so. What
        is not known comes last.
        """
        by = sort.removeprefix("-")
        extreme, direction = ("MAX", "DESC") if sort.startswith("-") else ("MIN", "ASC")
        first = f"{extreme}({by})"
        order = "" if by == "order" else f"{first} IS NULL, {first} {direction}, "
        joined = " JOIN groups USING (number, place)" if by == "spread" else ""
        query = (
            f"SELECT number, place FROM texts{joined} WHERE instr(text, ?) GROUP BY number, place "
            f"ORDER BY {order}number, place"
        )
        with closing(self._open()) as database:
            return list(database.execute(query, (text.lower(),)))

    def groups(self, places: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
        """Yield the groups, (rollout, group), as `groups_of` described them."""
        with closing(self._open()) as database:
            for place in places:
                query = "SELECT content FROM groups WHERE number = ? AND place = ?"
                found = database.execute(query, place).fetchone()
                if found is not None:
                    yield json.loads(found[0])

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
            "CREATE TABLE IF NOT EXISTS groups (number INTEGER, place INTEGER, spread REAL, content TEXT, "
            "PRIMARY KEY (number, place))"
        )
        database.execute(
            "CREATE TABLE IF NOT EXISTS texts "
            "(number INTEGER, place INTEGER, reward REAL, length REAL, advantage REAL, text TEXT)"
        )
        database.execute("CREATE INDEX IF NOT EXISTS by_number ON texts (number)")
        return database


def _mark(stage: StageDirectory, number: int, times: int) -> str:
    """Identify what a rollout's groups are read from: its file, and the samples, which may come later."""
    paths = (
        stage.dir / "journal" / f"rollout-{number:06d}.zip",
        stage.dir / "samples" / f"update-{number * times:06d}.jsonl",
    )
    return " ".join(map(_mark_of, paths))


def _mark_of(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return "-"
    return f"{status.st_mtime_ns} {status.st_size}"


def _groups(stage: StageDirectory, number: int, times: int) -> list[dict[str, Any]]:
    """Describe the groups of a rollout; none where its file is damaged."""
    rollout = read_sampled(stage, number * times + 1)
    return [] if rollout is None or not rollout.arrays else groups_of(rollout, PLAIN)


def _texts(number: int, place: int, group: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each completion, its text without half characters."""
    for one in group["completions"]:
        text = one["text"].lower().encode(errors="replace").decode()
        yield number, place, one["reward"], one["length"], one["advantage"], text
