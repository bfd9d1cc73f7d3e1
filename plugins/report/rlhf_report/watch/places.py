"""Where runs are: the directories that were named, and runs within them. Ids of runs, and links that leave a run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_report.run_reader import RESOLVED

DEPTH = 3
"""How many folders below a directory that was named runs are looked for."""
UNREAD = ("artifacts", "checkpoints")
"""Folders of a stage that may well be links to another disk; the page reads a tokenizer from the first."""


def run_id(path: Path) -> str:
    """Name a run for addresses: the same for a directory after the server starts again."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]


def find_runs(directories: Sequence[Path], problems: list[str]) -> dict[str, Path]:
    """Return {id: directory} of the runs in and below the directories; names those that cannot be read."""
    found = {}
    for directory in directories:
        named = directory.expanduser().absolute()
        if not os.path.lexists(named):
            problems.append(f"{named}: is not there yet, or not any more")
        for path in _runs(named, DEPTH, problems):
            found[run_id(path)] = path
    return found


def _runs(directory: Path, depth: int, problems: list[str]) -> Iterator[Path]:
    try:
        with os.scandir(directory) as entries:
            folders = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        if os.path.isfile(directory / RESOLVED) or _is_stage(directory) or any(map(_is_stage, folders)):
            yield directory
            return
    except FileNotFoundError:
        return  # it may come, or was deleted
    except OSError as error:
        problems.append(f"{directory}: {error.strerror}")
        return
    if depth:
        for folder in sorted(folders):
            if not folder.name.startswith("."):
                yield from _runs(folder, depth - 1, problems)


def _is_stage(path: Path) -> bool:
    # Unlike Path.is_file, this takes a folder that may not be read for one without the file: it is named when it is
    # looked into, and does not hide those beside it.
    return any(os.path.isfile(path / name) for name in ("stage.json", "before.json", "metrics.jsonl"))


def links_that_leave(run: Path) -> list[Path]:
    """List the links within a run, at most three folders deep, whose targets are outside it. Raises OSError."""
    root = os.path.realpath(run) + os.sep
    return [Path(path) for path in _links(str(run), 3) if not os.path.realpath(path).startswith(root)]


def _links(directory: str, depth: int) -> Iterator[str]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_symlink():
                if entry.name not in UNREAD:
                    yield entry.path
            elif depth > 1 and entry.name not in UNREAD and entry.is_dir():
                yield from _links(entry.path, depth - 1)


def is_within(path: Path, run: Path) -> bool:
    """Return whether a path, its links followed, is in the run."""
    return os.path.realpath(path).startswith(os.path.realpath(run) + os.sep)
