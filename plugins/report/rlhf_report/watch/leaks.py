"""Held-out prompts that the training data of a stage have, too, and in which rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.runs import StageDirectory
from rlhf_report.samples import text_of
from rlhf_report.watch.growing import parse
from rlhf_report.watch.rows_view import data_files

MOST_BYTES = 2**25
"""Bytes of each file that are read; what lies behind them is not looked at."""

Place = tuple[str, int]
"""A row of a data file: its path, and its line, counted from 1."""


@dataclass(frozen=True)
class Leaked:
    """What was compared, and what was found.

    held_out, training: how many prompts of each were read. rows: {row of the held-out data: the first row of the
    training data with its prompt}.
    """

    held_out: int = 0
    training: int = 0
    rows: Mapping[Place, Place] = field(default_factory=dict)


class Leaks:
    """The leaks of a stage, looked for again where its data files have changed."""

    def __init__(self) -> None:
        self._known: tuple[Any, Leaked] = (None, Leaked())

    def of(self, stage: StageDirectory) -> Leaked:
        """Compare the prompts of a stage's `train_data` and `eval_data`, to the letter."""
        train, held_out = (
            sorted(set(data_files(stage, name).values())) for name in ("train_data", "eval_data")
        )
        mark = [(path, _mark(path)) for path in (*train, *held_out)]
        if self._known[0] != mark:
            self._known = mark, _compared(train, held_out)
        return self._known[1]


def _mark(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _compared(train: Sequence[str], held_out: Sequence[str]) -> Leaked:
    wanted: dict[str, list[Place]] = {}
    for path in held_out:
        for line, prompt in _prompts_of(path):
            wanted.setdefault(prompt, []).append((path, line))
    if not wanted:
        return Leaked()
    count = sum(map(len, wanted.values()))
    read = 0
    rows: dict[Place, Place] = {}
    for path in train:
        for line, prompt in _prompts_of(path):
            read += 1
            for place in wanted.pop(prompt, ()):
                rows[place] = (path, line)
    return Leaked(count, read, rows)


def _prompts_of(path: str) -> Iterator[tuple[int, str]]:
    """Yield (line, prompt) of a .jsonl file, or the texts of rows without one; nothing of other or unreadable files."""
    if not path.endswith(".jsonl"):
        return
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file.readlines(MOST_BYTES), 1):
                row = parse(line)
                prompt = "" if row is None else _prompt_of(row)
                if prompt:
                    yield number, prompt
    except OSError:
        return


def _prompt_of(row: Mapping[str, Any]) -> str:
    said = row.get("messages")
    if isinstance(said, list):
        return text_of(said[:-1])
    return next((text_of(row[name]) for name in ("prompt", "question", "text", "chosen") if name in row), "")
