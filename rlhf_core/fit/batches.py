"""Sources of updates for the loop, and the one for trainers whose data is known before they start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.data import batch_rows, count_examples, count_updates, require_vocabulary, visited_rows
from rlhf_core.data.lazy import Encoding, ExampleReader, LazyRecords, LazyRows, State
from rlhf_core.errors import warn
from rlhf_core.mesh import row_multiple
from rlhf_core.metrics import Metric
from rlhf_core.packing.layout import MICRO_BATCH_TOKENS
from rlhf_core.packing.rows import Layout, Packed, Tree, choose_layout, empty_batches, pack, with_room
from rlhf_core.packing.trees import most_branches, sizes_of, trained_of
from rlhf_core.runtime.machine import platform

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.config import TrainerConfig
    from rlhf_core.state import TrainState


class Update(NamedTuple):
    """One update's work, on the host."""

    batches: Sequence[Packed]
    """Micro-batches, in order."""
    tokens: int
    """Tokens the model reads, shared prompts once and padding never."""
    where: Callable[[int], str]
    """Names the example with a number of `Packed.example`, such as "pairs.jsonl row 17"."""
    metrics: Mapping[str, float | Metric] = {}
    """Metrics that the host knows, under other names than the objective's. Numbers are averaged over the updates of a
    logged step; a `Sum`, `Min`, … of `rlhf_core.metrics` is merged."""
    timing: Mapping[str, float | Metric] = {}
    """Metrics that differ from run to run: seconds, under names that begin with time/, and speeds."""
    numbers: Callable[[Packed], NDArray[np.integer[Any]]] = lambda batch: batch.example
    """Of a micro-batch's sequences, [rows, sequences]: the row of the data, or the completion of the rollout."""


class EncodedRows(Protocol):
    """Training data as token ids: `Examples`, or a trainer's own."""

    def __len__(self) -> int: ...

    def where(self, i: int) -> str:
        """Name row `i`, such as "pairs.jsonl row 17"."""
        ...


class UpdateSource(Protocol):
    """A source of updates. An update depends on nothing but the step, the seed and, for rollouts, the state.

    Steps count from 0. Unless `needs_state(step)`, `update(step)` must not read the state: the loop may ask for the
    update early and more than once.
    """

    @property
    def total(self) -> int:
        """The updates in the whole run."""
        ...

    @property
    def data(self) -> EncodedRows:
        """The rows that updates are drawn from; a run cannot continue with another number of rows."""
        ...

    def shapes(self) -> Sequence[Packed]:
        """Return an empty micro-batch of every shape, for compiling updates that read the state."""
        ...

    def needs_state(self, step: int) -> bool:
        """Return whether `update(step)` reads the state; earlier updates are then checked before it."""
        ...

    def update(self, step: int, state: TrainState) -> Update:
        """Return update `step`, the same on every process. state: before it; read only if `needs_state(step)`."""
        ...

    def epochs(self, step: int) -> float:
        """Return how many passes over the data the first `step` updates make, the metric `epoch`.

        step: of the newest update or a later one. For a later one it is an estimate where rollouts may take several
        rounds of prompts.
        """
        ...

    def snapshot(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return what a checkpoint after `step` updates holds besides the state: JSON values, and arrays."""
        ...

    def restore(self, step: int, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Continue after `step` updates from the result of `snapshot(step)`."""
        ...


KNOWN_UPDATES = 24
"""Updates whose programs are compiled early, in the background."""
FIRST_UPDATES = 8
"""Updates that `uses_several_batches` looks at."""


def expected_calls(
    updates: UpdateSource, start: int, count: int, state: TrainState
) -> list[tuple[Packed, bool]]:
    """List the programs that `count` updates from `start` on call: a micro-batch, and whether it follows another.

    Each combination of shape and flag comes once, in the order of first use. Where an update reads the state, only
    shapes are known: each is listed as the first of an update, and for `count` > 1 also as a later one.
    """
    steps = range(start, min(start + count, updates.total))
    if any(map(updates.needs_state, steps)):
        empties = updates.shapes()
        return [(batch, follows) for follows in (False, True)[:count] for batch in empties]
    calls: dict[Any, tuple[Packed, bool]] = {}
    for step in steps:
        for number, batch in enumerate(updates.update(step, state).batches):
            kind = number > 0, *(array.shape for array in jax.tree.leaves(batch))
            calls.setdefault(kind, (batch, number > 0))
    return list(calls.values())


def uses_several_batches(updates: UpdateSource, state: TrainState) -> bool:
    """Return whether any of the run's first updates has several micro-batches; False where they read the state.

    A continued run looks at the same first updates, so that it computes the same.
    """
    steps = range(min(FIRST_UPDATES, updates.total))
    known = not any(map(updates.needs_state, steps))
    return known and any(len(updates.update(step, state).batches) > 1 for step in steps)


def choose_row_layout(
    trees: Sequence[Tree], config: TrainerConfig, mesh: Mesh, hidden_size: int, *, reads_tokens: bool
) -> Layout:
    """Choose rows for the trees so that an update has about `gradient_accumulation_steps` micro-batches.

    reads_tokens: whether the objective reads values of trained tokens; a reward model's reads sequences only.
    """
    sizes = sizes_of(trees)
    per_update = min(config.total_batch_size, len(trees))
    # Updates differ in size: most should fit into the number of micro-batches that was asked for.
    update_tokens = int(np.ceil(sizes.mean() * per_update)) + int(2 * sizes.std() * np.sqrt(per_update))
    return choose_layout(
        sizes,
        most_branches(trees),
        hidden_size=hidden_size,
        max_tokens=min(MICRO_BATCH_TOKENS, max(1, -(-update_tokens // config.gradient_accumulation_steps))),
        trees_per_update=per_update,
        trained_counts=trained_of(trees) if reads_tokens else None,
        row_multiple=row_multiple(mesh),
        skips_blocks=attention_skips_blocks(config, mesh),
        updates=count_updates(
            len(trees), config.total_batch_size, config.num_train_epochs, config.max_training_steps
        ),
    )


def attention_skips_blocks(config: TrainerConfig, mesh: Mesh) -> bool:
    """Return whether attention skips the blocks of a row that no token sees: `blocks` does on one device, `pallas` on
    any number, and both where `context` cuts rows.
    """
    name = config.attention.name
    on_one = name == "blocks" or (name == "auto" and platform() == "cpu")
    return name == "pallas" or (mesh.size == 1 and on_one) or mesh.shape["context"] > 1


class DatasetUpdates:
    """Draw `total_batch_size` trees per update from shuffled epochs; batches run across the ends of epochs.

    Update `n` is a function of the trees, the seed and `n`, so that checkpoints hold no state of it.
    """

    def __init__(
        self,
        trees: Sequence[Tree],
        config: TrainerConfig,
        layout: Layout,
        *,
        seed: int,
        data: EncodedRows,
        sequence_names: Sequence[str] = (),
        group: int = 1,
    ) -> None:
        self.trees, self.config, self.layout = trees, config, layout
        self.data = data
        self.sequence_names, self.group = sequence_names, group
        self.seed = config.shuffle_seed_train if config.shuffle_seed_train is not None else seed
        self.total = count_updates(
            len(trees), config.total_batch_size, config.num_train_epochs, config.max_training_steps
        )
        self._order: Iterator[np.ndarray] | None = None
        self._next = -1

    def shapes(self) -> list[Packed]:
        return empty_batches(self.layout, sequence_names=self.sequence_names)

    def needs_state(self, step: int) -> bool:
        return False

    def update(self, step: int, state: TrainState | None = None) -> Update:
        if self._order is None or step != self._next:
            self._order = batch_rows(
                len(self.trees),
                self.config.total_batch_size,
                seed=self.seed,
                shuffle=self.config.shuffle_train_dataset,
                epochs=None if self.config.max_training_steps else self.config.num_train_epochs,
                start=step,
            )
        chosen = next(self._order)
        self._next = step + 1
        trees = [self.trees[i] for i in chosen]
        batches = pack(trees, self.layout, sequence_names=self.sequence_names, group=self.group)
        return Update(
            batches,
            sum(tree.size for tree in trees),
            lambda example: self.data.where(int(chosen[example])),
            numbers=lambda batch: np.where(batch.example < 0, -1, chosen[batch.example]),
        )

    def epochs(self, step: int) -> float:
        return self._examples(step) / len(self.trees)

    def rows_reached(self) -> NDArray[np.int64]:
        """Return the rows that the run's updates use, ascending: not all where it ends within the first epoch."""
        count, shuffle = self._examples(self.total), self.config.shuffle_train_dataset
        return visited_rows(len(self.trees), count, seed=self.seed, shuffle=shuffle)

    def _examples(self, step: int) -> int:
        """Count the examples of the first `step` updates: the last update of the epochs takes what is left."""
        config = self.config
        every = count_examples(
            len(self.trees), config.total_batch_size, config.num_train_epochs, config.max_training_steps
        )
        return min(step * config.total_batch_size, every)

    def snapshot(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return {"examples": self._examples(step)}, {}

    def restore(self, step: int, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Warn where an extended run differs from one that had this length from the start; restore nothing."""
        missing = self._examples(step) - host["examples"]
        if missing > 0:
            warn(
                f"update {step} was the last and took what was left of the epoch; a run of this length from "
                f"the start would have given it {missing} more examples, which are skipped now"
            )


class LazyUpdates:
    """Draw `total_batch_size` examples per update from rows that are encoded while updates use them.

    An update is a function of the data, the seed and `n`: it begins where the one before ended, and a row that is
    dropped makes room for the next. Checkpoints hold the position.
    """

    def __init__(
        self,
        rows: LazyRows,
        config: TrainerConfig,
        layout: Layout,
        *,
        vocabulary: int,
        say: Callable[[str], None],
        sequence_names: Sequence[str] = (),
        group: int = 1,
    ) -> None:
        """vocabulary: embeddings of the model. say: prints which rows were dropped, after the last update."""
        self.data = rows
        self.config, self.layout, self._vocabulary, self._say = config, layout, vocabulary, say
        self._names, self._group = sequence_names, group
        limits = (config.total_batch_size, config.num_train_epochs, config.max_training_steps)
        self.total = count_updates(len(rows), *limits)
        self._examples = count_examples(len(rows), *limits)
        self._positions: dict[int, State | None] = {0: None}
        self._made: dict[int, tuple[list[Tree], list[str]]] = {}
        self._reading: ExampleReader | None = None
        self._next = 0

    def shapes(self) -> list[Packed]:
        return empty_batches(self.layout, sequence_names=self._names)

    def needs_state(self, step: int) -> bool:
        return False

    def update(self, step: int, state: TrainState | None = None) -> Update:
        return self.pack(*self.examples(step))

    def pack(self, trees: Sequence[Tree], places: Sequence[str]) -> Update:
        """Make an update of `examples`, whose trees may have got further values."""
        layout = with_room(self.layout, trees, self._group)
        batches = pack(trees, layout, sequence_names=self._names, group=self._group)
        if any(int(batch.rows.tokens.max()) >= self._vocabulary for batch in batches):
            require_vocabulary(trees, places.__getitem__, self._vocabulary)
        return Update(batches, sum(tree.size for tree in trees), places.__getitem__)

    def examples(self, step: int) -> tuple[list[Tree], list[str]]:
        """Read the examples of an update, with their names, from the nearest position before it that is known."""
        if step in self._made:
            return self._made[step]
        if self._reading is None or self._next != step:
            self._next = max(known for known in self._positions if known <= step)
            self._reading = ExampleReader(self.data, self._encoding, self._positions[self._next])
        while self._next <= step:
            size, first = self.config.total_batch_size, self._next * self.config.total_batch_size
            examples = [next(self._reading) for _ in range(min(size, self._examples - first))]
            self._made[self._next] = [each.tree for each in examples], [each.where for each in examples]
            self._next += 1
            self._positions[self._next] = self._reading.state
        recent = -KNOWN_UPDATES - FIRST_UPDATES
        for old in sorted(self._made)[:recent]:
            del self._made[old]
        for old in sorted(self._positions)[1:recent]:
            del self._positions[old]
        if step == self.total - 1:
            self._end()
        return self._made[step]

    @cached_property
    def _encoding(self) -> Encoding:
        if isinstance(self.data, LazyRecords) and self._examples >= len(self.data):
            self.data.cache()
        return Encoding(self.data.encoder, self.config.workers)

    def _end(self) -> None:
        if isinstance(self.data, LazyRecords):
            self.data.wait()
        if self._reading is not None and (said := self.data.summary(self._reading.dropped)):
            self._say(said)

    def epochs(self, step: int) -> float:
        """Return the passes over the data; of a stream, whose length is not known, the share of the run."""
        done = min(step * self.config.total_batch_size, self._examples)
        return done / (len(self.data) or self._examples)

    def snapshot(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return {"position": self._positions[step]}, {}

    def restore(self, step: int, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        self._positions[step] = host["position"]
