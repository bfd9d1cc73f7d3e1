"""Layouts: the static shapes of rows, and where trees are placed in them by first fit."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

MICRO_BATCH_TOKENS = 16384
"""Maximum slots per micro-batch, however large an update is; it bounds the memory of activations."""
NO_CROSSOVER = 2**40
"""The crossover of attention that skips masked blocks: longer rows cost nothing extra."""
LONE_ROW = 0.12
"""Extra cost of a one-row micro-batch under such attention, whose blocks of one row keep few cores busy."""


class Layout(NamedTuple):
    """The static shapes of each class of rows; classes ascend in time and in every other limit."""

    time: tuple[int, ...]
    """Tokens per row."""
    rows: tuple[int, ...]
    """Rows per micro-batch."""
    sequences: tuple[int, ...]
    """Maximum sequences per row."""
    trained: tuple[int, ...]
    """Maximum trained tokens per row; 0: no limit, because the objective does not read them one by one."""
    crossover: int = 4096
    """Row length at which attention costs as much as the rest of the model; see `row_cost`."""
    overhead: int = 0
    """Fixed cost of a micro-batch, in slots."""

    def largest(self) -> Layout:
        """Return a layout of the last class alone, which fits everything that the others fit."""
        time, rows, sequences, trained = (limits[-1:] for limits in self[:4])
        return self._replace(time=time, rows=rows, sequences=sequences, trained=trained)


class Placement(NamedTuple):
    """The place of each tree, arrays [trees]."""

    kind: NDArray[np.intp]
    """Index of the class."""
    row: NDArray[np.intp]
    """Index of the row among the class's rows."""
    offset: NDArray[np.intp]
    """Index in the row of the tree's first token."""


def row_cost(time: int, crossover: int) -> float:
    """Return the relative cost of a row: time × (1 + time / crossover).

    A layer takes about 24 hidden² operations per token, dense attention 4 hidden × time, so crossover = 6 hidden.
    """
    return time * (1.0 + time / crossover)


def place_trees(
    sizes: Sequence[int], sequences: Sequence[int], trained: Sequence[int], layout: Layout
) -> Placement:
    """Place trees into rows by first fit, longest first, using the classes with the cheapest micro-batches.

    sizes, sequences, trained: tokens, branches and trained tokens per tree. Raises ValueError if one does not fit the
    layout's last class.
    """
    order = np.argsort(-np.asarray(sizes), kind="stable").tolist()
    best: tuple[float, Fit, NDArray[np.intp], NDArray[np.intp]] | None = None
    for opened, final in packing_options(len(layout.time), layout.crossover):
        fit = first_fit(order, sizes, sequences, trained, layout, opened)
        if fit is None:
            continue
        for chosen in final:
            least = smallest_class(fit.needs, layout, chosen)
            used = rows_used(np.bincount(least, minlength=len(layout.time))[None], layout.rows, chosen)
            cost = float(micro_batch_cost(used, layout)[0])
            if best is None or cost < best[0]:
                best = (cost, fit, least, used[0])
    if best is None:
        raise ValueError("a tree fits no class of the layout")
    _, fit, least, number = best
    # Assign the fullest rows to the largest class in use, and so on down.
    descending = np.lexsort((-fit.needs[:, 0], -least))
    kind, row = np.zeros(len(least), np.intp), np.zeros(len(least), np.intp)
    kind[descending] = np.repeat(np.arange(len(number))[::-1], number[::-1])
    row[descending] = np.concatenate([np.arange(n) for n in number[::-1]])
    at = np.asarray(fit.row, np.intp)
    return Placement(kind[at], row[at], np.asarray(fit.offset, np.intp))


class Fit(NamedTuple):
    """Trees in rows of one class, before each row gets the class it needs."""

    row: list[int]
    """Row of each tree."""
    offset: list[int]
    """Offset of each tree in its row."""
    needs: NDArray[np.int64]
    """[rows, 3]: tokens, sequences and trained tokens of each row."""


Classes: TypeAlias = tuple[int, ...]
"""Indices of some classes of a layout, ascending."""
Room = TypeVar("Room", bound=Sequence[int])


def packing_options(classes: int, crossover: int) -> list[tuple[Classes, list[Classes]]]:
    """List the ways to pack that are tried: (classes that rows are opened in, sets of classes they may end in).

    Rows fill best when all are opened in one class and then shrunk to the class they need. Where long rows cost more
    per token, opening rows in several classes is tried too.
    """
    subsets: list[Classes] = [
        s for n in range(1, classes + 1) for s in itertools.combinations(range(classes), n)
    ]
    options: list[tuple[Classes, list[Classes]]] = [
        ((largest,), [s for s in subsets if s[-1] == largest]) for largest in range(classes)
    ]
    if crossover != NO_CROSSOVER:
        options += [(s, [s]) for s in subsets if len(s) > 1]
    return options


def first_fit(
    order: Sequence[int],
    sizes: Sequence[int],
    sequences: Sequence[int],
    trained: Sequence[int],
    layout: Layout,
    opened: Classes,
) -> Fit | None:
    """Put each tree, in this order, into the first row with room, or into a new row of the smallest class that fits.

    opened: the classes that rows may be opened in. Returns None if a tree fits none of them.
    """
    no_limit = sum(trained)
    limits = [(layout.time[c], layout.sequences[c], layout.trained[c] or no_limit) for c in opened]
    row, offset = [0] * len(sizes), [0] * len(sizes)
    smallest = min(sizes, default=0)
    rows: list[list[int]] = []  # tokens, sequences, trained tokens left; number; time
    all_rows: list[tuple[tuple[int, int, int], list[int]]] = []
    for i in order:
        size, count, need = sizes[i], sequences[i], trained[i]
        at = _first_with_room(rows, size, count, need)
        if at is None:
            limit = _first_with_room(limits, size, count, need)
            if limit is None:
                return None
            at = [*limit, len(all_rows), limit[0]]
            rows.append(at)
            all_rows.append((limit, at))
        row[i] = at[3]
        offset[i] = at[4] - at[0]
        at[0] -= size
        at[1] -= count
        at[2] -= need
        if at[0] < smallest:
            rows.remove(at)
    needs = [[limit[k] - at[k] for k in range(3)] for limit, at in all_rows]
    return Fit(row, offset, np.array(needs, np.int64).reshape(-1, 3))


def _first_with_room(rows: Sequence[Room], size: int, count: int, need: int) -> Room | None:
    """Find the first of some rows, or limits of rows, with room for a tree's tokens, sequences and trained tokens."""
    for left in rows:
        if left[0] >= size and left[1] >= count and left[2] >= need:
            return left
    return None


def smallest_class(needs: NDArray[np.int64], layout: Layout, chosen: Classes) -> NDArray[np.intp]:
    """Find the smallest of the chosen classes that fits each row of `Fit.needs`, int [rows]."""
    least = np.full(len(needs), chosen[-1], np.intp)
    for c in reversed(chosen[:-1]):
        limits = np.array([layout.time[c], layout.sequences[c], layout.trained[c] or sys.maxsize])
        least[(needs <= limits).all(1)] = c
    return least


def rows_used(needed: NDArray[np.intp], rows: Sequence[int], chosen: Classes) -> NDArray[np.intp]:
    """Count the rows put into each class, int [updates, classes]. needed: rows by their smallest fitting class.

    Free rows in the micro-batches of a class are filled with rows that need less.
    """
    used = np.zeros_like(needed)
    waiting = needed.sum(1)
    for k in reversed(chosen):
        # Waiting rows that do not fit a smaller class must go into this one.
        required = np.maximum(waiting - needed[:, :k].sum(1), 0)
        used[:, k] = np.minimum(-(-required // rows[k]) * rows[k], waiting)
        waiting = waiting - used[:, k]
    return used


def micro_batch_cost(used: NDArray[np.intp], layout: Layout) -> NDArray[np.float64]:
    """Return the relative cost of the micro-batches that hold `used` rows [updates, classes], float64 [updates]."""
    rows = np.asarray(layout.rows)
    costs = rows * np.array([row_cost(time, layout.crossover) for time in layout.time])
    if layout.crossover == NO_CROSSOVER:
        costs = np.where(rows == 1, (1 + LONE_ROW) * costs, costs)
    total: NDArray[np.float64] = (-(-used // rows) * (costs + layout.overhead)).sum(1)
    return total
