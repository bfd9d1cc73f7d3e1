"""Rows of the page: training rows with their losses, held-out rows with what changed, and their texts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.hidden import scrub
from rlhf_core.runs import StageDirectory
from rlhf_report.samples import text_of
from rlhf_report.watch.listing import finite
from rlhf_report.watch.rollout_view import read_arrays

MOST = 500
"""Rows of one answer."""
LARGEST_FILE = 2**28
"""Bytes of a data file whose rows are shown with their texts."""
LONGEST = 2000
"""Characters of a row's text."""
NAMES = ("row", "file", "set")
"""What names a row of an evaluation, besides its values."""
PARTS = ("prompt", "messages", "text", "chosen", "rejected", "completion", "question", "answer")
"""Columns whose texts are shown, in this order."""


class DataRows:
    """Rows of data files, by the numbers that messages use; only .jsonl files have texts."""

    def __init__(self) -> None:
        self._starts: dict[str, tuple[int, np.ndarray]] = {}

    def text(self, path: str, number: int) -> str:
        """Return the text of a row, empty where it is not known."""
        try:
            starts = self._lines(path)
            if not 1 <= number < len(starts):
                return ""
            with open(path, "rb") as file:
                file.seek(int(starts[number - 1]))
                row = json.loads(file.read(int(starts[number] - starts[number - 1])))
        except (OSError, ValueError, RecursionError):
            return ""
        if not isinstance(row, Mapping):
            return ""
        parts = [f"{name}: {text_of(row[name])}" for name in PARTS if name in row]
        return scrub("\n".join(parts))[:LONGEST]

    def _lines(self, path: str) -> np.ndarray:
        """Return where the lines of a file begin, and its end, int64 [lines + 1]; nothing for another kind of file."""
        if not path.endswith(".jsonl"):
            return np.zeros(0, np.int64)
        status = os.stat(path)
        if status.st_size > LARGEST_FILE:
            return np.zeros(0, np.int64)
        known = self._starts.get(path)
        if known is None or known[0] != status.st_mtime_ns:
            content = np.fromfile(path, np.uint8)
            starts = np.concatenate([[0], np.flatnonzero(content == ord("\n")) + 1])
            if len(content) and content[-1] != ord("\n"):
                starts = np.append(starts, len(content))
            known = (status.st_mtime_ns, starts.astype(np.int64))
            self._starts[path] = known
        return known[1]


def data_files(stage: StageDirectory, field: str) -> dict[str, str]:
    """Return {name in messages: path} of the files of `train_data` or `eval_data`."""
    found: dict[str, str] = {}
    _collect(stage.config.get(field), found)
    return found


def _collect(value: Any, found: dict[str, str]) -> None:
    if isinstance(value, str):
        found[os.path.basename(value)] = value
    elif isinstance(value, list):
        for each in value:
            _collect(each, found)
    elif isinstance(value, Mapping):
        _collect(value.get("path"), found)
        for name, each in value.items():
            if isinstance(each, Mapping) or (
                isinstance(each, str) and name not in ("path", "name", "format")
            ):
                _collect(each, found)


def named(files: Mapping[str, str], number: int, file: str | None, texts: DataRows) -> dict[str, Any]:
    """Name a row and read its text. file: its file's name; None where the data are a single one."""
    name = next(iter(files)) if file is None and len(files) == 1 else file
    path = _path_of(files, file)
    return {
        "row": number,
        "where": f"{os.path.basename(name)} row {number}" if name else f"row {number}",
        "text": "" if path is None else texts.text(path, number),
    }


def _path_of(files: Mapping[str, str], file: str | None) -> str | None:
    """Return the path of the file that a row is in; None where that is not known."""
    if file is None and len(files) == 1:
        return next(iter(files.values()))
    return files.get(os.path.basename(file or ""))


def rows_of(
    stage: StageDirectory, update: int, sort: str, offset: int, limit: int, texts: DataRows
) -> dict[str, Any] | None:
    """Describe the rows of an update with their losses; None where they were not kept."""
    path = stage.dir / "rows" / f"{update:06d}.npz"
    arrays = read_arrays(path, ("row", "value", "source", "sources"))
    if "row" not in arrays or "value" not in arrays or len(arrays["row"]) != len(arrays["value"]):
        return None
    numbers, values = arrays["row"], arrays["value"]
    if sort.removeprefix("-") == "row":
        order = np.argsort(numbers, kind="stable")
    else:
        order = np.argsort(np.where(np.isnan(values), -np.inf, values), kind="stable")
    if sort.startswith("-"):
        order = order[::-1]
    files = data_files(stage, "train_data")
    rows = []
    for place in order[offset : offset + min(limit, MOST)]:
        row = named(files, int(numbers[place]), _file(arrays, place), texts)
        rows.append(row | {"loss": finite(float(values[place])), "scores": {}})
    return {"update": update, "total": len(numbers), "rows": rows}


def _file(arrays: Mapping[str, np.ndarray], place: int) -> str | None:
    if "source" not in arrays or "sources" not in arrays:
        return None
    return str(arrays["sources"][arrays["source"][place]])


def evaluations_of(stage: StageDirectory) -> dict[str, Any]:
    """List the evaluations of a stage with their metrics."""
    found = []
    for update, content in stage.evaluations.items():
        metrics = content.get("metrics")
        shown = {n: finite(v) for n, v in metrics.items()} if isinstance(metrics, Mapping) else {}
        found.append({"update": update, "metrics": shown})
    return {"evaluations": found}


def evaluation_of(
    stage: StageDirectory,
    update: int,
    texts: DataRows,
    leaked: Mapping[tuple[str, int], tuple[str, int]],
) -> dict[str, Any] | None:
    """Describe an evaluation's rows, and how they changed since the evaluation before; None without it.

    `of`: the quantity whose `change` tells which rows got better: "margin", of chosen over rejected, or the first
    value. `falls`: whether it is better for falling. `leak`: the row of the training data with the same prompt, which
    `leaked` has by (path, line).
    """
    every = stage.evaluations
    if update not in every:
        return None
    earlier = [each for each in every if each < update]
    rows = _rows(every[update])
    before = {_key(row): row for row in _rows(every[earlier[-1]])} if earlier else {}
    files = data_files(stage, "eval_data")
    found = []
    names = [name for row in rows[:1] for name in _values(row)]
    of = "margin" if {"chosen", "rejected"} <= set(names) else next(iter(names), None)
    for row in rows:
        values = _values(row)
        now = _quantity(values, of)
        then = _quantity(_values(before.get(_key(row), {})), of)
        described = _held_out(row, files, texts, leaked)
        found.append(described | {"values": values, "change": _difference(now, then)})
    return {
        "update": update,
        "before": earlier[-1] if earlier else None,
        "of": of,
        "falls": of == "loss",
        "rows": found,
    }


def _held_out(
    row: Mapping[str, Any],
    files: Mapping[str, str],
    texts: DataRows,
    leaked: Mapping[tuple[str, int], tuple[str, int]],
) -> dict[str, Any]:
    """Name a held-out row, with its text, and the row of the training data with its prompt, where there is one."""
    number = int(finite(row.get("row")) or 0)
    file = str(row["file"]) if row.get("file") else None
    described = named(files, number, file, texts)
    if row.get("set"):
        described["where"] = f"{row['set']}: {described['where']}"
    equal = leaked.get((_path_of(files, file) or "", number))
    if equal is not None:
        described["leak"] = f"{os.path.basename(equal[0])} row {equal[1]}"
    return described


def _rows(content: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    rows = content.get("rows")
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row.get(name)) for name in NAMES)


def _values(row: Mapping[str, Any]) -> dict[str, float | None]:
    return {str(name): finite(value) for name, value in row.items() if name not in NAMES}


def _quantity(values: Mapping[str, float | None], of: str | None) -> float | None:
    if of == "margin":
        return _difference(values.get("chosen"), values.get("rejected"))
    return None if of is None else values.get(of)


def _difference(now: float | None, then: float | None) -> float | None:
    return None if now is None or then is None else now - then


def model_of(stage: StageDirectory, run: Path) -> Path | None:
    """Return the directory of a tokenizer that reads a stage's tokens: the stage's own model, or the one it began from.

    A model that is not in the run is used where the configuration names a directory.
    """
    named_model = stage.config.get("model")
    candidates = [stage.dir / "artifacts" / "model"]
    if isinstance(named_model, str):
        first, dot, output = named_model.partition(".")
        if dot and os.sep not in named_model:
            candidates.append(run / first / "artifacts" / output)
        candidates.append(Path(named_model))
    elif isinstance(named_model, Mapping) and isinstance(named_model.get("tokenizer"), str):
        candidates.append(Path(named_model["tokenizer"]))
    return next((path for path in candidates if (path / "tokenizer.json").is_file()), None)
