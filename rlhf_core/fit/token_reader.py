"""Read trees with models, without a gradient: a value for every trained token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.fit.batches import empty_batches
from rlhf_core.fit.compute import compute_batches
from rlhf_core.fit.sequence_values import BRANCH, chunks_of, pack_numbered
from rlhf_core.mesh import abstract_rows, replicated_sharding
from rlhf_core.packing.rows import Layout, Packed, Tree
from rlhf_core.runtime.background import BackgroundCompiler

if TYPE_CHECKING:
    from jax.sharding import Mesh


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
