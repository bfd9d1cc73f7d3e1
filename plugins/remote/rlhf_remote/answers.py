"""Answers of a judge on disk, each under a hash of its question, and which questions went unanswered when."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_core.artifacts import write_atomic
from rlhf_core.errors import UNREADABLE, InputError, library_words, limited_lines, read_limited, reading
from rlhf_core.runtime.files import CHECKSUM, append_line, checksum, seal, unseal

UNANSWERED = "unanswered.jsonl"
NOTE = b'{"call": '
"""How each line of it begins."""


def question_key(body: Mapping[str, Any], vote: int) -> str:
    """Hash a request (model, settings and texts) and the number of the vote: 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps([body, vote], sort_keys=True).encode()).hexdigest()


class Answers:
    """Keeps one JSON file per answer: DIRECTORY/ab/abcd….json. A damaged file counts as absent, by its checksum.

    Runs may share the directory, since an answer depends on its question alone. Questions that got no answer are noted
    in `notes`, a directory of one stage, with the number of the call in which they were asked: a resumed run repeats
    the call, and must leave the same completions unscored, while a later call asks again. Raises InputError where such
    a note is damaged. Earlier versions wrote answers and notes without a checksum, which are read as they are.
    """

    def __init__(self, directory: Path, notes: Path) -> None:
        self.directory = directory
        self._notes = notes / UNANSWERED
        self._unanswered: dict[tuple[int, str], int] = {}
        if not self._notes.exists():
            return
        with reading(self._notes):
            for number, line in enumerate(limited_lines(self._notes), 1):
                if not _is_torn(line):
                    call, key, failures = self._read_note(number, line)
                    self._unanswered[call, key] = failures

    def _read_note(self, number: int, line: bytes) -> tuple[int, str, int]:
        """Return the call, the key and the failures of a note. Raises InputError where it is damaged."""
        try:
            note = json.loads(line)
            written = note.pop(CHECKSUM, None)
            if written not in (None, checksum(note)):
                raise ValueError("its checksum does not match")
            call, key, failures = note["call"], note["key"], note["failures"]
            if type(call) is not int or type(key) is not str or type(failures) is not int:
                raise ValueError("it has another form")
        except UNREADABLE as error:
            raise InputError(
                f"{self._notes} line {number} is damaged ({library_words(error)}): restore it, or delete the line "
                "to ask its question again"
            ) from error
        return call, key, failures

    def _path(self, key: str) -> Path:
        return self.directory / key[:2] / f"{key}.json"

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the record of an answer, if it is kept."""
        try:
            content = read_limited(self._path(key))
            record = json.loads(content)
            if CHECKSUM in record:
                record = unseal(content)
                # The file of another answer may be in its place.
                if record.pop("key") != key:
                    return None
            return {**record, "answer": str(record["answer"]), "failures": int(record["failures"])}
        except UNREADABLE:
            return None

    async def keep(self, key: str, record: Mapping[str, Any]) -> None:
        """Write a record, so that it is whole or absent after a crash."""
        await asyncio.to_thread(write_atomic, self._path(key), seal({**record, "key": key}))

    def failures(self, call: int, key: str) -> int | None:
        """Return how many requests failed where a question went unanswered in this call; None where it did not."""
        return self._unanswered.get((call, key))

    def note_unanswered(self, call: int, key: str, failures: int) -> None:
        """Note that a question went unanswered in a call."""
        self._unanswered[call, key] = failures
        note = {"call": call, "key": key, "failures": failures}
        append_line(self._notes, json.dumps({**note, CHECKSUM: checksum(note)}), durable=True)


def _is_torn(line: bytes) -> bool:
    """Check whether a line is empty, or the part of a note that a killed process left, which the next one ends."""
    written = line.rstrip()
    if written.endswith(b"}") or not NOTE.startswith(written[: len(NOTE)]):
        return False
    with suppress(*UNREADABLE):
        json.loads(written[:-1] + b"}")
        # It is whole but for its last byte, which is another.
        return False
    return True


def has_answers(directory: Path) -> bool:
    """Check whether any answer is kept in a directory."""
    return any(directory.glob("??/*.json"))
