"""The metrics of rows that grow, by name: of what was added alone."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping

import numpy as np

from rlhf_report.run_reader import Points, number
from rlhf_report.watch.growing import GrowingRows


class Columns(Mapping[str, Points]):
    """The metrics of rows that were ever a number; a step logged twice counts once, as it was logged last."""

    def __init__(self, lines: GrowingRows) -> None:
        self._lines = lines
        self._columns: dict[str, _Column] = {}
        self._seen = 0
        self._replaced = lines.replaced

    def _known(self) -> dict[str, _Column]:
        """Return the columns, with the rows that were added since."""
        if self._replaced != self._lines.replaced:
            self._columns, self._seen = {}, 0
            self._replaced = self._lines.replaced
        rows = self._lines.rows
        for row in rows[self._seen :]:
            step = number(row.get("step"))
            if step is None:
                continue
            for name, value in row.items():
                if name not in ("step", "time"):
                    column = self._columns.get(name)
                    if column is None:
                        column = self._columns[name] = _Column()
                    column.add(step, number(value))
        self._seen = len(rows)
        return self._columns

    def __getitem__(self, name: str) -> Points:
        column = self._known()[name]
        if not column.steps:
            raise KeyError(name)
        return Points(np.array(column.steps), np.array(column.values), column.missing)

    def __iter__(self) -> Iterator[str]:
        return (name for name, column in self._known().items() if column.steps)

    def __len__(self) -> int:
        return sum(bool(column.steps) for column in self._known().values())


class _Column:
    """The finite values of a metric, at rising steps, and how many were not finite."""

    def __init__(self) -> None:
        self.steps, self.values = array("d"), array("d")
        self.missing = 0

    def add(self, step: float, value: float | None) -> None:
        if value is None:
            self.missing += 1
            return
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)
            return
        place = bisect_left(self.steps, step)
        if self.steps[place] == step:
            self.values[place] = value
        else:
            self.steps.insert(place, step)
            self.values.insert(place, value)
