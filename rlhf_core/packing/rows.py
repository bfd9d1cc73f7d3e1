"""Packed rows: a shared prompt is laid out once, and rows hold several trees to avoid padding.

Pure NumPy on the host. A tree is a prompt and its branches (a preference pair, a group of completions, one
text). Rows come in a few static shapes, so that nothing recompiles after warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.contracts import Rows
from rlhf_core.packing.layout import Layout, place_trees
from rlhf_core.packing.layout_search import choose_layout
from rlhf_core.packing.trees import Floats, Ints, Tree, shared_prefix, split, trained_per_branch, tree

__all__ = [
    "Layout",
    "Packed",
    "Tree",
    "choose_layout",
    "empty_batches",
    "pack",
    "shared_prefix",
    "split",
    "tree",
    "with_room",
]

Shape: TypeAlias = tuple[int, int]
REPEATED = -2
"""In place of -1, the sequence of a shared prompt whose tree is in several parts, in all of them but the first."""


class Packed(NamedTuple):
    """One micro-batch. The first axis of every array is rows, so that all can be sharded over rows."""

    rows: Rows
    """[rows, time]."""
    last: Ints
    """int32 [rows, sequences]: index in the row of each sequence's last token; -1 where unused."""
    trained: Ints
    """int32 [rows, trained]: ascending indices of the tokens with nonzero weight; -1 where unused."""
    token_values: dict[str, Floats]
    """float32 [rows, trained], compacted like `trained`; 0 where unused."""
    sequence_values: dict[str, Floats]
    """float32 [rows, sequences]; 0 where unused."""
    example: Ints
    """int32 [rows, sequences]: index of the packed tree that the sequence belongs to; -1 where unused."""
    routes: NDArray[np.integer[Any]] | None = None
    """int8 or int16 [rows, time, layers · k]: the experts of tokens; -1 where they are not known. None: of no token."""


def pack(
    trees: Sequence[Tree],
    layout: Layout,
    *,
    token_names: Sequence[str] = (),
    sequence_names: Sequence[str] = (),
    group: int = 1,
) -> list[Packed]:
    """Pack the trees of one update into micro-batches of the layout's static shapes, longest class first.

    Packs by first fit, longest tree first, and splits trees that fit no class. The result depends on the arguments
    alone. Empty rows fill the last micro-batch of a class; an unused class has none.

    token_names, sequence_names: the trees' values to lay out. group: branches of a tree that stay together.
    Raises ValueError if a group of branches fits no class.
    """
    parts, index = _split_to_fit(trees, layout, group)
    if not parts:
        return []
    repeats = np.append(False, index[1:] == index[:-1])
    sizes = [part.size for part in parts]
    sequences = [len(part.branches) for part in parts]
    counts = [sum(trained_per_branch(part)) for part in parts] if any(layout.trained) else [0] * len(parts)
    placement = place_trees(sizes, sequences, counts, layout)
    packed: list[Packed] = []
    for kind, time in reversed(list(enumerate(layout.time))):
        members = np.flatnonzero(placement.kind == kind)
        if not len(members):
            continue
        members = members[np.lexsort((placement.offset[members], placement.row[members]))]
        rows = layout.rows[kind] * -(-(int(placement.row[members[-1]]) + 1) // layout.rows[kind])
        batch = _lay_out(
            [parts[i] for i in members],
            index[members],
            repeats[members],
            placement.row[members] * time + placement.offset[members],
            (rows, time, layout.sequences[kind], layout.trained[kind]),
            token_names,
            sequence_names,
        )
        packed += [
            _slice(batch, start, start + layout.rows[kind]) for start in range(0, rows, layout.rows[kind])
        ]
    return packed


def empty_batches(
    layout: Layout,
    *,
    token_names: Sequence[str] = (),
    sequence_names: Sequence[str] = (),
    routes: jax.ShapeDtypeStruct | None = None,
) -> list[Packed]:
    """Make a micro-batch without sequences for every class of `layout`. routes: [layers, k], of those it has."""

    def one(time: int, rows: int, sequences: int, trained: int) -> Packed:
        def full(width: int, value: int) -> Any:
            return np.full((rows, width), value, np.int32)

        return Packed(
            rows=Rows(
                tokens=full(time, 0),
                positions=full(time, 0),
                visible_until=full(time, 0),
                parent=full(time, -1),
                sequence=full(time, -1),
                weight=np.zeros((rows, time), np.float32),
            ),
            last=full(sequences, -1),
            trained=full(trained, -1),
            token_values={name: np.zeros((rows, trained), np.float32) for name in token_names},
            sequence_values={name: np.zeros((rows, sequences), np.float32) for name in sequence_names},
            example=full(sequences, -1),
            routes=None
            if routes is None
            else np.full((rows, time, math.prod(routes.shape)), -1, routes.dtype),
        )

    classes = zip(layout.time, layout.rows, layout.sequences, layout.trained, strict=True)
    return [one(*shape) for shape in classes]


def with_room(layout: Layout, trees: Sequence[Tree], group: int) -> Layout:
    """Add a class of rows for the trees that fit none, of a layout that was chosen from other trees.

    group: branches of a tree that stay together.
    """
    longest = most = 0
    time, trained = layout.time[-1], layout.trained[-1]
    for each in trees:
        sizes = [len(branch) for branch in each.branches]
        needs = trained_per_branch(each) if trained else sizes
        for at in range(0, len(sizes), group):
            longest = max(longest, len(each.prefix) + sum(sizes[at : at + group]))
            most = max(most, sum(needs[at : at + group]))
    if longest <= time and (most <= trained or not trained):
        return layout
    while time < longest:
        time *= 2
    return layout._replace(
        time=(*layout.time, time),
        rows=(*layout.rows, layout.rows[-1]),
        sequences=(*layout.sequences, max(layout.sequences[-1], group)),
        trained=(*layout.trained, time if trained else 0),
    )


def _split_to_fit(trees: Sequence[Tree], layout: Layout, group: int) -> tuple[list[Tree], Ints]:
    """Split the trees that are too large for the last class; return all parts and the index of each one's tree."""
    time, sequences, trained = layout.time[-1], layout.sequences[-1], layout.trained[-1]
    fitting: list[Tree] = []
    index: list[int] = []
    for i, candidate in enumerate(trees):
        fits = candidate.size <= time and len(candidate.branches) <= sequences
        if fits and 0 < trained < time:
            fits = sum(trained_per_branch(candidate)) <= trained
        if fits:
            fitting.append(candidate)
            index.append(i)
            continue
        parts = split(candidate, time, sequences=sequences, trained=trained or None, group=group)
        fitting += parts
        index += [i] * len(parts)
    return fitting, np.array(index, np.int32)


def _lay_out(
    trees: Sequence[Tree],
    index: Ints,
    repeats: NDArray[np.bool_],
    starts: NDArray[np.intp],
    shape: tuple[int, int, int, int],
    token_names: Sequence[str],
    sequence_names: Sequence[str],
) -> Packed:
    """Lay out all rows of one class.

    repeats: whether a tree's prefix is laid out with an earlier part. starts: slot (row * time + offset) of each
    tree's first token, ascending.
    """
    rows, time, sequence_limit, trained_limit = shape
    # A segment is a prefix or a branch; every vector below is over segments or over tokens.
    segments = [segment for tree in trees for segment in (tree.prefix, *tree.branches)]
    length = np.fromiter(map(len, segments), np.int32, len(segments))
    branches = np.fromiter((len(tree.branches) for tree in trees), np.int32, len(trees))
    head = np.cumsum(branches + 1) - branches - 1  # index of each tree's prefix segment
    owner = np.repeat(np.arange(len(trees)), branches + 1)
    is_branch = np.ones(len(segments), bool)
    is_branch[head] = False

    before = np.cumsum(length) - length  # tokens in all earlier segments
    begin = starts[owner] + before - before[head[owner]]  # slot of the segment's first token
    end = begin + length
    prefix = length[head[owner]]
    tree_end = np.append(before[head[1:]], length.sum()) - before[head] + starts
    row = starts[owner] // time

    # Sequences are numbered across the trees of a row.
    sequence_row = row[is_branch]
    sequence_in_row = _rank(sequence_row)
    numbered = np.full(len(segments), -1, np.int32)
    numbered[head[repeats]] = REPEATED
    numbered[is_branch] = sequence_in_row

    # Per token: its segment's value plus its index within the segment.
    number = np.arange(length.sum(), dtype=np.int32)
    slot = np.repeat(begin - before, length) + number
    positions = np.repeat(np.where(is_branch, prefix, 0) - before, length) + number
    parent = np.repeat(begin - row * time - 1 - before, length) + number
    nonempty = length > 0
    parent[before[nonempty]] = np.where(
        is_branch & (prefix > 0), starts[owner] + prefix - 1 - row * time, -1
    )[nonempty]
    seen_until = np.where(is_branch, end, tree_end[owner]) - row * time
    in_branch = np.repeat(is_branch, length)
    weight = in_branch.astype(np.float32)
    if any(tree.weights is not None for tree in trees):
        weight[in_branch] = _branch_values([_weights(tree) for tree in trees])
    weight[parent < 0] = 0.0

    grid = (rows, time)
    laid_out = Rows(
        tokens=_scatter_ints(grid, slot, np.concatenate(segments), 0),
        positions=_scatter_ints(grid, slot, positions, 0),
        visible_until=_scatter_ints(grid, slot, np.repeat(seen_until, length), 0),
        parent=_scatter_ints(grid, slot, parent, -1),
        sequence=_scatter_ints(grid, slot, np.repeat(numbered, length), -1),
        weight=_scatter_floats(grid, slot, weight),
    )

    trained = np.flatnonzero(weight) if trained_limit else np.zeros(0, np.intp)
    trained_row = slot[trained] // time
    compact = (rows, trained_limit)
    compact_at = trained_row * trained_limit + _rank(trained_row)
    token_values: dict[str, Floats] = {}
    for name in token_names:
        value = np.zeros(len(slot), np.float32)
        value[in_branch] = _branch_values([tree.token_values[name] for tree in trees])
        token_values[name] = _scatter_floats(compact, compact_at, value[trained])
    per_sequence = (rows, sequence_limit)
    sequence_at = sequence_row * sequence_limit + sequence_in_row
    return Packed(
        rows=laid_out,
        last=_scatter_ints(per_sequence, sequence_at, (end - 1)[is_branch] - sequence_row * time, -1),
        trained=_scatter_ints(compact, compact_at, slot[trained] % time, -1),
        token_values=token_values,
        sequence_values={
            name: _scatter_floats(
                per_sequence, sequence_at, np.concatenate([tree.sequence_values[name] for tree in trees])
            )
            for name in sequence_names
        },
        example=_scatter_ints(per_sequence, sequence_at, np.repeat(index, branches), -1),
        routes=_routes(trees, (rows, time), slot[in_branch]),
    )


def _routes(trees: Sequence[Tree], shape: Shape, at: NDArray[np.intp]) -> NDArray[np.integer[Any]] | None:
    """Lay out the routes of the tokens of branches, whose slots are `at`."""
    if trees[0].routes is None:
        return None
    values = np.concatenate([branch for tree in trees for branch in tree.routes or ()])
    out = np.full((*shape, values.shape[1]), -1, values.dtype)
    out.reshape(-1, values.shape[1])[at] = values
    return out


def _scatter_ints(shape: Shape, at: NDArray[np.intp], values: NDArray[np.integer], fill: int) -> Ints:
    out = np.full(shape, fill, np.int32)
    out.reshape(-1)[at] = values
    return out


def _scatter_floats(shape: Shape, at: NDArray[np.intp], values: Floats) -> Floats:
    out = np.zeros(shape, np.float32)
    out.reshape(-1)[at] = values
    return out


def _weights(tree: Tree) -> tuple[Floats, ...]:
    return (
        tree.weights
        if tree.weights is not None
        else tuple(np.ones(len(b), np.float32) for b in tree.branches)
    )


def _branch_values(values: Sequence[Sequence[Floats]]) -> Floats:
    return np.concatenate([branch for branches in values for branch in branches])


def _rank(groups: NDArray[np.intp]) -> NDArray[np.intp]:
    """Rank each element within its group; `groups` is ascending."""
    return np.arange(len(groups)) - np.searchsorted(groups, groups)


def _slice(batch: Packed, start: int, stop: int) -> Packed:
    part = slice(start, stop)
    return Packed(
        rows=Rows(*(array[part] for array in batch.rows)),
        last=batch.last[part],
        trained=batch.trained[part],
        token_values={name: values[part] for name, values in batch.token_values.items()},
        sequence_values={name: values[part] for name, values in batch.sequence_values.items()},
        example=batch.example[part],
        routes=None if batch.routes is None else batch.routes[part],
    )
