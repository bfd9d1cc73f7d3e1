"""Compute a value for every sequence of trees, without a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.fit.batches import pack_chunks
from rlhf_core.fit.compute import compute_batches
from rlhf_core.mesh import replicated_sharding
from rlhf_core.packing.rows import Layout, Packed, Tree

if TYPE_CHECKING:
    from jax.sharding import Mesh

CHUNK = 1024
"""Trees that are packed together."""
BRANCH = "number of the branch"
"""A sequence value beside those of the trees, whose names are columns of the data."""


def per_sequence(
    function: Callable[[Any, Packed], jax.Array],
    params: Any,
    trees: Sequence[Tree],
    layout: Layout,
    mesh: Mesh,
    *,
    group: int = 1,
    token_names: Sequence[str] = (),
    sequence_names: Sequence[str] = (),
    say: Callable[[str], None] | None = None,
) -> NDArray[Any]:
    """Compute `function(params, batch)`, float32 [rows, sequences], over all trees; return a value per branch.

    Values are in the order of the trees and of their branches, float32 [branches]; reshape those of pairs to
    [pairs, 2], as in `per_sequence(partial(sequence_scores, model), params, trees, layout, mesh, group=2)`.
    group, token_names, sequence_names: see `pack`. say: prints the progress of a computation of more than a few
    seconds, such as `stage.say`. A program is compiled for every shape of the layout; a closure compiles anew, unlike a
    `functools.partial` with equal arguments. Every process must call this alike.
    """
    batches = pack_numbered(
        chunks_of(trees), layout, token_names=token_names, sequence_names=sequence_names, group=group
    )
    return compute_sequences(function, params, mesh, batches, say)


def chunks_of(trees: Sequence[Tree]) -> Iterator[Sequence[Tree]]:
    return (trees[start : start + CHUNK] for start in range(0, len(trees), CHUNK))


def pack_numbered(
    chunks: Iterable[Sequence[Tree]], layout: Layout, *, sequence_names: Sequence[str] = (), **options: Any
) -> Iterator[Packed]:
    """Pack chunks of trees with the number of each branch in its tree, the sequence value BRANCH."""
    numbered = ([_with_branch_numbers(tree) for tree in trees] for trees in chunks)
    return pack_chunks(numbered, layout, sequence_names=(*sequence_names, BRANCH), **options)


def _with_branch_numbers(tree: Tree) -> Tree:
    """Number the branches, since a tree may be split over rows."""
    numbers = np.arange(len(tree.branches), dtype=np.float32)
    return tree._replace(sequence_values={**tree.sequence_values, BRANCH: numbers})


def compute_sequences(
    function: Callable[[Any, Packed], jax.Array],
    params: Any,
    mesh: Mesh,
    batches: Iterable[Packed],
    say: Callable[[str], None] | None = None,
) -> NDArray[Any]:
    """Compute what `per_sequence` returns, from the batches of `pack_numbered`."""
    compute = partial(jax.jit(function, out_shardings=replicated_sharding(mesh)), params)
    examples: list[NDArray[Any]] = [np.zeros(0, np.int32)]
    branches: list[NDArray[Any]] = [np.zeros(0, np.float32)]
    values: list[NDArray[Any]] = [np.zeros(0, np.float32)]
    for batch, result in compute_batches(compute, mesh, batches, say):
        used = batch.example >= 0
        examples.append(batch.example[used])
        branches.append(batch.sequence_values[BRANCH][used])
        values.append(result[used])
    order = np.lexsort((np.concatenate(branches), np.concatenate(examples)))
    return np.concatenate(values)[order]
