"""A logger for TensorBoard: `logger = [{ name = "tensorboard" }]` in any stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_core import LOGGER, Registry, Stage, hookimpl


@dataclass(eq=False)
class TensorBoard:
    """Writes every metric, under its own name and at its step, to STAGE_DIR/`folder`.

    A stage that continues adds a file; its first step marks what came after it before as replaced (`purge_step`).
    TensorBoard has no place for values that are not finite: they are left out, as metrics.jsonl writes null for them.
    """

    folder: str = "tensorboard"
    _writer: Any = field(default=None, init=False, repr=False)

    @hookimpl
    def rlhf_step_end(self, stage: Stage, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            from tensorboardX import SummaryWriter  # only where a stage asks for it

            self._writer = SummaryWriter(str(stage.dir / self.folder), purge_step=step)
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    @hookimpl
    def rlhf_stage_end(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@hookimpl
def rlhf_register(registry: Registry) -> None:
    registry.add(LOGGER, "tensorboard", TensorBoard)
