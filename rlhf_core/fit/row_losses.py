"""Losses of training rows, kept by update in rows/: which rows a model learns last, and which are wrong."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Literal

import numpy as np

from rlhf_core.contracts import Forecast
from rlhf_core.fit.actions import Action, Moment
from rlhf_core.runtime.files import write_atomic
from rlhf_core.runtime.machine import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from rlhf_core.config import TrainerConfig
    from rlhf_core.fit.batches import ExampleUpdates
    from rlhf_core.fit.values import UpdateValues
    from rlhf_core.stage import Stage

FOLDER = "rows"
BYTES_OF_ROW, BYTES_OF_FILE = 16, 1000
"""On disk, at most: of a row, and of a file besides its rows and the names of their data files."""
_PLACE = re.compile(r"(.*) row (\d+)")
"""How messages name a row: its file and its number there."""


def row_losses(
    stage: Stage, config: TrainerConfig, updates: ExampleUpdates, per: Literal["token", "sequence"]
) -> Action:
    """Make the action that writes STAGE/rows/NNNNNN.npz after logged updates and all updates of the last epoch.

    per: what the objective returns `loss` for; a row's is the mean over its trained tokens or its sequences.
    """
    last = _first_of_last_epoch(updates)

    def due(at: Moment) -> bool:
        return not at.starts and (at.ends or at.step % config.log_steps == 0 or at.step >= last)

    def run(at: Moment) -> None:
        assert at.values is not None
        if stage.is_main:
            write_row_losses(stage.dir / FOLDER / f"{at.step:06d}.npz", at.values)

    return Action(due, run, values={"loss": per})


def write_row_losses(path: Path, values: UpdateValues) -> None:
    """Write the mean `loss` of every row of an update.

    `row` int64 [rows]: its number in its file, from 1, as messages name it; `value` float32 [rows]. Rows of several
    files have `source` int16 [rows], which of `sources` theirs is.
    """
    numbers, first, of_row = np.unique(values.numbers, return_index=True, return_inverse=True)
    means = np.array([np.mean(each, dtype=np.float64) for each in values.arrays["loss"]])
    sums = np.bincount(of_row, means, len(numbers))
    arrays: dict[str, np.ndarray] = {"value": (sums / np.bincount(of_row)).astype(np.float32)}
    places = [_PLACE.fullmatch(values.where[int(i)]) for i in first]
    named = [
        (place[1], int(place[2])) if place else ("", int(n) + 1)
        for place, n in zip(places, numbers, strict=True)
    ]
    arrays["row"] = np.array([number for _, number in named], np.int64)
    files = sorted({name for name, _ in named})
    if len(files) > 1:
        arrays["sources"] = np.array(files)
        arrays["source"] = np.array([files.index(name) for name, _ in named], np.int16)
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    write_atomic(path, content.getvalue())


def forecast_row_losses(config: TrainerConfig, updates: ExampleUpdates) -> Forecast:
    """Forecast the bytes of rows/."""
    total = updates.total
    last = _first_of_last_epoch(updates)
    files = sum(step % config.log_steps == 0 or step >= last for step in range(1, total + 1))
    size = files * (BYTES_OF_FILE + BYTES_OF_ROW * config.total_batch_size)
    return Forecast(
        (f"{FOLDER}/ takes at most {format_bytes(size)}: the losses of the rows of {files:,} updates",)
    )


def _first_of_last_epoch(updates: ExampleUpdates) -> int:
    """Return the first of the updates that go through the data once more, the last ones."""
    total = updates.total
    epochs = updates.epochs(total) if total else 0.0
    return total + 1 - round(total / max(epochs, 1.0))
