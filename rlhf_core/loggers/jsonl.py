"""Write metrics.jsonl: one JSON object per logged step, for programs to read; and digests that chain its rows."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from rlhf_core.errors import UNREADABLE, limited_lines, warn
from rlhf_core.plugins.hooks import hookimpl
from rlhf_core.runtime.files import append_line, write_atomic

if TYPE_CHECKING:
    from rlhf_core.stage import Stage

FILE = "metrics.jsonl"
DIGESTS = "metrics.sha256"
"""Beside FILE, a line for each of its rows: the hexadecimal SHA-256 of the line before it, if any, and the row, line
ends included. A row that is changed, removed or moved later fits none of the lines from there on.
"""
DIGEST_BYTES = 65
"""Of a line of DIGESTS."""


@dataclass(eq=False)
class JsonLines:
    """Append rows to STAGE_DIR/metrics.jsonl: `step` (updates done), `time` (seconds since 1970), the metrics.

    every_process: also write metrics-1.jsonl, metrics-2.jsonl, … of the further processes of a job.
    Strict JSON: a metric that is not finite is null. A killed run truncates at most the last row. Rows are flushed to
    disk before the checkpoint of their step. Those of the first process are chained, see DIGESTS.
    """

    every_process: bool = False

    @hookimpl(tryfirst=True)
    def rlhf_step_end(self, stage: Stage, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step, "time": round(time.time(), 3), **strict(metrics)}
        if not (stage.is_main or self.every_process):
            return
        file = FILE if stage.is_main else f"metrics-{jax.process_index()}.jsonl"
        line = json.dumps(row, allow_nan=False)
        append_line(stage.dir / file, line)
        if stage.is_main:
            path = stage.dir / DIGESTS
            append_line(path, _digest(_last_digest(path), f"{line}\n".encode()))

    @staticmethod
    def cut(path: str | Path, step: int) -> None:
        """Drop the rows after `step` and an incomplete last line, so that a resumed run logs no step twice.

        An earlier line that is not a JSON object is dropped with a warning. A missing file is not created. Digests are
        cut alike; a row without one, of a version that wrote none or a power cut, gets it now.
        """
        path = Path(path)
        before = path.read_bytes() if path.exists() else b""
        lines = before.splitlines(keepends=True)
        kept = []
        for number, line in enumerate(lines, 1):
            row = _row(line)
            if row is None and number < len(lines):
                warn(f"{path} line {number} is not a JSON object with a step; dropped")
            elif row is not None and row <= step:
                kept.append(line)
        after = b"".join(kept)
        if after != before:
            write_atomic(path, after)
        if path.name == FILE:
            _cut_digests(path.with_name(DIGESTS), kept)


def _digest(before: bytes, row: bytes) -> str:
    return hashlib.sha256(before + row).hexdigest()


def _last_digest(path: Path) -> bytes:
    """Return the last line of DIGESTS, line end included; empty where there is none."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - DIGEST_BYTES, 0))
        return file.read()


def _cut_digests(path: Path, rows: Sequence[bytes]) -> None:
    """Keep the digests of the first of `rows`, and add those that are missing."""
    before = path.read_bytes() if path.exists() else b""
    complete = min(len(before) // DIGEST_BYTES, len(rows))
    after = before[: complete * DIGEST_BYTES]
    for row in rows[complete:]:
        after += f"{_digest(after[-DIGEST_BYTES:], row)}\n".encode()
    if after != before:
        write_atomic(path, after)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the complete rows of metrics.jsonl."""
    for line in limited_lines(path):
        if _row(line) is not None:
            yield json.loads(line)


def strict(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics as plain floats, with None for values that JSON cannot hold."""
    return {name: float(x) if math.isfinite(x) else None for name, x in metrics.items()}


def _row(line: bytes) -> int | None:
    """Return the step of a complete row; None for an incomplete one, even if only its line end is missing."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except UNREADABLE:
        return None
    return step if type(step) is int else None
