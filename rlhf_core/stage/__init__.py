"""What a trainer is given: where it runs, what with, and whom to tell."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from rlhf_core.runtime.terminal import escape_control

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from rlhf_core.plugins.registry import Registry


@dataclass(frozen=True)
class Stage:
    """One run of one trainer.

    name: as in the pipeline file; dir: DIR/NAME, where everything it writes goes; seed: of this stage.
    mesh: the devices (None while a pipeline is only checked).
    is_main: True on the one process that writes and talks.
    registry: names to components. hook: the pluggy relay, `stage.hook.rlhf_step_end(...)`.
    inputs: objects given from Python that a file cannot hold: `model`, `train_dataset`, `eval_dataset`, `tokenizer`,
        `rewards`; in a pipeline none of them, but for the `tokenizer` while it is checked, where one is at hand.
    template_date: the day that chat templates write, "2026-01-31", which is that of the run's beginning unless the
        config or the model says another; None while a stage is made: that of its own beginning.
    experiment: what the stage computes, as `rlhf_core.stage.experiment` records it; checkpoints name it. None where the
        trainer was not started by a pipeline or a trainer class.
    metrics: the newest value of every metric that was logged so far.
    planned_mesh: the devices that `rlhf check --devices` asks about, which need not be there; None: not asked.
    """

    name: str
    dir: Path
    seed: int
    mesh: Mesh | None
    is_main: bool
    registry: Registry
    hook: Any
    inputs: Mapping[str, Any] = field(default_factory=dict)
    planned_mesh: AbstractMesh | None = None
    template_date: str | None = None
    experiment: Mapping[str, Any] | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def devices(self) -> Mesh:
        """The mesh, where there must be one."""
        if self.mesh is None:
            raise RuntimeError(f"stage '{self.name}' is only being checked: it has no devices")
        return self.mesh

    def say(self, line: str) -> None:
        """A line on stderr for whoever watches, from the main process, above a bar that may be shown there."""
        if self.is_main:
            tqdm.write(escape_control(f"[{self.name}] {line}"), file=sys.stderr)
