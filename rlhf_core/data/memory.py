"""Rows that a caller hands over as objects."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.data.kinds import Kinds, note
from rlhf_core.data.report import Problems
from rlhf_core.data.source import Records, Source, json_text
from rlhf_core.data.stored import DatasetRows, TableRows
from rlhf_core.data.unicode import bad_text
from rlhf_core.errors import InputError


def from_memory(data: Any, name: str = "dataset") -> Source:
    """Rows of a list, of a `datasets.Dataset`, of a data frame, or of an object with `__len__` and `__getitem__`."""
    if isinstance(data, Records) and len(data.sources) == 1:
        return data.sources[0]  # a registered dataset that reads a file keeps the file's name and row numbers
    rows = _rows(data, name)
    if not len(rows):
        raise InputError(f"{name} has no rows")
    content, kinds, problems = hashlib.sha256(), Kinds(), Problems()
    for start, chunk in Source.chunks(rows):
        for number, row in enumerate(chunk, start + 1):
            if not isinstance(row, Mapping):
                raise InputError(f"{name} row {number} is {type(row).__name__}, not a mapping of columns")
            try:
                text = json_text(row)  # the keys in their order, which templates write tools in
            except (RecursionError, ValueError, TypeError) as error:
                reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
                problems.add(f"{name} row {number} cannot be read: {reason}")
                continue
            if "\\ud" in text and (problem := bad_text(row)):
                problems.add(f"{name} row {number}: {problem}")
            content.update(text.encode())
            note(kinds, row)
    problems.stop()
    return Source(name, rows, range(1, len(rows) + 1), content.hexdigest(), kinds)


def _rows(data: Any, name: str) -> Sequence[Any]:
    if isinstance(data, list | tuple):
        return data
    if hasattr(data, "column_names") and hasattr(data, "with_format"):
        return DatasetRows(data)
    if hasattr(data, "column_names") and hasattr(data, "to_pylist"):
        return TableRows(data)
    if hasattr(data, "iloc") and hasattr(data, "to_dict"):  # of pandas
        return [
            {column: None if _is_missing(value) else value for column, value in row.items()}
            for row in data.to_dict("records")
        ]
    if hasattr(data, "to_dicts"):  # of polars
        rows: list[Any] = data.to_dicts()
        return rows
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return [data[i] for i in range(len(data))]
    raise InputError(
        f"{name} is {type(data).__name__}: data in memory needs __len__ and __getitem__; try list(...)"
    )


def _is_missing(value: Any) -> bool:
    """What pandas writes for a cell without a value: NaN, NaT or NA."""
    return type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value)
