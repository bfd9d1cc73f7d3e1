"""The static shapes that rows come in, and which row each tree goes to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

MICRO_BATCH_TOKENS = 16384
"""Slots of a micro-batch at most, however large an update is: what keeps activations in bounds."""
NO_CROSSOVER = 2**40
"""The crossover of attention that skips what no token sees: longer rows cost it nothing."""
LONE_ROW = 0.12
"""By how much such attention makes a micro-batch of one row dearer: block by block, one row keeps few cores busy."""


class Layout(NamedTuple):
    """The static shapes of each class of rows, ascending in time, and so in all that a row may hold."""

    time: tuple[int, ...]
    """Tokens a row."""
    rows: tuple[int, ...]
    """Rows a micro-batch."""
    sequences: tuple[int, ...]
    """Sequences a row, at most."""
    trained: tuple[int, ...]
    """Trained tokens a row, at most; 0 where nobody reads them, and then they limit nothing."""
    crossover: int = 4096
    """Row length at which attention costs as much as the rest of the model: `row_cost`."""
    overhead: int = 0
    """What a micro-batch costs beside its slots, in slots."""

    def largest(self) -> Layout:
        """Its last class alone, which holds whatever the others hold."""
        time, rows, sequences, trained = (each[-1:] for each in self[:4])
        return self._replace(time=time, rows=rows, sequences=sequences, trained=trained)


class Placement(NamedTuple):
    """Where each tree lies, arrays [trees]."""

    kind: NDArray[np.intp]
    """The class."""
    row: NDArray[np.intp]
    """The row among the class's rows."""
    offset: NDArray[np.intp]
    """Index in the row of the tree's first token."""


def row_cost(time: int, crossover: int) -> float:
    """Relative cost of a row: time × (1 + time / crossover).

    A layer takes about 24 hidden² operations a token, dense attention 4 hidden × time: crossover = 6 hidden.
    """
    return time * (1.0 + time / crossover)


def place_trees(
    sizes: Sequence[int], sequences: Sequence[int], trained: Sequence[int], layout: Layout
) -> Placement:
    """First fit, longest first, into rows of those classes that make the micro-batches cheapest.

    sizes, sequences, trained: of each tree; the layout's last class must fit each of them, or ValueError is raised.
    """
    order = np.argsort(-np.asarray(sizes), kind="stable").tolist()
    best: tuple[float, Fit, NDArray[np.intp], NDArray[np.intp]] | None = None
    for opened, kept in packing_options(len(layout.time), layout.crossover):
        fit = first_fit(order, sizes, sequences, trained, layout, opened)
        if fit is None:
            continue
        for chosen in kept:
            least = smallest_class(fit.needs, layout, chosen)
            used = rows_used(np.bincount(least, minlength=len(layout.time))[None], layout.rows, chosen)
            cost = float(micro_batch_cost(used, layout)[0])
            if best is None or cost < best[0]:
                best = (cost, fit, least, used[0])
    if best is None:
        raise ValueError("a tree fits no class of the layout")
    _, fit, least, number = best
    # The fullest rows into the largest class that is used, and so on down.
    descending = np.lexsort((-fit.needs[:, 0], -least))
    kind, row = np.zeros(len(least), np.intp), np.zeros(len(least), np.intp)
    kind[descending] = np.repeat(np.arange(len(number))[::-1], number[::-1])
    row[descending] = np.concatenate([np.arange(n) for n in number[::-1]])
    at = np.asarray(fit.row, np.intp)
    return Placement(kind[at], row[at], np.asarray(fit.offset, np.intp))


class Fit(NamedTuple):
    """Trees in rows of one class, before each row gets the class it needs."""

    row: list[int]
    """Of each tree."""
    offset: list[int]
    """Of each tree."""
    needs: NDArray[np.int64]
    """[rows, 3]: tokens, sequences and trained tokens of each row."""


Classes: TypeAlias = tuple[int, ...]
"""Some classes of a layout, ascending."""


def packing_options(classes: int, crossover: int) -> list[tuple[Classes, list[Classes]]]:
    """Ways to pack that are tried: the classes that rows are opened in, and those that they may end in.

    Rows of one class fill best, and each then gets the class it needs. Where long rows cost more a token, small trees
    are tried in rows of small classes too.
    """
    every: list[Classes] = [
        s for n in range(1, classes + 1) for s in itertools.combinations(range(classes), n)
    ]
    found: list[tuple[Classes, list[Classes]]] = [
        ((largest,), [s for s in every if s[-1] == largest]) for largest in range(classes)
    ]
    if crossover != NO_CROSSOVER:
        found += [(s, [s]) for s in every if len(s) > 1]
    return found


def first_fit(
    order: Sequence[int],
    sizes: Sequence[int],
    sequences: Sequence[int],
    trained: Sequence[int],
    layout: Layout,
    opened: Classes,
) -> Fit | None:
    """Each tree, in this order, into the first row with room, else into a new one of the smallest class that fits.

    opened: the classes that rows may be opened in. None where a tree fits none of them.
    """
    any_number = sum(trained)
    limits = [(layout.time[c], layout.sequences[c], layout.trained[c] or any_number) for c in opened]
    row, offset = [0] * len(sizes), [0] * len(sizes)
    smallest = min(sizes, default=0)
    rows: list[list[int]] = []  # tokens, sequences, trained tokens left; number; time
    all_rows: list[tuple[tuple[int, int, int], list[int]]] = []
    for i in order:
        size, count, need = sizes[i], sequences[i], trained[i]
        for at in rows:
            if at[0] >= size and at[1] >= count and at[2] >= need:
                break
        else:
            limit = next((m for m in limits if m[0] >= size and m[1] >= count and m[2] >= need), None)
            if limit is None:
                return None
            at = [*limit, len(all_rows), limit[0]]
            rows.append(at)
            all_rows.append((limit, at))
        row[i], offset[i] = at[3], at[4] - at[0]
        at[0] -= size
        at[1] -= count
        at[2] -= need
        if at[0] < smallest:
            rows.remove(at)
    needs = [[limit[k] - at[k] for k in range(3)] for limit, at in all_rows]
    return Fit(row, offset, np.array(needs, np.int64).reshape(-1, 3))


def smallest_class(needs: NDArray[np.int64], layout: Layout, chosen: Classes) -> NDArray[np.intp]:
    """[rows]: of the chosen classes the smallest that holds what each row needs, a row of `Fit.needs`."""
    every = np.iinfo(np.int64).max
    least = np.full(len(needs), chosen[-1], np.intp)
    for c in reversed(chosen[:-1]):
        limits = np.array([layout.time[c], layout.sequences[c], layout.trained[c] or every])
        least[(needs <= limits).all(1)] = c
    return least


def rows_used(needed: NDArray[np.intp], rows: Sequence[int], chosen: Classes) -> NDArray[np.intp]:
    """[updates, classes]: rows that are put into each class, of `needed` [updates, classes] that need it at least.

    Rows left over in the micro-batches of a class are given to rows that need less.
    """
    used = np.zeros_like(needed)
    waiting = needed.sum(1)
    for k in reversed(chosen):
        # What must go here: all that is waiting but for those who need less.
        here = np.maximum(waiting - needed[:, :k].sum(1), 0)
        used[:, k] = np.minimum(-(-here // rows[k]) * rows[k], waiting)
        waiting = waiting - used[:, k]
    return used


def micro_batch_cost(used: NDArray[np.intp], layout: Layout) -> NDArray[np.float64]:
    """[updates]: relative cost of the micro-batches that hold these rows, [updates, classes]."""
    rows = np.asarray(layout.rows)
    each = rows * np.array([row_cost(time, layout.crossover) for time in layout.time])
    if layout.crossover == NO_CROSSOVER:
        each = np.where(rows == 1, (1 + LONE_ROW) * each, each)
    each = each + layout.overhead
    cost: NDArray[np.float64] = (-(-used // rows) * each).sum(1)
    return cost
