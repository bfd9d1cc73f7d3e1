"""Check datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_testing.findings import Broken, Findings

LOOKED_AT = 20
"""Rows to check, from both ends and the middle."""


def check_dataset(dataset: Any) -> None:
    """Raise AssertionError that lists every property that `dataset` breaks.

    dataset: an object with `__len__` and `__getitem__`, made by the registered class or function.

    length: a positive integer.
    rows: mappings from column names, at every index.
    ends: an index beyond the end raises IndexError.
    repeatable: a row read again, in another order, is the same.
    columns: all rows share a column.
    """
    findings = Findings("dataset", type(dataset))
    with findings.property("length"):
        length = len(dataset)
        if length < 1:
            raise Broken("it has no rows; raise an InputError that says where they should have come from")
    findings.stop_if_broken()
    indices = sorted({*range(length)[:LOOKED_AT], length // 2, *range(length)[-LOOKED_AT:]})
    rows: dict[int, Any] = {}
    with findings.property("rows"):
        for i in indices:
            rows[i] = dataset[i]
            if not isinstance(rows[i], Mapping) or not all(isinstance(name, str) for name in rows[i]):
                raise Broken(f"row {i} is {rows[i]!r:.80}; return a mapping from column names to values")
    findings.stop_if_broken()
    with findings.property("ends"):
        try:
            dataset[length]
        except IndexError:
            pass
        else:
            raise Broken(f"index {length} of {length} rows returns a row; raise IndexError")
    with findings.property("repeatable"):
        for i in reversed(indices):
            if _plain(dataset[i]) != _plain(rows[i]):
                raise Broken(
                    f"row {i} differs when read again; draw and shuffle in the constructor, not when a row is read"
                )
    with findings.property("columns"):
        shared = set.intersection(*(set(row) for row in rows.values()))
        if not shared:
            raise Broken("no column is in every row; use the same column names in all rows")
    findings.end()


def _plain(value: Any) -> Any:
    """Convert arrays to lists, so that values compare with ==."""
    if isinstance(value, Mapping):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return value.tolist() if hasattr(value, "tolist") else value
