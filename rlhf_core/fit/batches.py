"""Where the loop gets its updates from, and the source for trainers whose data is known before they start."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.contracts import Rows
from rlhf_core.data import batch_rows, count_updates, visited_rows
from rlhf_core.mesh import row_multiple
from rlhf_core.metrics import Metric
from rlhf_core.packing.layout import MICRO_BATCH_TOKENS
from rlhf_core.packing.rows import Layout, Packed, Tree, choose_layout, pack
from rlhf_core.packing.trees import most_branches, sizes_of, trained_of

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
    """Names the example that `Packed.example` numbers, as "pairs.jsonl row 17"."""
    metrics: Mapping[str, float | Metric] = {}
    """Metrics the host knows already, with other names than the objective's: numbers are averaged over the updates of a
    logged step, a `Sum`, `Min`, … of `rlhf_core.metrics` is merged."""
    timing: Mapping[str, float | Metric] = {}
    """The same of what differs from run to run: seconds, by names that begin with time/, and speeds."""


class EncodedRows(Protocol):
    """Training data as token ids: `Texts`, `Pairs` or `Prompts`, or a trainer's own."""

    def row_digests(self) -> NDArray[np.uint64]:
        """uint64 [rows]: a hash of what is trained on in each row."""
        ...

    def where(self, i: int) -> str:
        """Names row `i`, such as "pairs.jsonl row 17"."""
        ...


class UpdateSource(Protocol):
    """Where updates come from. What it gives at a step depends on the step, the seed and (rollouts) the state alone.

    Steps count from 0. Unless `needs_state(step)`, `update(step)` may be asked for ahead and again, and the state it is
    given says nothing: it is a function of `step` alone.
    """

    total: int
    """Updates in the whole run."""
    updates_per_epoch: float
    """The metric `epoch` is the updates done over it."""
    data: EncodedRows
    """What updates are drawn from; a run is not continued where a row that was drawn is another now."""

    def shapes(self) -> Sequence[Packed]:
        """An empty micro-batch of every shape there will be; those of updates that read the state compile ahead."""
        ...

    def needs_state(self, step: int) -> bool:
        """True where `update(step)` reads the state, so that earlier updates are checked before it."""
        ...

    def update(self, step: int, state: TrainState) -> Update:
        """What is computed as update `step`, the same on every process. state: before it, where `needs_state(step)`."""
        ...

    def drawn(self, step: int, host: Mapping[str, Any]) -> NDArray[np.int64]:
        """The rows of `data` that the first `step` updates took. host: what `snapshot(step)` gave."""
        ...

    def snapshot(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What a checkpoint after `step` updates must hold beside the state: what JSON can hold, and arrays."""
        ...

    def restore(self, step: int, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Go on after `step` updates, with what `snapshot(step)` gave."""
        ...


KNOWN_UPDATES = 24
"""Updates whose programs are compiled ahead."""
FIRST_UPDATES = 8
"""Updates that tell whether there are several micro-batches in one."""


def expected_calls(
    updates: UpdateSource, start: int, count: int, state: TrainState
) -> list[tuple[Packed, bool]]:
    """What `count` updates from `start` on compute: micro-batches, and whether another comes before in the update.

    Each combination once, as first needed. Where one of the updates reads the state, only shapes are known: every one
    at the head of an update, and for more than one update also after another.
    """
    steps = range(start, min(start + count, updates.total))
    if any(map(updates.needs_state, steps)):
        empties = updates.shapes()
        return [(batch, follows) for follows in (False, True)[:count] for batch in empties]
    found: dict[Any, tuple[Packed, bool]] = {}
    for step in steps:
        for number, batch in enumerate(updates.update(step, state).batches):
            kind = number > 0, *(array.shape for array in jax.tree.leaves(batch))
            found.setdefault(kind, (batch, number > 0))
    return list(found.values())


def uses_several_batches(updates: UpdateSource, state: TrainState) -> bool:
    """Whether updates are of several micro-batches now and then, as far as can be told before one is computed.

    By the first of the run, wherever it continues from: a run that continues then computes the same.
    """
    steps = range(min(FIRST_UPDATES, updates.total))
    known = not any(map(updates.needs_state, steps))
    return known and any(len(updates.update(step, state).batches) > 1 for step in steps)


def empty_batches(
    layout: Layout, *, token_names: Sequence[str] = (), sequence_names: Sequence[str] = ()
) -> list[Packed]:
    """A micro-batch without a sequence in it, of every class of `layout`."""

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
        )

    classes = zip(layout.time, layout.rows, layout.sequences, layout.trained, strict=True)
    return [one(*shape) for shape in classes]


def choose_row_layout(
    trees: Sequence[Tree], config: TrainerConfig, mesh: Mesh, hidden_size: int, *, reads_tokens: bool
) -> Layout:
    """Rows for these trees. `gradient_accumulation_steps` splits an update into about so many micro-batches.

    reads_tokens: whether the objective reads log-probs of trained tokens (not so for reward models).
    """
    sizes = sizes_of(trees)
    per_update = min(config.total_batch_size, len(trees))
    # Updates differ in size: most of them shall fit the micro-batches that were asked for.
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
    """Whether attention in rows of several trees will skip what no token sees: blocks are for one device."""
    name = config.attention.name
    return mesh.size == 1 and (name == "blocks" or (name == "auto" and jax.default_backend() == "cpu"))


def evaluation_batches(
    trees: Sequence[Tree],
    config: TrainerConfig,
    mesh: Mesh,
    hidden_size: int,
    *,
    reads_tokens: bool,
    sequence_names: Sequence[str] = (),
    group: int = 1,
) -> list[Packed]:
    """Micro-batches that hold every tree once, or the first `max_evaluation_steps` batches of `eval_batch_size`."""
    at_once = config.eval_batch_size or config.total_batch_size
    if config.max_evaluation_steps is not None:
        trees = trees[: at_once * config.max_evaluation_steps]
    layout = choose_row_layout(trees, config, mesh, hidden_size, reads_tokens=reads_tokens)
    chunks = (trees[start : start + at_once] for start in range(0, len(trees), at_once))
    return list(pack_chunks(chunks, layout, sequence_names=sequence_names, group=group))


def pack_chunks(
    chunks: Iterable[Sequence[Tree]],
    layout: Layout,
    *,
    token_names: Sequence[str] = (),
    sequence_names: Sequence[str] = (),
    group: int = 1,
) -> Iterator[Packed]:
    """Pack chunks of trees one after another; `Packed.example` numbers the trees of all chunks."""
    start = 0
    for trees in chunks:
        for batch in pack(trees, layout, token_names=token_names, sequence_names=sequence_names, group=group):
            yield batch._replace(example=np.where(batch.example < 0, -1, batch.example + start))
        start += len(trees)


class DatasetUpdates:
    """Shuffled epochs over trees, `total_batch_size` an update; batches run across the ends of epochs.

    Stateless: update `n` is a function of the trees, the seed and `n`, so a checkpoint needs to keep nothing.
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
        self.updates_per_epoch = len(trees) / config.total_batch_size
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
            batches, sum(tree.size for tree in trees), lambda example: self.data.where(int(chosen[example]))
        )

    def drawn(self, step: int, host: Mapping[str, Any]) -> NDArray[np.int64]:
        return visited_rows(
            len(self.trees), self._examples(step), seed=self.seed, shuffle=self.config.shuffle_train_dataset
        )

    def _examples(self, step: int) -> int:
        """How many examples the first `step` updates take: the last one of the epochs takes what is left."""
        whole = step * self.config.total_batch_size
        if self.config.max_training_steps:
            return whole
        return min(whole, int(len(self.trees) * self.config.num_train_epochs))

    def snapshot(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return {"examples": self._examples(step)}, {}

    def restore(self, step: int, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """There is nothing to restore; say where a run that is extended differs from one that was longer at once."""
        missing = self._examples(step) - host["examples"]
        if missing > 0:
            warnings.warn(
                f"update {step} was the last one, with what was left of the epoch: in a run of this length from the "
                f"start it would have had {missing} more examples, which are passed over now",
                stacklevel=2,
            )
