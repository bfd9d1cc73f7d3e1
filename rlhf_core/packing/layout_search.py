"""The search for the classes of rows that make updates over some data cheapest."""

from __future__ import annotations

from collections.abc import Sequence

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
from rlhf_core.runtime.machine import platform

MAX_CLASSES = 3
WORTH_A_CLASS = 0.02
"""Share of the cost that an additional class must save."""
PROGRAM_UPDATES = 8
"""Updates that take as long as compiling one program, at most. A class may need two: one for the first micro-batch of
an update, and one that adds to earlier gradients."""
PROGRAM_WORK = {"cpu": 1e9}
"""Slots × hidden size² that take a platform as long, where updates of large models take longer than compiling."""
OVERHEAD = {"cpu": 64}
"""Fixed cost of a micro-batch, in slots: it reads all weights and adds to all gradients."""
OVERHEAD_ACCELERATOR = 512
"""The same for backends without an entry above."""
MULTIPLES = (1.25, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6)
"""Row lengths to try, as multiples of the longest tree."""
PARTS, PARTS_OF = (1, 2, 3), (0.25, 0.5, 0.9)
"""Row lengths to try: these quantiles of an update's tokens, divided by each of `PARTS`."""
BEST_PAIRS = 6  # pairs of classes to which a third is added
SAMPLE = 384  # minimum number of trees that layouts are tried on
UPDATES = 24  # minimum number of updates that they are tried on


def choose_layout(
    token_counts: Sequence[int] | Sequence[Sequence[int]] | NDArray[np.integer],
    branches_per_tree: int,
    *,
    hidden_size: int,
    max_tokens: int,
    trees_per_update: int | None = None,
    trained_counts: Sequence[int] | Sequence[Sequence[int]] | NDArray[np.integer] | None = None,
    row_multiple: int = 1,
    longest: int | None = None,
    skips_blocks: bool = False,
    updates: int | None = None,
) -> Layout:
    """Choose the classes of rows that make updates over this data cheapest.

    token_counts: tokens of each tree of the data or a sample, counting the shared prefix once, [trees]; or, where it is
        not known how long they will be, several cases of all of them, [cases, trees], each as likely as the others. The
        trees of an update are all of one case.
    branches_per_tree: branches of the largest tree; sequences per row are a multiple of it.
    hidden_size: the model's.
    max_tokens: maximum slots (rows × time) per micro-batch, exceeded only if `row_multiple` rows of the longest tree
        need more.
    trees_per_update: trees packed together; None: all of them.
    trained_counts: trained tokens of each tree, in the shape of token_counts; None if the objective does not read them
        one by one (reward models).
    row_multiple: the number of devices that rows are sharded over; rows per micro-batch are a multiple of it.
    longest: tokens of the longest tree to expect, if the data may lack it.
    skips_blocks: attention skips masked blocks, so that long rows cost no more than short ones.
    updates: updates in the run; a short run is not worth compiling several classes. None: many.
    """
    counts = np.atleast_2d(np.asarray(token_counts, np.int64))
    if not counts.size:
        counts = np.array([[longest or 1]])
    trained = None if trained_counts is None else np.atleast_2d(np.asarray(trained_counts, np.int64))
    top = max(int(counts.max()), longest or 0)
    crossover = NO_CROSSOVER if skips_blocks else 6 * hidden_size
    search = _Search(
        counts,
        trained,
        branches=branches_per_tree,
        crossover=crossover,
        max_tokens=max_tokens,
        row_multiple=row_multiple,
        top=top,
        per_update=trees_per_update,
        updates=updates,
        hidden_size=hidden_size,
    )
    times = search.candidates()
    evaluated = [search.evaluate((t,)) for t in times if t >= top]
    best = min(evaluated, key=lambda c: c[0])
    for size in range(2, MAX_CLASSES + 1):
        # Every class that fits the longest tree gets a second one, but only the best pairs a third.
        sets = {frozenset({*layout.time, t}) for _, layout in evaluated for t in times}
        tried = sorted(tuple(sorted(s)) for s in sets if len(s) == size)
        evaluated = sorted((search.evaluate(s) for s in tried), key=lambda c: c[0])[:BEST_PAIRS]
        if not evaluated:
            break
        more_classes = size - len(best[1].time)
        if evaluated[0][0] <= (1 - WORTH_A_CLASS) ** more_classes * best[0]:
            best = evaluated[0]
    return best[1]


def _round(time: float) -> int:
    """Round up to a multiple of 32, of 64 above 128, or of 128 above 1024."""
    if time <= 128:
        step = 32
    elif time <= 1024:
        step = 64
    else:
        step = 128
    return step * -(-int(np.ceil(time)) // step)


def count_programs(batches: NDArray[np.intp]) -> int:
    """Count the programs that updates of `batches` [updates, classes] micro-batches call, largest class first."""
    classes = np.arange(batches.shape[1])
    first = np.where(batches > 0, classes, -1).max(1)[:, None] == classes
    return int(first.any(0).sum() + (batches > first).any(0).sum())


class _Search:
    """Estimate the costs of layouts on a sample of updates."""

    def __init__(
        self,
        counts: NDArray[np.int64],
        trained: NDArray[np.int64] | None,
        *,
        branches: int,
        crossover: int,
        max_tokens: int,
        row_multiple: int,
        top: int,
        per_update: int | None,
        updates: int | None,
        hidden_size: int,
    ) -> None:
        self.cases, self.counts = len(counts), counts.reshape(-1)
        self.trained = None if trained is None else trained.reshape(-1)
        self.branches, self.crossover = branches, crossover
        self.max_tokens, self.row_multiple, self.top = max_tokens, row_multiple, top
        self.overhead = OVERHEAD.get(platform(), OVERHEAD_ACCELERATOR)
        self.updates = self._sample(counts.shape[1], per_update or counts.shape[1])
        self.totals = [int(self.counts[update].sum()) for update in self.updates]
        work = max(sum(self.totals) / len(self.totals), 1) * hidden_size**2
        program_updates = min(PROGRAM_UPDATES, PROGRAM_WORK.get(platform(), np.inf) / work)
        # Share of an update's cost that compiling one program adds to it.
        self.program = 0.0 if updates is None else program_updates / max(updates, 1)
        self._fits: dict[tuple[int, ...], list[Fit]] = {}

    def candidates(self) -> list[int]:
        quantiles = np.quantile(self.counts, [0.1, 0.25, 0.5, 0.75, 0.9])
        multiples = [self.top * f for f in MULTIPLES]
        parts = [total / n for total in np.quantile(self.totals, PARTS_OF) for n in PARTS]
        longer = [t for t in (*multiples, *parts) if self.top < t and _round(t) <= self.max_tokens]
        return sorted({_round(t) for t in (*quantiles, self.top, *longer)})

    def _sample(self, trees: int, per_update: int) -> list[NDArray[np.intp]]:
        """Draw the tree indices of a few updates by shuffled epochs, from one case after another."""
        rng = np.random.default_rng(0)
        size = max(SAMPLE, UPDATES * per_update)
        epochs = [rng.permutation(trees) for _ in range(-(-size // trees))]
        order = np.concatenate(epochs)[:size]
        starts = range(0, len(order), per_update)
        return [order[i : i + per_update] + n % self.cases * trees for n, i in enumerate(starts)]

    def shape(self, times: tuple[int, ...], rows: tuple[int, ...]) -> Layout:
        sequences = tuple(max(t // 16 // self.branches, 1) * self.branches for t in times)
        trained = tuple(map(self.trained_limit, times))
        return Layout(times, rows, sequences, trained, self.crossover, self.overhead)

    def trained_limit(self, time: int) -> int:
        if self.trained is None:
            return 0
        if self.top > self.counts.max() and time >= self.top:
            return time  # longer trees may come, with any number of trained tokens
        fitting = self.trained[self.counts <= time]
        expected = 1.1 * time * self.trained.sum() / self.counts.sum()
        return min(time, _round(max(expected, fitting.max(initial=1))))

    def evaluate(self, times: tuple[int, ...]) -> tuple[float, Layout]:
        """Estimate the cost of an update with these classes, including its share of compilation, and choose their rows
        per micro-batch. Returns (cost, layout)."""
        ones = self.shape(times, (1,) * len(times))
        needed = []
        for opened, final in packing_options(len(times), self.crossover):
            if opened[-1] == len(times) - 1:  # only these fit the longest tree
                fits = self.fits(tuple(times[c] for c in opened))
                needed += [(s, np.stack([self.needed(fit, ones, s) for fit in fits])) for s in final]

        def cost(rows: tuple[int, ...]) -> float:
            layout = ones._replace(rows=rows)
            used = np.stack([rows_used(n, rows, chosen) for chosen, n in needed])
            costs = np.stack([micro_batch_cost(option, layout) for option in used])
            best = used[costs.argmin(0), np.arange(costs.shape[1])]
            return float(costs.min(0).mean() * (1 + self.program * count_programs(-(-best // rows))))

        options = [self.row_options(time) for time in times]
        rows = tuple(numbers[0] for numbers in options)
        best = cost(rows)
        for k in reversed(range(len(times))):  # one class after another, largest first
            for number in options[k][1:]:
                candidate = (*rows[:k], number, *rows[k + 1 :])
                candidate_cost = cost(candidate)
                if candidate_cost < best:
                    best, rows = candidate_cost, candidate
        return best, ones._replace(rows=rows)

    def needed(self, fit: Fit, layout: Layout, chosen: tuple[int, ...]) -> NDArray[np.intp]:
        return np.bincount(smallest_class(fit.needs, layout, chosen), minlength=len(layout.time))

    def row_options(self, time: int) -> list[int]:
        """List the rows per micro-batch to try: as many as `max_tokens` allows, then parts of a typical update."""
        multiple = self.row_multiple
        most = max(multiple, self.max_tokens // time // multiple * multiple)
        typical = -(-int(np.quantile(self.totals, 0.9)) // time)
        parts = {min(most, multiple * max(1, -(-typical // (n * multiple)))) for n in (1, 2, 3, 4, 6, 8)}
        return [most, *sorted(parts - {most}, reverse=True)]

    def fits(self, times: tuple[int, ...]) -> list[Fit]:
        """Pack the sampled updates into rows of these lengths."""
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
                assert fit is not None  # the last class fits the longest tree
                self._fits[times].append(fit)
        return self._fits[times]
