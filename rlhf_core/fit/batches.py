"""Sources of updates for the loop, and the one for trainers whose data is known before they start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.data import Source, count_examples, count_updates, require_vocabulary
from rlhf_core.data.source import Example, State
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
    """Training data as token ids: a `Source`, `Examples`, or a trainer's own."""

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


class ComputesValues(Protocol):
    """Values that models give the examples of updates, see `with_values`."""

    @property
    def names(self) -> Mapping[str, str]:
        """{name: "sequence" or "token"}."""
        ...

    @property
    def held(self) -> Mapping[str, Any]:
        """Parameters that are in memory besides those of the models, by name."""
        ...

    @property
    def needs_state(self) -> bool:
        """Whether the next `add` reads the state."""
        ...

    def add(self, trees: Sequence[Tree], rows: NDArray[np.int64], state: TrainState | None) -> list[Tree]:
        """Return the trees of an update with their values. rows: `Example.row` of each."""
        ...

    def snapshot(self) -> dict[str, np.ndarray]: ...

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None: ...


class ExampleUpdates:
    """Draw `total_batch_size` examples per update from a source; batches run across the ends of epochs.

    An update is a function of the data, the seed and `n`: it begins where the one before ended, and a row that is
    dropped makes room for the next. Checkpoints hold the position.
    """

    def __init__(
        self,
        source: Source,
        config: TrainerConfig,
        layout: Layout,
        *,
        vocabulary: int | None = None,
        say: Callable[[str], None] = lambda line: None,
        values: ComputesValues | None = None,
        sequence_names: Sequence[str] = (),
        group: int = 1,
    ) -> None:
        """vocabulary: embeddings of the model, which examples are compared with that are encoded on the way.

        say: prints which rows were dropped, after the last update. values: what models add to the examples.
        """
        self.data = source.copy()
        self.config, self.layout, self._vocabulary, self._say = config, layout, vocabulary, say
        added = {} if values is None else values.names
        self.values, self.group = values, group
        self.sequence_names = (*sequence_names, *(name for name, per in added.items() if per == "sequence"))
        self._token_names = tuple(name for name, per in added.items() if per == "token")
        limits = (config.total_batch_size, config.num_train_epochs, config.max_training_steps)
        self.total = count_updates(len(source), *limits)
        self._every = count_examples(len(source), *limits)
        self._positions: dict[int, State] = {0: self.data.state}
        self._drawn: dict[int, list[Example]] = {}
        self._next = 0

    @property
    def held(self) -> Mapping[str, Any]:
        """Parameters that are in memory for the values of examples, by name."""
        return {} if self.values is None else self.values.held

    def shapes(self) -> list[Packed]:
        return empty_batches(self.layout, sequence_names=self.sequence_names, token_names=self._token_names)

    def needs_state(self, step: int) -> bool:
        return self.values is not None and self.values.needs_state

    def update(self, step: int, state: TrainState | None = None) -> Update:
        examples = self._examples(step)
        trees = [example.tree for example in examples]
        rows = np.array([example.row for example in examples], np.int64)
        names = [example.where for example in examples]
        if self.values is not None:
            trees = self.values.add(trees, rows, state)
        # A layout that was chosen from all examples has room for each.
        layout = self.layout if self.data.complete else with_room(self.layout, trees, self.group)
        batches = pack(
            trees,
            layout,
            sequence_names=self.sequence_names,
            token_names=self._token_names,
            group=self.group,
        )
        limit = None if self.data.complete else self._vocabulary
        if limit is not None and any(int(batch.rows.tokens.max()) >= limit for batch in batches):
            require_vocabulary(trees, names.__getitem__, limit)
        return Update(
            batches,
            sum(tree.size for tree in trees),
            names.__getitem__,
            numbers=lambda batch: np.where(batch.example < 0, -1, rows[batch.example]),
        )

    def _examples(self, step: int) -> list[Example]:
        """Draw the examples of an update, from the nearest position before it that is known."""
        if step in self._drawn:
            return self._drawn[step]
        if self._next != step:
            self._go_to(step)
        if not self._drawn:
            self.data.begin(self._every)
        while self._next <= step:
            first = self._next * self.config.total_batch_size
            count = min(self.config.total_batch_size, self._every - first)
            self._drawn[self._next] = self.data.next(count)
            self._next += 1
            self._positions[self._next] = self.data.state
        self._forget(step)
        if step == self.total - 1:
            passed_over = self.data.end()
            if passed_over:
                self._say(passed_over)
        return self._drawn[step]

    def _go_to(self, step: int) -> None:
        position = self.data.position(step * self.config.total_batch_size)
        self._next = step
        if position is None:
            self._next = max(known for known in self._positions if known <= step)
            position = self._positions[self._next]
        self.data.restore(position)

    def _forget(self, step: int) -> None:
        """Keep the updates that the loop may ask for again; of a complete source any is drawn again."""
        if self.data.complete:
            self._drawn = {step: self._drawn[step]}
            self._positions = {}
            return
        recent = -KNOWN_UPDATES - FIRST_UPDATES
        for old in sorted(self._drawn)[:recent]:
            del self._drawn[old]
        for old in sorted(self._positions)[1:recent]:
            del self._positions[old]

    def epochs(self, step: int) -> float:
        """Return the passes over the data; of a stream, whose length is not known, the share of the run."""
        return self._count(step) / (len(self.data) or self._every)

    def rows_reached(self) -> NDArray[np.int64]:
        """Return which examples of a complete source the run uses, ascending: not all where it ends within an epoch."""
        return self.data.rows_reached(self._every)

    def _count(self, step: int) -> int:
        """Count the examples of the first `step` updates: the last update of the epochs takes what is left."""
        return min(step * self.config.total_batch_size, self._every)

    def snapshot(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        arrays = {} if self.values is None else self.values.snapshot()
        if self.data.complete:
            return {"examples": self._count(step)}, arrays
        return {"position": self._positions[step]}, arrays

    def restore(self, step: int, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Continue from a position; warn where an extended run differs from one of this length from the start."""
        if self.values is not None:
            self.values.restore(arrays)
        if "position" in host:
            self._positions[step] = host["position"]
            return
        missing = self._count(step) - host["examples"]
        if missing > 0:
            warn(
                f"update {step} was the last and took what was left of the epoch; a run of this length from "
                f"the start would have given it {missing} more examples, which are skipped now"
            )
