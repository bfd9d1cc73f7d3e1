"""What a check says of a stage's updates before it runs: how many, of what, and how long their rows are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data import count_examples, count_updates
from rlhf_core.models import Definition

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig


class ModelNotHereError(Exception):
    """Raised during a check where a build cannot continue, since this machine has no model or tokenizer yet.

    Everything that the data and the config alone show has been counted by then.
    """


@dataclass
class Expected:
    """What a source of updates will do, as far as its data and the config show.

    lines: of a forecast: what there is to train on, updates, tokens. later: lines that follow the memory.
    updates: of the whole run. tokens: of an update. longest: tokens of the longest row.
    examples: of an update.
    held: {part: bytes per device} of what is in memory besides the state, from the model and the bytes of its
        parameters. source: what a compiler needs to know of a source that samples.
    """

    lines: list[str]
    updates: int
    tokens: int
    longest: int
    later: Sequence[str] = ()
    held: Callable[[Definition, int], Mapping[str, int]] = lambda *_: {}
    source: Any = None
    examples: int = 0


def count_training(
    config: TrainerConfig, unit: str, count: int, report: str, sizes: NDArray[np.int64] | None = None
) -> Expected:
    """Count the examples, updates and tokens of training rows.

    count: 0 for a stream, whose length is not known. sizes: int64 [rows], tokens, of all or of the first rows;
    None: not known.
    """
    longest = config.max_sequence_length
    limits = (config.total_batch_size, config.num_train_epochs, config.max_training_steps)
    total, drawn = count_updates(count, *limits), count_examples(count, *limits)
    each = min(config.total_batch_size, drawn)  # an update holds no more than the data of all epochs
    per_update, tokens = config.total_batch_size * (longest or 0), "tokens unknown: there is no limit"
    if longest is not None:
        tokens = f"at most {drawn * longest:,} tokens"
    if sizes is not None:
        longest, mean = int(sizes.max()), int(sizes.sum()) / len(sizes)
        per_update = round(mean * config.total_batch_size)
        tokens = f"about {round(drawn * mean):,} tokens, shared prompts once"
    epochs = f", {drawn / count:.2f} epochs" if count else ""
    updates = f"{total:,} update{'s'[: total > 1]} of {each} {unit}{epochs}"
    lines = [report, updates, tokens]
    return Expected(lines, total, per_update, longest or 0, examples=each)
