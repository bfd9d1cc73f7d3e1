"""Answers of a judge on disk, each under a hash of its question, and which questions went unanswered when."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.artifacts import write_atomic
from rlhf_core.errors import UNREADABLE, read_limited
from rlhf_core.runtime.files import append_line

UNANSWERED = "unanswered.jsonl"


def question_key(body: Mapping[str, Any], vote: int) -> str:
    """Hash a request (model, settings and texts) and the number of the vote: 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps([body, vote], sort_keys=True).encode()).hexdigest()


class Answers:
    """Keeps one JSON file per answer: DIRECTORY/ab/abcd….json. A damaged file counts as absent.

    Runs may share the directory, since an answer depends on its question alone. Questions that got no answer are noted
    in `notes`, a directory of one stage, with the number of the call in which they were asked: a resumed run repeats
    the call, and must leave the same completions unscored, while a later call asks again.
    """

    def __init__(self, directory: Path, notes: Path) -> None:
        self.directory, self._notes = directory, notes / UNANSWERED
        self._unanswered: dict[tuple[int, str], int] = {}
        try:
            for line in self._notes.read_text().splitlines():
                note = json.loads(line)
                self._unanswered[note["call"], note["key"]] = note["failures"]
        except UNREADABLE:  # missing, or its last line was never finished
            pass

    def _path(self, key: str) -> Path:
        return self.directory / key[:2] / f"{key}.json"

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the record of an answer, if it is kept."""
        try:
            record = json.loads(read_limited(self._path(key)))
            return {**record, "answer": str(record["answer"]), "failures": int(record["failures"])}
        except UNREADABLE:
            return None

    async def keep(self, key: str, record: Mapping[str, Any]) -> None:
        """Write a record, so that it is whole or absent after a crash."""
        text = json.dumps(record, indent=1) + "\n"
        await asyncio.to_thread(write_atomic, self._path(key), text)

    def failures(self, call: int, key: str) -> int | None:
        """Return how many requests failed where a question went unanswered in this call; None where it did not."""
        return self._unanswered.get((call, key))

    def note_unanswered(self, call: int, key: str, failures: int) -> None:
        """Note that a question went unanswered in a call."""
        self._unanswered[call, key] = failures
        append_line(self._notes, json.dumps({"call": call, "key": key, "failures": failures}), durable=True)


def has_answers(directory: Path) -> bool:
    """Check whether any answer is kept in a directory."""
    return any(directory.glob("??/*.json"))
