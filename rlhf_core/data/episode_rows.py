"""The rows that an environment's episodes begin with, whose prompts are not known before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.cache import row_digest
from rlhf_core.data.source import Places, Records, cells, mapped


@dataclass(frozen=True)
class EpisodeRows:
    """Rows of a dataset in the place of `Prompts`: an environment makes each prompt when its episode begins.

    max_prompt_length: tokens; no prompt is longer.
    """

    records: Records
    max_prompt_length: int

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def places(self) -> Places:
        return Places(self.records, np.arange(len(self)))

    def where(self, i: int) -> str:
        """Name row `i`, such as "tasks.jsonl row 17"."""
        return self.places[i]

    def row(self, i: int) -> Mapping[str, Any]:
        """Return row `i` as in the data."""
        row: Mapping[str, Any] = self.records[i]
        return row

    @property
    def rows(self) -> NDArray[np.int64]:
        """int64 [rows]: index of each row in the records."""
        return self.places.rows

    @property
    def sizes(self) -> NDArray[np.int64]:
        """int64 [rows]: the most tokens that each prompt may have."""
        return np.full(len(self), self.max_prompt_length, np.int64)

    @cached_property
    def columns(self) -> dict[str, Sequence[Any]]:
        """Every column but `prompt`, for the reward functions, one value per row, None where a row lacks it; and
        `environment_rewards`, of which there are none before the episodes.
        """
        names = [name for name in self.records.columns if name != "prompt"]
        columns: dict[str, Sequence[Any]] = {name: cells(self.records, self.rows, name) for name in names}
        return {**columns, "environment_rewards": [None] * len(self)}

    chat = True
    """Completions are conversations."""

    @property
    def raw(self) -> Sequence[Any]:
        """Each row's prompt as messages, as an environment may begin with it."""
        return mapped(self.records, _as_turns)

    def row_digests(self) -> NDArray[np.uint64]:
        """Hash each row, uint64 [rows]."""
        return np.fromiter((row_digest(row) for row in self.records), np.uint64, len(self))


def _as_turns(row: Mapping[str, Any]) -> Any:
    """Return a row's prompt as messages; a row without one gives an empty message."""
    prompt = row.get("prompt") or ""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
