"""Values of an update's rows: what an objective returned for every trained token, or for every sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.reading import cut_sequences, cut_tokens, require_shape

if TYPE_CHECKING:
    from rlhf_core.fit.batches import Update


@dataclass(frozen=True)
class UpdateValues:
    """What an objective returned for the sequences of one update, in the order of their numbers.

    numbers: int64 [sequences]: the row of the data, or the completion of the rollout, that each sequence comes from;
        the two of a pair have one number. where: names the row of each sequence, such as "pairs.jsonl row 17".
    arrays: {name: an array [sequences], or a list with an array [trained tokens] for each}.
    """

    numbers: NDArray[np.int64]
    where: Sequence[str]
    arrays: Mapping[str, Any]


def read_values(
    update: Update, found: Sequence[Mapping[str, jax.Array]], per: Mapping[str, Literal["token", "sequence"]]
) -> UpdateValues:
    """Bring the values of an update's micro-batches to the host, by sequence. found: of each micro-batch, by name."""
    used = [batch.example >= 0 for batch in update.batches]
    numbers = np.concatenate(
        [update.numbers(batch)[there] for batch, there in zip(update.batches, used, strict=True)]
    ).astype(np.int64)
    examples = np.concatenate(
        [batch.example[there] for batch, there in zip(update.batches, used, strict=True)]
    )
    # The turns of an episode may be examples of their own, in any rows.
    order = np.lexsort((examples, numbers))
    fetched = jax.device_get(list(found))
    arrays: dict[str, Any] = {}
    for name, each in per.items():
        for batch, values in zip(update.batches, fetched, strict=True):
            require_shape(name, each, values[name].shape, batch)
        cut = cut_tokens if each == "token" else cut_sequences
        parts = [
            cut(batch, there, values[name])
            for batch, there, values in zip(update.batches, used, fetched, strict=True)
        ]
        ordered = np.concatenate(parts)[order]
        arrays[name] = ordered.tolist() if each == "token" else ordered
    return UpdateValues(numbers[order], [update.where(int(i)) for i in examples[order]], arrays)
