"""Files of a stage that have something per step: cut when a run goes on, on the disk before a checkpoint is."""

from __future__ import annotations

import re
from pathlib import Path

from rlhf_core.loggers import JsonLines
from rlhf_core.loggers.jsonl import FILE as METRICS
from rlhf_core.runtime.disk_errors import attempt
from rlhf_core.runtime.files import flush, flush_lines, remove

BEST = "best.json"
FOLDERS = ("samples", "evaluations")
"""Of files named by the updates done before them: `update-000012.jsonl`, `evaluation-000012.jsonl`, `000012.json`."""
_NAME = re.compile(r"(?:.*-)?(\d{6,})\.jsonl?")


def cut(directory: Path, step: int) -> None:
    """Delete what a stage's files say of the steps after `step`, which a run that goes on from there does again.

    step: −1 where a run begins, with nothing kept of one before that saved no state.
    """
    JsonLines.cut(directory / METRICS, step)
    for folder in FOLDERS:
        attempt(lambda folder=folder: _cut_folder(directory / folder, step), folder, directory / folder)  # type: ignore[misc]
    attempt(lambda: remove(directory / BEST), BEST, directory / BEST)  # written when the stage ends


def sync(directory: Path) -> None:
    """Bring to the disk what was written of a stage so far; whole files are there already."""
    flush_lines(directory / METRICS)


def _cut_folder(folder: Path, step: int) -> None:
    later = [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (found := _NAME.fullmatch(path.name)) and int(found[1]) > step
    ]
    for path in later:
        path.unlink()
    if later:
        flush(folder)
