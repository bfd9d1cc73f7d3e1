"""The static shapes that rows come in, chosen by cost, and which row each tree goes to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_CLASSES = 3
WORTH_A_CLASS = 0.97  # another class is another program to compile: it must save 3 %
CALL_OVERHEAD = 0.05  # of a full micro-batch's cost, paid by every micro-batch
SAMPLE = 384  # trees that a choice is tried on


class Layout(NamedTuple):
    """The static shapes of each class of rows, ascending in time."""

    time: tuple[int, ...]
    """Tokens a row."""
    rows: tuple[int, ...]
    """Rows a micro-batch."""
    sequences: tuple[int, ...]
    """Sequences a row, at most."""
    trained: tuple[int, ...]
    """Trained tokens a row, at most; 0 where nobody reads them, and then they limit nothing."""
    crossover: int = 4096
    """Row length at which dense attention costs as much as the rest of the model: `row_cost`."""


class Placement(NamedTuple):
    """Where each tree lies, arrays [trees]."""

    kind: NDArray[np.intp]
    """The class."""
    row: NDArray[np.intp]
    """The row among the class's rows."""
    offset: NDArray[np.intp]
    """Index in the row of the tree's first token."""


def row_cost(time: int, crossover: int) -> float:
    """Relative cost of a row: time × (crossover + time).

    A layer takes about 24 hidden² operations a token, dense attention 4 hidden × time: crossover = 6 hidden.
    """
    return float(time) * (crossover + time)


def place(
    sizes: Sequence[int], sequences: Sequence[int], trained: Sequence[int], layout: Layout
) -> Placement:
    """First fit, longest first, over those classes that make the micro-batches cheapest.

    sizes, sequences, trained: of each tree; the layout's last class must fit each of them.
    """
    best: tuple[float, _Fit] | None = None
    order = np.argsort(-np.asarray(sizes), kind="stable").tolist()
    kinds = range(len(layout.time))
    for count in range(1, len(layout.time) + 1):
        for chosen in itertools.combinations(kinds, count):
            fit = _first_fit(order, sizes, sequences, trained, layout, chosen)
            if fit is None:
                continue
            cost = sum(
                -(-used // layout.rows[kind])
                * layout.rows[kind]
                * row_cost(layout.time[kind], layout.crossover)
                for kind, used in zip(chosen, fit.used, strict=True)
            )
            if best is None or cost < best[0]:
                best = (cost, fit)
    if best is None:
        raise ValueError("a tree fits no class of the layout")
    return best[1].placement


class _Fit(NamedTuple):
    placement: Placement
    used: tuple[int, ...]  # rows opened, one number a chosen class


def _first_fit(
    order: Sequence[int],
    sizes: Sequence[int],
    sequences: Sequence[int],
    trained: Sequence[int],
    layout: Layout,
    chosen: Sequence[int],
) -> _Fit | None:
    """Every tree into the first open row with room, else into a new row of the smallest class that fits."""
    n = len(sizes)
    kind, row, offset = np.empty(n, np.intp), np.empty(n, np.intp), np.empty(n, np.intp)
    any_number = sum(trained)
    limits = [(layout.time[c], layout.sequences[c], layout.trained[c] or any_number) for c in chosen]
    used = [0] * len(limits)
    smallest = min(sizes, default=0)
    opened: list[list[int]] = []  # tokens, sequences, trained tokens left; class and number of each open row
    for i in order:
        size, count, need = sizes[i], sequences[i], trained[i]
        for at in opened:
            if at[0] >= size and at[1] >= count and at[2] >= need:
                break
        else:
            fitting = (c for c, (t, s, k) in enumerate(limits) if t >= size and s >= count and k >= need)
            new = next(fitting, None)
            if new is None:
                return None
            at = [*limits[new], new, used[new]]
            opened.append(at)
            used[new] += 1
        kind[i], row[i], offset[i] = chosen[at[3]], at[4], limits[at[3]][0] - at[0]
        at[0] -= size
        at[1] -= count
        at[2] -= need
        if at[0] < smallest:
            opened.remove(at)
    return _Fit(Placement(kind, row, offset), tuple(used))


def choose_layout(
    token_counts: Sequence[int] | NDArray[np.integer],
    branches_per_tree: int,
    *,
    hidden_size: int,
    max_tokens: int,
    trees_per_update: int | None = None,
    trained_counts: Sequence[int] | NDArray[np.integer] | None = None,
    row_multiple: int = 1,
    longest: int | None = None,
) -> Layout:
    """The classes of rows that make updates over this data cheapest.

    token_counts: tokens of each tree of the data (or a sample of it), the shared prefix once.
    branches_per_tree: of the largest tree; the sequences of a row are a multiple of it.
    hidden_size: of the model.
    max_tokens: slots (rows × time) of a micro-batch; more only where `row_multiple` rows of the longest tree
        need them.
    trees_per_update: trees packed together; None: all of them.
    trained_counts: trained tokens of each tree; None: nobody reads trained tokens one by one (reward models).
    row_multiple: rows of a micro-batch are a multiple of it (the devices that rows are sharded over).
    longest: tokens of the longest tree that may come, where that is more than the longest of the data.
    """
    counts = np.asarray(token_counts, np.int64)
    if not len(counts):
        counts = np.array([longest or 1])
    trained = None if trained_counts is None else np.asarray(trained_counts, np.int64)
    top = max(int(counts.max()), longest or 0)
    search = _Search(counts, trained, branches_per_tree, 6 * hidden_size, max_tokens, row_multiple, top)
    updates = search.sample(trees_per_update or len(counts))
    times = search.candidates()
    best = min((search.evaluate((t,), updates) for t in times if t >= top), key=lambda c: c[0])
    for size in range(2, MAX_CLASSES + 1):
        # All pairs; a third class is only tried next to the best two.
        sets = itertools.combinations(times, 2) if size == 2 else ({*best[1].time, t} for t in times)
        options = [
            search.evaluate(tuple(sorted(s)), updates) for s in sets if len(set(s)) == size and max(s) >= top
        ]
        better = min(options, key=lambda c: c[0], default=best)
        if better[0] > WORTH_A_CLASS * best[0]:
            break
        best = better
    return best[1]


def _round(time: float) -> int:
    """Up to a multiple of 32, 64 beyond 128, 128 beyond 1024."""
    step = 32 if time <= 128 else 64 if time <= 1024 else 128
    return step * -(-int(np.ceil(time)) // step)


class _Search:
    """Costs of layouts on a sample of updates."""

    def __init__(
        self,
        counts: NDArray[np.int64],
        trained: NDArray[np.int64] | None,
        branches: int,
        crossover: int,
        max_tokens: int,
        row_multiple: int,
        top: int,
    ) -> None:
        self.counts, self.trained, self.branches, self.crossover = counts, trained, branches, crossover
        self.max_tokens, self.row_multiple, self.top = max_tokens, row_multiple, top
        self.overhead = CALL_OVERHEAD * max_tokens * crossover
        self.fits: dict[tuple[int, ...], list[tuple[int, ...] | None]] = {}

    def candidates(self) -> list[int]:
        quantiles = np.quantile(self.counts, [0.1, 0.25, 0.5, 0.75, 0.9])
        multiples = [self.top * f for f in (1, 1.5, 2, 3, 4) if f == 1 or self.top * f <= self.max_tokens]
        return sorted({_round(t) for t in (*quantiles, *multiples)})

    def sample(self, per_update: int) -> list[NDArray[np.intp]]:
        """Indices of the trees of a few updates, drawn as an epoch is."""
        order = np.random.default_rng(0).permutation(len(self.counts))[:SAMPLE]
        return [order[i : i + per_update] for i in range(0, len(order), per_update)]

    def shape(self, times: tuple[int, ...], rows: tuple[int, ...]) -> Layout:
        sequences = tuple(max(t // 16 // self.branches, 1) * self.branches for t in times)
        return Layout(times, rows, sequences, tuple(map(self.trained_limit, times)), self.crossover)

    def trained_limit(self, time: int) -> int:
        if self.trained is None:
            return 0
        if self.top > self.counts.max() and time >= self.top:
            return time  # trees that nobody has seen yet: there must be room for any of them
        inside = self.trained[self.counts <= time]
        expected = 1.1 * time * self.trained.sum() / self.counts.sum()
        return min(time, _round(max(expected, inside.max(initial=1))))

    def evaluate(self, times: tuple[int, ...], updates: list[NDArray[np.intp]]) -> tuple[float, Layout]:
        """Mean cost of an update with these classes, and their layout with the rows that suit it."""
        used = self.rows_used(times, updates)
        rows = tuple(self.rows_for(t, [u[k] for u in used if u]) for k, t in enumerate(times))
        total = 0.0
        subsets = [s for n in range(1, len(times) + 1) for s in itertools.combinations(range(len(times)), n)]
        for u in range(len(updates)):
            options = []
            for subset in subsets:
                fit = self.rows_used(tuple(times[k] for k in subset), updates)[u]
                if fit is not None:
                    options.append(
                        sum(self.cost(times[k], rows[k], n) for k, n in zip(subset, fit, strict=True))
                    )
            total += min(options)
        return total / len(updates), self.shape(times, rows)

    def rows_used(
        self, times: tuple[int, ...], updates: list[NDArray[np.intp]]
    ) -> list[tuple[int, ...] | None]:
        if times not in self.fits:
            layout = self.shape(times, (1,) * len(times))
            trained = np.zeros_like(self.counts) if self.trained is None else self.trained
            self.fits[times] = []
            for update in updates:
                sizes = self.counts[update]
                order = np.argsort(-sizes, kind="stable").tolist()
                branches = [self.branches] * len(update)
                fit = _first_fit(
                    order, sizes.tolist(), branches, trained[update].tolist(), layout, range(len(times))
                )
                self.fits[times].append(fit.used if fit else None)
        return self.fits[times]

    def rows_for(self, time: int, used: list[int]) -> int:
        """Rows a micro-batch: as many as memory allows, or fewer where that leaves fewer rows empty."""
        up = self.row_multiple
        most = max(up, self.max_tokens // time // up * up)
        typical = int(np.quantile(used, 0.9)) if used else most
        options = {most} | {min(most, up * max(1, -(-typical // (n * up)))) for n in (1, 2, 3, 4)}
        return min(
            sorted(options, reverse=True), key=lambda rows: sum(self.cost(time, rows, n) for n in used)
        )

    def cost(self, time: int, rows: int, used: int) -> float:
        return -(-used // rows) * (rows * row_cost(time, self.crossover) + self.overhead)
