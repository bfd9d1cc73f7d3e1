"""Values that models give examples, as `with_values` asks for them: stored for whole data, else computed per update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.errors import InputError
from rlhf_core.packing.trees import Tree, Trees, trained_of, trained_per_branch
from rlhf_core.reading import TreeReader
from rlhf_core.training.reference import Reference

if TYPE_CHECKING:
    from rlhf_core.data import Source
    from rlhf_core.data.source import AddedValues
    from rlhf_core.models import Model
    from rlhf_core.packing.rows import Layout
    from rlhf_core.state import TrainState
    from rlhf_core.training.context import Context


class _Reader:
    """Reads one of a source's values, of any of its trees, under any parameters."""

    def __init__(self, added: AddedValues, model: Model, layout: Layout, mesh: Any, group: int) -> None:
        self.added, self._group = added, group
        self._read = TreeReader(partial(added.read, model.definition), layout, mesh, per=added.per)

    def __call__(self, params: Any, trees: Sequence[Tree]) -> NDArray[np.float32]:
        """Return the values of the trees, one after another, float32 [sum of `count_values`]."""
        found: Any = self._read(params, trees, group=self._group)
        if self.added.per == "token":
            found = np.concatenate(found) if len(found) else np.zeros(0)
        return np.asarray(found, np.float32)

    def count_values(self, trees: Sequence[Tree]) -> NDArray[np.int64]:
        """Count the values of each tree: those of its sequences, or of their trained tokens."""
        if self.added.per == "token":
            return trained_of(trees)
        if isinstance(trees, Trees):
            return np.full(len(trees), trees.branches, np.int64)
        return np.array([len(tree.branches) for tree in trees], np.int64)

    def attach(self, trees: Sequence[Tree], values: Sequence[NDArray[np.float32]]) -> list[Tree]:
        """Give each tree its values."""
        name = self.added.name
        if self.added.per == "token":
            return [
                tree._replace(token_values={**tree.token_values, name: _by_token(tree, each)})
                for tree, each in zip(trees, values, strict=True)
            ]
        return [
            tree._replace(sequence_values={**tree.sequence_values, name: each})
            for tree, each in zip(trees, values, strict=True)
        ]


def _by_token(tree: Tree, values: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
    """Lay out the values of a tree's trained tokens as those of all tokens of its branches; 0 for the others."""
    placed = []
    ends = np.cumsum(trained_per_branch(tree))
    for number, (ids, own) in enumerate(zip(tree.branches, np.split(values, ends[:-1]), strict=True)):
        trained = np.ones(len(ids), bool) if tree.weights is None else tree.weights[number] != 0
        if not len(tree.prefix):
            trained[:1] = False
        full = np.zeros(len(ids), np.float32)
        full[trained] = own
        placed.append(full)
    return tuple(placed)


class StoredValues:
    """Values of a complete source, under the parameters that training starts from."""

    def __init__(
        self, frozen: FrozenValues, source: Source, reader: _Reader, which: NDArray[np.int64]
    ) -> None:
        """frozen: those of the stage. which: indices of the examples that are read."""
        self.frozen, self.source, self.reader, self.which = frozen, source, reader, which
        self.trees = source.trees
        self._counts = reader.count_values(self.trees)
        self._ends = np.cumsum(self._counts)
        self._flat = np.full(int(self._counts.sum()), np.nan, np.float32)

    @cached_property
    def _digests(self) -> NDArray[np.uint64]:
        return self.source.digests()

    def read(self, params: Any) -> NDArray[np.float32]:
        """Return the values under other parameters, [examples, sequences of an example]; of tokens in one array."""
        return self._shaped(self.reader(params, self.trees[self.which]))

    def of(self, state: TrainState) -> NDArray[np.float32]:
        """Return the values, as of `read`. state: the run's, from which they are computed at its start."""
        self.frozen.ensure(state)
        return self._shaped(self._flat[self._places(self.which)])

    def _shaped(self, flat: NDArray[np.float32]) -> NDArray[np.float32]:
        return flat if self.reader.added.per == "token" else flat.reshape(-1, int(self._counts[0]))

    def _places(self, which: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the values of some examples are in the array of all."""
        starts = np.repeat(self._ends[which] - self._counts[which], self._counts[which])
        within = np.arange(len(starts)) - np.repeat(
            np.cumsum(self._counts[which]) - self._counts[which], self._counts[which]
        )
        return np.asarray(starts + within, np.int64)

    def compute(self, params: Any, which: NDArray[np.int64]) -> None:
        self._flat[self._places(which)] = self.reader(params, self.trees[which])

    def add(self, trees: Sequence[Tree], rows: NDArray[np.int64]) -> list[Tree]:
        which = self.source.index(rows)
        values = [self._flat[self._ends[i] - self._counts[i] : self._ends[i]] for i in which]
        return self.reader.attach(trees, values)

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return digests of the examples and their values, for a checkpoint."""
        name, field = self.reader.added.name, self.source.field
        arrays: dict[str, NDArray[Any]] = {
            f"digests/{field}": self._digests,
            f"{name}/{field}": self._shaped(self._flat),
        }
        if self.reader.added.per == "token":
            arrays[f"counts/{field}"] = self._counts
        return arrays

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
        """Restore the values of examples that are the same; return those of `which` that have none."""
        name, field = self.reader.added.name, self.source.field
        digests = arrays.get(f"digests/{field}", np.zeros(0, np.uint64))
        saved = arrays.get(f"{name}/{field}")
        if saved is not None and len(digests) == len(self._counts):
            same = digests == self._digests
            counts = arrays.get(f"counts/{field}", self._counts)
            self._flat[self._places(np.flatnonzero(same))] = saved.reshape(-1)[np.repeat(same, counts)]
        owner = np.repeat(np.arange(len(self._counts)), self._counts)
        unknown = np.bincount(owner, np.isnan(self._flat), len(self._counts)) > 0
        return self.which[unknown[self.which]]


class FrozenValues:
    """The stored values of a stage: computed from the state at update 0, and kept in every checkpoint."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._stored: list[StoredValues] = []
        self.start: Any = None
        """The parameters that training starts from, for examples that a checkpoint does not have."""
        self.known = False

    def open(self, source: Source, reader: _Reader, which: NDArray[np.int64]) -> StoredValues:
        self._stored.append(StoredValues(self, source, reader, which))
        return self._stored[-1]

    def ensure(self, state: TrainState) -> None:
        """Compute the values on the first call, from the state that training starts from."""
        if not self.known:
            self._context.compute(self._read, state)
        self.known = True

    def _read(self, state: TrainState) -> None:
        counts: dict[tuple[str, str], int] = {}
        for each in self._stored:
            kind = each.reader.added.what, each.source.unit
            counts[kind] = counts.get(kind, 0) + len(each.which)
        for (what, unit), count in counts.items():
            if count:
                self._context.say(f"reading the {what} of {count:,} {unit} under the starting model (once)")
        for each in self._stored:
            each.compute(state.params, each.which)

    def snapshot(self) -> dict[str, NDArray[Any]]:
        return {name: array for each in self._stored for name, array in each.snapshot().items()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore a `snapshot`, and compute the values of examples that changed or that only a longer run uses."""
        for each in self._stored:
            missing = each.restore(arrays)
            if len(missing):
                added, source = each.reader.added, each.source
                self._context.say(
                    f"reading the {added.what} of {len(missing):,} more {source.unit} of {source.field}"
                )
                each.compute(self.start, missing)
        self.known = True


class ModelValues:
    """The values of one source of examples."""

    def __init__(
        self,
        context: Context,
        source: Source,
        model: Model,
        layout: Layout,
        *,
        group: int,
        which: NDArray[np.int64] | None = None,
    ) -> None:
        """layout: of the rows that values are read in. group: branches that stay together.

        which: indices of the examples of a complete source that are used; None: all.
        """
        self._context, self._frozen = context, context.frozen
        self.stored: dict[str, StoredValues] = {}
        self._live: list[_Reader] = []
        self._reference: Reference | None = None
        self.names = {added.name: added.per for added in source.values}
        if source.field == "train_data":
            context.frozen.start = model.params
        elif context.frozen.start is None:
            raise InputError(
                f"values of {source.field}: give them to train_data, too, whose checkpoints keep them"
            )
        for added in source.values:
            reader = _Reader(added, model, layout, context.mesh, group)
            if added.reads == "frozen" and source.complete:
                if added.over_update is not None:
                    raise InputError(
                        f"values '{added.name}': over_update is for values that each update computes"
                    )
                which = np.arange(len(source)) if which is None else which
                self.stored[added.name] = context.frozen.open(source, reader, which)
                continue
            self._live.append(reader)
            if added.reads == "frozen" and self._reference is None:
                config = context.config
                self._reference = Reference(
                    model.params,
                    config.frozen_parameters,
                    context.mesh,
                    offload="reference" in config.offload,
                    definition=model.definition,
                )

    @property
    def held(self) -> Mapping[str, Any]:
        """Parameters that are in memory besides those of the models, by name."""
        return {} if self._reference is None else {"starting model": self._reference.copied}

    @property
    def needs_state(self) -> bool:
        return self.live or not self._frozen.known

    @property
    def live(self) -> bool:
        """Whether values are computed for each update."""
        return bool(self._live)

    def ensure(self, state: TrainState) -> None:
        """Compute the stored values, of this and of the stage's other sources, if they are not known yet."""
        self._frozen.ensure(state)

    def add(self, trees: Sequence[Tree], rows: NDArray[np.int64], state: TrainState | None) -> list[Tree]:
        """Return the trees of an update with their values. rows: `Example.row` of each."""
        if state is not None:
            self.ensure(state)
        changed = list(trees)
        for stored in self.stored.values():
            changed = stored.add(changed, rows)
        for reader in self._live:
            changed = reader.attach(changed, self._read(reader, changed, state))
        return changed

    def _read(
        self, reader: _Reader, trees: Sequence[Tree], state: TrainState | None
    ) -> list[NDArray[np.float32]]:
        """Compute the values of an update's trees."""
        counts = reader.count_values(trees)
        nothing = np.full(int(counts.sum()), np.nan, np.float32)
        if reader.added.reads == "frozen":
            assert self._reference is not None
            params = self._reference.params
        else:
            assert state is not None
            params = state.params
        flat = self._context.compute(reader, params, trees, otherwise=nothing)
        if reader.added.over_update is not None:
            flat = reader.added.over_update(flat.reshape(len(trees), -1)).reshape(-1)
        return np.split(np.asarray(flat, np.float32), np.cumsum(counts)[:-1])

    def snapshot(self) -> dict[str, NDArray[Any]]:
        return self._frozen.snapshot()

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._frozen.restore(arrays)
