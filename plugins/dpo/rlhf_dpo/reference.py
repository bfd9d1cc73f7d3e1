"""Log-probabilities of completions under the starting model, two numbers per pair.

Of data that are read whole they are computed once, before the first update: there is no second model in memory, and
updates take no forward pass for it. Of a stream each update computes those of its pairs, from a copy of the parameters
that are trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.fit import TreeReader
from rlhf_core.training import Reference
from rlhf_dpo.objective import sequence_logps

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core import TrainState
    from rlhf_core.data import Examples
    from rlhf_core.fit import Update
    from rlhf_core.models import Definition, Model
    from rlhf_core.packing import Layout, Packed, Tree, Trees
    from rlhf_core.training import Context


@dataclass(frozen=True)
class PairSet:
    """Encoded pairs as trees, with values of both completions of each."""

    trees: Trees
    """With the values `tokens` and `reference` per sequence, which are rows of the arrays below."""
    digests: NDArray[np.uint64]
    """uint64 [pairs]: see `Examples.digests`."""
    reference: NDArray[np.float32]
    """float32 [pairs, 2], nats: of the chosen and the rejected completion; NaN where not computed yet."""
    tokens: NDArray[np.float32]
    """float32 [pairs, 2]: tokens of each completion."""

    @classmethod
    def of(cls, pairs: Examples) -> PairSet:
        """Make the trees of pairs that were encoded with their completions."""
        assert pairs.starts is not None
        untrained = np.maximum(pairs.starts, pairs.prefixes[:, None])
        tokens = np.maximum(pairs.sequence_lengths - untrained, 0).astype(np.float32)
        reference = np.full((len(pairs), 2), np.nan, np.float32)

        def with_values(i: int, tree: Tree) -> Tree:
            # Views, so that packing sees references that are computed later.
            return tree._replace(sequence_values={"reference": reference[i], "tokens": tokens[i]})

        return cls(pairs.changed(with_values), pairs.digests, reference, tokens)


class PairReader:
    """Compute the log-probabilities of some pairs' completions under any parameters of a model."""

    def __init__(
        self, model: Definition, mesh: Mesh, pairs: PairSet, layout: Layout, which: NDArray[np.integer]
    ) -> None:
        """which: int [n], the pairs."""
        self.pairs, self.which = pairs, which
        self._read = TreeReader(partial(sequence_logps, model), layout, mesh, per="sequence")

    def __call__(self, params: Any, which: NDArray[np.integer] | None = None) -> NDArray[np.float32]:
        """Return float32 [n, 2], nats: of the chosen and of the rejected completion. which: instead of the reader's."""
        which = self.which if which is None else which
        logps: NDArray[np.float32] = self._read(params, self.pairs.trees[which], group=2)
        return logps.reshape(-1, 2)


@dataclass
class ReferenceLogps:
    """Compute the references of pairs from the state at update 0, and save them in every checkpoint."""

    context: Context
    readers: Mapping[str, PairReader]
    """By field: `train_data`, `eval_data`."""
    start: Any
    """The parameters that training starts from, for pairs that a checkpoint does not have."""
    known: bool = field(init=False, default=False)

    def ensure(self, state: TrainState) -> None:
        """Compute the references on the first call, from the state that training starts from."""
        if not self.known:
            self.context.compute(self._read, state)
        self.known = True

    def _read(self, state: TrainState) -> None:
        if count := sum(len(reader.which) for reader in self.readers.values()):
            self.context.say(
                f"reading the log-probabilities of {count:,} pairs under the starting model (once)"
            )
        for reader in self.readers.values():
            reader.pairs.reference[reader.which] = reader(state.params)

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return the digests of the pairs and their references for a checkpoint."""
        arrays: dict[str, NDArray[Any]] = {}
        for name, reader in self.readers.items():
            arrays[f"digests/{name}"] = reader.pairs.digests
            arrays[f"reference/{name}"] = reader.pairs.reference
        return arrays

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore a `snapshot`, and compute the references of pairs that changed or that only a longer run uses."""
        for name, reader in self.readers.items():
            references, digests = (
                reader.pairs.reference,
                arrays.get(f"digests/{name}", np.zeros(0, np.uint64)),
            )
            if len(digests) == len(references):
                same = digests == reader.pairs.digests
                references[same] = arrays[f"reference/{name}"][same]
            missing = reader.which[np.isnan(references[reader.which]).any(axis=1)]
            if len(missing):
                self.context.say(f"reading the log-probabilities of {len(missing):,} more pairs of {name}")
                references[missing] = reader(self.start, missing)
        self.known = True


class StartingModel:
    """Compute the references of an update's pairs from the parameters that training starts from."""

    def __init__(self, context: Context, model: Model, layout: Layout) -> None:
        """Copy the parameters that are trained."""
        config, mesh = context.config, context.mesh
        self._context = context
        waits = "reference" in config.offload
        self._start = Reference(
            model.params, config.frozen_parameters, mesh, offload=waits, definition=model.definition
        )
        self._read = TreeReader(partial(sequence_logps, model.definition), layout, mesh, per="sequence")

    @property
    def copied(self) -> Any:
        """The parameters that are in memory besides the policy's."""
        return self._start.copied

    def __call__(self, trees: Sequence[Tree]) -> list[Tree]:
        """Return the trees with the values `reference` and `tokens` per sequence, as those of `PairSet`."""
        nothing = np.full(2 * len(trees), np.nan, np.float32)
        read = partial(self._read, group=2)
        logps = self._context.compute(read, self._start.params, trees, otherwise=nothing)

        def with_values(tree: Tree, reference: NDArray[np.float32]) -> Tree:
            tokens = np.array([np.count_nonzero(weight) for weight in tree.weights or ()], np.float32)
            return tree._replace(sequence_values={"reference": reference, "tokens": tokens})

        return list(map(with_values, trees, logps.reshape(-1, 2)))


class PairUpdates:
    """An `UpdateSource` of pairs: those of another, and the references that its trees carry."""

    def __init__(
        self,
        trees: Any,
        reference: ReferenceLogps,
        start: StartingModel | None = None,
    ) -> None:
        """trees: the other source. reference: of pairs that are read whole. start: computes those of the others."""
        self._trees, self._reference, self._start = trees, reference, start
        self.total = trees.total
        self.data = trees.data

    def shapes(self) -> Sequence[Packed]:
        return self._trees.shapes()

    def needs_state(self, step: int) -> bool:
        return self._start is not None or not self._reference.known

    def update(self, step: int, state: TrainState) -> Update:
        self._reference.ensure(state)
        if self._start is None:
            return self._trees.update(step)
        trees, names = self._trees.examples(step)
        return self._trees.pack(self._start(trees), names)

    def epochs(self, step: int) -> float:
        return self._trees.epochs(step)

    def snapshot(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return self._trees.snapshot(step)[0], self._reference.snapshot()

    def restore(self, step: int, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        self._trees.restore(step, host, arrays)
        self._reference.restore(arrays)
