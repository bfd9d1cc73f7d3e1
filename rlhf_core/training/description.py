"""What a source of a stage's updates says of itself before the stage begins: how many, of what, how long their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_core.data import count_examples, count_updates
from rlhf_core.errors import counted
from rlhf_core.packing.trees import lengths_of, sizes_of

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.models import Definition, Model
    from rlhf_core.packing.trees import Trees
    from rlhf_core.training.on_shapes import OnShapes


@dataclass(frozen=True)
class Description:
    """What updates a stage will make, as far as its data and its config show.

    lines: what there is to train on, updates, tokens. later: lines that follow the memory.
    updates: of the whole run. tokens: of an update. longest: tokens of the longest row. examples: of an update.
    """

    lines: list[str]
    updates: int
    tokens: int
    longest: int
    examples: int = 0
    later: Sequence[str] = ()


class Describes(Protocol):
    """A source of updates, as a check sees it."""

    def describe(self, context: OnShapes, models: Sequence[Model]) -> Description:
        """Describe the updates. models: the stage's; empty where one is not on this machine yet."""
        ...

    def held(self, context: OnShapes, definition: Definition, parameters: int) -> Mapping[str, int]:
        """Count the bytes per device, by part, that are in memory besides models and optimizers.

        definition: of the first model that is trained. parameters: bytes of all that are.
        """
        ...


@dataclass(frozen=True)
class TrainedRows:
    """Rows that are trained on: `Texts`, `Pairs`, or rows that are encoded while updates use them.

    unit: what they are, "pairs".
    """

    unit: str
    rows: Any

    def describe(self, context: OnShapes, models: Sequence[Model]) -> Description:
        trees, size = self.rows.trees(), context.config.total_batch_size
        sizes = sizes_of(trees)
        mean = int(sizes.sum()) / len(sizes)
        updates, total, drawn = _updates(context.config, self.unit, len(self.rows))
        report = "".join([str(self.rows.report), *_positions(trees, models)])
        tokens = f"about {round(drawn * mean):,} tokens, shared prompts once"
        lines = [report, updates, tokens]
        return Description(lines, total, round(mean * size), int(sizes.max()), examples=min(size, drawn))

    def held(self, context: OnShapes, definition: Definition, parameters: int) -> Mapping[str, int]:
        return {}


@dataclass(frozen=True)
class UntokenizedRows:
    """Rows that are trained on, where this machine has no tokenizer for them yet.

    unit: what they are, "pairs". count: None: of a stream.
    """

    unit: str
    count: int | None

    def describe(self, context: OnShapes, models: Sequence[Model]) -> Description:
        longest, size = context.config.max_sequence_length, context.config.total_batch_size
        updates, total, drawn = _updates(context.config, self.unit, self.count or 0)
        report = f"a stream of {self.unit}"
        if self.count is not None:
            report = f"{counted(self.count, self.unit)} before length limits"
        tokens = "tokens unknown: there is no limit"
        if longest is not None:
            tokens = f"at most {drawn * longest:,} tokens"
        longest = longest or 0
        lines = [report, updates, tokens]
        return Description(lines, total, size * longest, longest, examples=min(size, drawn))

    def held(self, context: OnShapes, definition: Definition, parameters: int) -> Mapping[str, int]:
        return {}


def _updates(config: TrainerConfig, unit: str, count: int) -> tuple[str, int, int]:
    """Describe the updates of `count` rows, 0 where it is not known; return their number and that of examples, too."""
    limits = (config.total_batch_size, config.num_train_epochs, config.max_training_steps)
    total, drawn = count_updates(count, *limits), count_examples(count, *limits)
    # An update holds no more than the data of all epochs.
    each = min(config.total_batch_size, drawn)
    epochs = f", {drawn / count:.2f} epochs" if count else ""
    return f"{total:,} update{'s'[: total > 1]} of {each} {unit}{epochs}", total, drawn


def _positions(trees: Trees, models: Sequence[Model]) -> list[str]:
    """Say which examples are longer than the models' positions."""
    lengths = lengths_of(trees)
    longest = int(lengths.max())
    limits = dict.fromkeys(model.max_positions for model in models)
    return [
        f"; {int((lengths > limit).sum()):,} of up to {longest:,} tokens, more than the model's {limit:,} positions: "
        f"set max_sequence_length = {limit}"
        for limit in limits
        if isinstance(limit, int) and longest > limit
    ]
