"""Which classes of rows make updates over some data cheapest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.packing.layout import (
    NO_CROSSOVER,
    Fit,
    Layout,
    first_fit,
    micro_batch_cost,
    packing_options,
    rows_used,
    smallest_class,
)

MAX_CLASSES = 3
WORTH_A_CLASS = 0.02
"""Share of the cost that another class must save."""
PROGRAM_UPDATES = 8
"""A program takes about as long to compile as so many updates: each class may be two, as the first micro-batch of an
update and as one that adds to others."""
OVERHEAD = {"cpu": 64}
"""What a micro-batch costs beside its slots, in slots: it reads all weights, and adds to all gradients."""
OVERHEAD_ACCELERATOR = 512
"""The same where there is no entry above."""
MULTIPLES = (1.25, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6)
"""Of the longest tree: rows that are tried."""
PARTS, PARTS_OF = (1, 2, 3), (0.25, 0.5, 0.9)
"""Rows of these parts of an update, by quantiles of the tokens of an update, are tried too."""
KEPT = 6  # pairs of classes that a third is tried with
SAMPLE = 384  # trees that a choice is tried on, at least
UPDATES = 24  # updates that it is tried on, at least


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
    skips_unseen: bool = False,
    updates: int | None = None,
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
    skips_unseen: attention skips what no token of a row sees, so that long rows cost no more than short ones.
    updates: of the run; a short one is not worth the programs of several classes. None: many.
    """
    counts = np.asarray(token_counts, np.int64)
    if not len(counts):
        counts = np.array([longest or 1])
    trained = None if trained_counts is None else np.asarray(trained_counts, np.int64)
    top = max(int(counts.max()), longest or 0)
    crossover = NO_CROSSOVER if skips_unseen else 6 * hidden_size
    search = _Search(
        counts,
        trained,
        branches_per_tree,
        crossover,
        max_tokens,
        row_multiple,
        top,
        trees_per_update,
        updates,
    )
    times = search.candidates()
    found = [search.evaluate((t,)) for t in times if t >= top]
    best = min(found, key=lambda c: c[0])
    for size in range(2, MAX_CLASSES + 1):
        # All pairs; a third class is only tried next to the best of them.
        sets = (
            {frozenset(s) for s in itertools.combinations(times, 2)}
            if size == 2
            else {frozenset({*layout.time, t}) for _, layout in found for t in times}
        )
        tried = sorted(tuple(sorted(s)) for s in sets if len(s) == size and max(s) >= top)
        found = sorted((search.evaluate(s) for s in tried), key=lambda c: c[0])[:KEPT]
        if found and found[0][0] <= (1 - WORTH_A_CLASS) ** (size - len(best[1].time)) * best[0]:
            best = found[0]
    return best[1]


def _round(time: float) -> int:
    """Up to a multiple of 32, 64 beyond 128, 128 beyond 1024."""
    step = 32 if time <= 128 else 64 if time <= 1024 else 128
    return step * -(-int(np.ceil(time)) // step)


def count_programs(batches: NDArray[np.intp]) -> int:
    """How many programs updates of so many micro-batches, [updates, classes], call: each starts with its largest."""
    classes = np.arange(batches.shape[1])
    first = np.where(batches > 0, classes, -1).max(1)[:, None] == classes
    return int(first.any(0).sum() + (batches > first).any(0).sum())


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
        per_update: int | None,
        updates: int | None,
    ) -> None:
        self.counts, self.trained, self.branches, self.crossover = counts, trained, branches, crossover
        self.max_tokens, self.row_multiple, self.top = max_tokens, row_multiple, top
        self.program = 0.0 if updates is None else PROGRAM_UPDATES / max(updates, 1)
        self.overhead = OVERHEAD.get(jax.default_backend(), OVERHEAD_ACCELERATOR)
        self.updates = self._sample(per_update or len(counts))
        self.totals = [int(counts[update].sum()) for update in self.updates]
        self._fits: dict[tuple[int, ...], list[Fit]] = {}

    def candidates(self) -> list[int]:
        quantiles = np.quantile(self.counts, [0.1, 0.25, 0.5, 0.75, 0.9])
        multiples = [self.top * f for f in MULTIPLES]
        parts = [total / n for total in np.quantile(self.totals, PARTS_OF) for n in PARTS]
        longer = [t for t in (*multiples, *parts) if self.top < t and _round(t) <= self.max_tokens]
        return sorted({_round(t) for t in (*quantiles, self.top, *longer)})

    def _sample(self, per_update: int) -> list[NDArray[np.intp]]:
        """Indices of the trees of a few updates, drawn as epochs are."""
        draw, wanted = np.random.default_rng(0), max(SAMPLE, UPDATES * per_update)
        epochs = [draw.permutation(len(self.counts)) for _ in range(-(-wanted // len(self.counts)))]
        order = np.concatenate(epochs)[:wanted]
        return [order[i : i + per_update] for i in range(0, len(order), per_update)]

    def shape(self, times: tuple[int, ...], rows: tuple[int, ...]) -> Layout:
        sequences = tuple(max(t // 16 // self.branches, 1) * self.branches for t in times)
        trained = tuple(map(self.trained_limit, times))
        return Layout(times, rows, sequences, trained, self.crossover, self.overhead)

    def trained_limit(self, time: int) -> int:
        if self.trained is None:
            return 0
        if self.top > self.counts.max() and time >= self.top:
            return time  # trees that nobody has seen yet: there must be room for any of them
        inside = self.trained[self.counts <= time]
        expected = 1.1 * time * self.trained.sum() / self.counts.sum()
        return min(time, _round(max(expected, inside.max(initial=1))))

    def evaluate(self, times: tuple[int, ...]) -> tuple[float, Layout]:
        """Cost of an update with these classes, its share of compiling them included, and their layout with the rows
        that suit it."""
        ones = self.shape(times, (1,) * len(times))
        needed = []
        for opened, kept in packing_options(len(times), self.crossover):
            if opened[-1] == len(times) - 1:  # others may not hold the longest tree
                fits = self.fits(tuple(times[c] for c in opened))
                needed += [(s, np.stack([self.needed(fit, ones, s) for fit in fits])) for s in kept]

        def cost(rows: tuple[int, ...]) -> float:
            layout = ones._replace(rows=rows)
            used = np.stack([rows_used(n, rows, chosen) for chosen, n in needed])
            each = np.stack([micro_batch_cost(way, layout) for way in used])
            best = used[each.argmin(0), np.arange(each.shape[1])]
            return float(each.min(0).mean() * (1 + self.program * count_programs(-(-best // rows))))

        options = [self.row_options(time) for time in times]
        rows = tuple(each[0] for each in options)
        best = cost(rows)
        for k in reversed(range(len(times))):  # one class after another, the largest first
            for number in options[k][1:]:
                tried = (*rows[:k], number, *rows[k + 1 :])
                if (other := cost(tried)) < best:
                    best, rows = other, tried
        return best, ones._replace(rows=rows)

    def needed(self, fit: Fit, layout: Layout, chosen: tuple[int, ...]) -> NDArray[np.intp]:
        return np.bincount(smallest_class(fit.needs, layout, chosen), minlength=len(layout.time))

    def row_options(self, time: int) -> list[int]:
        """Rows a micro-batch that are tried: as many as memory allows first, then parts of a typical update."""
        up = self.row_multiple
        most = max(up, self.max_tokens // time // up * up)
        typical = -(-int(np.quantile(self.totals, 0.9)) // time)
        parts = {min(most, up * max(1, -(-typical // (n * up)))) for n in (1, 2, 3, 4, 6, 8)}
        return [most, *sorted(parts - {most}, reverse=True)]

    def fits(self, times: tuple[int, ...]) -> list[Fit]:
        """The sampled updates in rows that are opened with these times."""
        if times not in self._fits:
            layout = self.shape(times, (1,) * len(times))
            trained = np.zeros_like(self.counts) if self.trained is None else self.trained
            self._fits[times] = []
            for update in self.updates:
                sizes = self.counts[update].tolist()
                order = np.argsort(-self.counts[update], kind="stable").tolist()
                branches = [self.branches] * len(update)
                opened = tuple(range(len(times)))
                fit = first_fit(order, sizes, branches, trained[update].tolist(), layout, opened)
                assert fit is not None  # the last class holds the longest tree
                self._fits[times].append(fit)
        return self._fits[times]
