"""Truncate a stage's per-step files when a run resumes, and flush them to disk before each checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from rlhf_core.loggers import JsonLines
from rlhf_core.loggers.jsonl import FILE as METRICS
from rlhf_core.runtime.files import attempt, flush, flush_lines, remove

BEST = "best.json"
FOLDERS = ("samples", "evaluations")
"""Folders of files named by the updates done: `update-000012.jsonl`, `evaluation-000012.jsonl`, `000012.json`."""
_NAME = re.compile(r"(?:.*-)?(\d{6,})\.jsonl?")


def cut(directory: Path, step: int) -> None:
    """Delete the rows and files of steps after `step`, which a run that resumes there will write again.

    step: −1 when a run begins: everything that an earlier run without a checkpoint left is deleted.
    """
    JsonLines.cut(directory / METRICS, step)
    for folder in FOLDERS:
        attempt(lambda folder=folder: _cut_folder(directory / folder, step), folder, directory / folder)  # type: ignore[misc]
    attempt(lambda: remove(directory / BEST), BEST, directory / BEST)  # written when the stage ends


def sync(directory: Path) -> None:
    """Flush a stage's metrics to disk; its other files were flushed when they were written."""
    flush_lines(directory / METRICS)


def _cut_folder(folder: Path, step: int) -> None:
    later = [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(path.name)) and int(match[1]) > step
    ]
    for path in later:
        path.unlink()
    if later:
        flush(folder)
