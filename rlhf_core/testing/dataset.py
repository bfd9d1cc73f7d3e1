"""The kit for datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.testing.findings import Broken, Findings

LOOKED_AT = 20
"""Rows, from both ends and the middle."""


def check_dataset(dataset: Any) -> None:
    """Raise AssertionError with every property of a dataset that `dataset` lacks.

    dataset: an object with `__len__` and `__getitem__`, as the registered class or function makes it.

    length: a positive whole number.
    rows: mappings with names of columns, at every index.
    ends: an index beyond the end raises IndexError.
    repeatable: a row read again, in another order, is the same.
    columns: rows share a column.
    """
    found = Findings("dataset", type(dataset))
    with found.property("length"):
        length = len(dataset)
        if length < 1:
            raise Broken("it has no rows; raise an InputError that says where they should have come from")
    found.stop_if_broken()
    indices = sorted({*range(length)[:LOOKED_AT], length // 2, *range(length)[-LOOKED_AT:]})
    rows: dict[int, Any] = {}
    with found.property("rows"):
        for i in indices:
            rows[i] = dataset[i]
            if not isinstance(rows[i], Mapping) or not all(isinstance(name, str) for name in rows[i]):
                raise Broken(f"row {i} is {rows[i]!r:.80}; return a mapping from names of columns to values")
    found.stop_if_broken()
    with found.property("ends"):
        try:
            dataset[length]
        except IndexError:
            pass
        else:
            raise Broken(f"index {length} of {length} rows gives a row; raise IndexError")
    with found.property("repeatable"):
        for i in reversed(indices):
            if _plain(dataset[i]) != _plain(rows[i]):
                raise Broken(
                    f"row {i} read again is another; draw and shuffle when it is made, not when it is read"
                )
    with found.property("columns"):
        shared = set.intersection(*(set(row) for row in rows.values()))
        if not shared:
            raise Broken("no column is in every row; use one name for one thing")
    found.end()


def _plain(value: Any) -> Any:
    """Comparable with ==, arrays included."""
    if isinstance(value, Mapping):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return value.tolist() if hasattr(value, "tolist") else value
