"""Read trees with models, without a gradient: a value per sequence, or per trained token.

A few batches are on the device at a time, and progress is printed where it takes long.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.fit.batches import empty_batches, pack_chunks
from rlhf_core.mesh import abstract_rows, put_rows, replicated_sharding
from rlhf_core.packing.rows import Layout, Packed, Tree
from rlhf_core.runtime.background import BackgroundCompiler

if TYPE_CHECKING:
    from jax.sharding import Mesh

IN_FLIGHT = 2
"""Batches whose inputs and results the device holds: one is computed while the other is read or placed."""
QUIET_SECONDS = 5.0
"""Work that takes no longer is not announced; progress is announced after this long, then a tenth as often."""


def compute_batches(
    compute: Callable[[Packed], Any],
    mesh: Mesh,
    batches: Iterable[Packed],
    say: Callable[[str], None] | None = None,
) -> Iterator[tuple[Packed, Any]]:
    """Yield every batch with its result on the host; at most two are dispatched and not read.

    say: prints progress where the computation takes longer than a few seconds.
    """
    pending: deque[tuple[Packed, Any]] = deque()
    due, wait = time.monotonic() + QUIET_SECONDS, QUIET_SECONDS
    for number, batch in enumerate(batches):
        if len(pending) == IN_FLIGHT:
            done, result = pending.popleft()
            yield done, jax.device_get(result)
        if say is not None and time.monotonic() > due:
            wait = 10 * QUIET_SECONDS
            due = time.monotonic() + wait
            say(f"evaluating {number}{f'/{len(batches)}' if isinstance(batches, Sequence) else ''}")
        pending.append((batch, compute(put_rows(mesh, batch))))
    for done, result in pending:
        yield done, jax.device_get(result)


@contextmanager
def say_if_slow(say: Callable[[str], None], line: str) -> Iterator[None]:
    """Say a line where the block takes longer than a few seconds."""
    timer = threading.Timer(QUIET_SECONDS, say, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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


class TokenReader:
    """Computes values of every trained token, a token whose weight is not 0, without a gradient.

    function: (params, batch) → an array [rows, trained], or a mapping of several by name. It is traced once for every
    shape of the layout, and a single program computes all of its values:

        def read(params, batch):
            logps, entropies = trained_logps(model, params["policy"], batch, entropy=True)
            reference, _ = trained_logps(model, params["reference"], batch)
            return {"old_logps": logps, "ref_logps": reference, "entropies": entropies}

        reader = TokenReader(read, layout, mesh)
        values = reader({"policy": state.params, "reference": reference.params}, rollout.trees(prompts))
        values["old_logps"][3]  # of the fourth branch: a number per trained token

    token_names, sequence_names: values of the trees that `function` reads.
    """

    def __init__(
        self,
        function: Callable[[Any, Packed], Any],
        layout: Layout,
        mesh: Mesh,
        *,
        token_names: Sequence[str] = (),
        sequence_names: Sequence[str] = (),
    ) -> None:
        self.layout, self.mesh = layout, mesh
        self.token_names, self.sequence_names = token_names, sequence_names
        # A function of its own, as in `evaluator`.
        self._compute = jax.jit(partial(function), out_shardings=replicated_sharding(mesh))
        self._compiler = BackgroundCompiler()

    def compile(self, params: Any) -> None:
        """Start to compile, in the background, for parameters that are placed like these."""
        for batch in self.shapes():
            self._compiler.compile(
                batch.rows.tokens.shape, self.lower(params, abstract_rows(self.mesh, batch))
            )

    def lower(self, params: Any, batch: Any) -> jax.stages.Lowered:
        """Lower the program for a micro-batch of one of `shapes`; shapes with shardings will do."""
        return self._compute.lower(params, batch)

    def __call__(self, params: Any, trees: Sequence[Tree]) -> Any:
        """Return one array per branch, in the order of the trees and of their branches, in a list.

        Where `function` returns a mapping, {name: such a list}. Every process must call this alike.
        """
        # The number of each tree's first branch.
        first = np.cumsum([0, *(len(tree.branches) for tree in trees)])
        lists: list[list[NDArray[Any]]] = []
        structure: Any = None
        names = {"token_names": self.token_names, "sequence_names": self.sequence_names}
        batches = pack_numbered(chunks_of(trees), self.layout, **names)
        for batch, result in compute_batches(lambda each: self._run(params, each), self.mesh, batches):
            arrays, structure = jax.tree.flatten(result)
            lists = lists or [[np.zeros(0, np.float32)] * int(first[-1]) for _ in arrays]
            row, column = np.nonzero(batch.trained >= 0)
            sequence = batch.rows.sequence[row, batch.trained[row, column]]
            starts = np.flatnonzero((np.diff(row, prepend=-1) != 0) | (np.diff(sequence, prepend=-1) != 0))
            place = row[starts], sequence[starts]
            branches = first[batch.example[place]] + batch.sequence_values[BRANCH][place].astype(np.int64)
            for values, array in zip(lists, arrays, strict=True):
                pieces = np.split(array[row, column], starts[1:])
                for branch, piece in zip(
                    branches.tolist(), pieces, strict=False
                ):  # no branch, one empty piece
                    values[branch] = piece
        if structure is None:  # no tree, no batch
            structure = jax.tree.structure(jax.eval_shape(self._compute, params, self.shapes()[0]))
            lists = [[] for _ in range(structure.num_leaves)]
        return jax.tree.unflatten(structure, lists)

    def _run(self, params: Any, batch: Packed) -> Any:
        self._compiler.wait(batch.rows.tokens.shape)
        return self._compute(params, batch)

    def shapes(self) -> list[Packed]:
        """Return an empty micro-batch of every shape that is read."""
        names = (*self.sequence_names, BRANCH)
        return empty_batches(self.layout, token_names=self.token_names, sequence_names=names)
