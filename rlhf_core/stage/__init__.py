"""Describe one run of a trainer: its directory, devices, registry, inputs and hooks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from rlhf_core.runtime.terminal import escape_control

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.plugins.registry import Registry
    from rlhf_core.stage.spec import StageSpec


@dataclass(frozen=True)
class Replay:
    """The rollouts that a stage is trained on again. journal: their directory. until: the update to stop before."""

    journal: Path
    until: int


@dataclass(frozen=True)
class Stage:
    """One run of one trainer.

    name: as in the pipeline file; dir: DIR/NAME, for everything the stage writes; seed: of this stage.
    mesh: the devices (None while a pipeline is only checked).
    is_main: True on the one process that writes and prints.
    registry: names to components. hook: the pluggy relay, `stage.hook.rlhf_step_end(...)`.
    inputs: objects passed from Python: `model`, `train_dataset`, `eval_dataset`, `tokenizer`, `rewards`. A pipeline
        passes none.
    template_date: the day that chat templates write, "2026-01-31": the day the run began, unless the config or the
        model names another; None: the day this stage began.
    spec: what was asked for, and what the stage computes, as stage.json and checkpoints record it; `execute` makes one
        where neither a pipeline nor a trainer class started the trainer.
    replay: what is trained on again; None where the stage samples.
    metrics: the newest value of every metric logged so far.
    """

    name: str
    dir: Path
    seed: int
    mesh: Mesh | None
    is_main: bool
    registry: Registry
    hook: Any
    inputs: Mapping[str, Any] = field(default_factory=dict)
    template_date: str | None = None
    spec: StageSpec | None = None
    replay: Replay | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def devices(self) -> Mesh:
        """Return the mesh. Raises RuntimeError while the stage is only checked."""
        if self.mesh is None:
            raise RuntimeError(f"stage '{self.name}' is only checked: it has no devices")
        return self.mesh

    def specification(self) -> StageSpec:
        """Return the specification. Raises RuntimeError for a stage that was not started."""
        if self.spec is None:
            raise RuntimeError(f"stage '{self.name}' was not started: it has no specification")
        return self.spec

    def say(self, line: str) -> None:
        """Print a line on stderr, on the main process only, above the progress bar."""
        if self.is_main:
            tqdm.write(escape_control(f"[{self.name}] {line}"), file=sys.stderr)
