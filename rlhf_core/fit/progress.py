"""The progress of a training loop, as its checkpoints hold it."""

from __future__ import annotations

import math
import re
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.checkpoint import Checkpoints
from rlhf_core.errors import InputError
from rlhf_core.fit.best import BEST, Best
from rlhf_core.fit.logged import MetricWindow
from rlhf_core.loggers import JsonLines
from rlhf_core.loggers.jsonl import FILE as METRICS
from rlhf_core.runtime.files import attempt, flush, flush_lines, remove
from rlhf_core.stage import identity
from rlhf_core.stage.decide import Begun, Record, Request, decide
from rlhf_core.state import TrainState, abstract_state

if TYPE_CHECKING:
    from rlhf_core.checkpoint import Restored
    from rlhf_core.config import TrainerConfig
    from rlhf_core.fit.batches import UpdateSource
    from rlhf_core.stage import Stage

DEFAULT_SAVE_MINUTES = 10.0
FOLDERS = ("samples", "evaluations")
"""Folders of files named by the updates done: `update-000012.jsonl`, `evaluation-000012.jsonl`, `000012.json`."""
_NAME = re.compile(r"(?:.*-)?(\d{6,})\.jsonl?")


class Progress:
    """Track what a run has done, and save and restore it with the state.

    metrics: the newest value of each. tokens, elapsed (seconds): so far. window: metrics since the last logged step.
    best: the best evaluation. newest: the step of the newest checkpoint, −1 without one. reported: whether that step
    was logged and evaluated before it was saved.
    """

    def __init__(self, stage: Stage, config: TrainerConfig, updates: UpdateSource) -> None:
        self.stage, self.config, self.updates = stage, config, updates
        self.total = updates.total  # as planned: rollouts of several rounds may end the epochs earlier
        self.checkpoints = Checkpoints(stage.dir / "checkpoints", keep=config.save_total_limit)
        self.metrics: dict[str, float] = {}
        self.tokens = 0
        self.elapsed = 0.0
        self.window = MetricWindow()
        self.best = Best(config, stage)
        self.newest = -1
        self.reported = True
        self.saved_at = time.perf_counter()

    @cached_property
    def record(self) -> Record:
        """Return what the stage computes, also of a trainer that neither a pipeline nor a trainer class started."""
        stage = self.stage
        if stage.experiment is not None:
            return stage.experiment
        return identity.of_objects(stage.name, stage.seed, self.config, stage.inputs, stage.registry)

    def require_same(self, saved: Restored) -> None:
        """Raise InputError where a checkpoint belongs to another run. Called before its state is read."""
        stage, host = self.stage, saved.host
        request = Request(stage.name, stage.dir, self.record, elsewhere="directory", total=self.total)
        decision = decide(Begun(host["record"], made=saved.step, total=host["total"]), request)
        problems = list(decision.reasons)
        if host["rows"] != len(self.updates.data):
            problems.append(
                f"stage '{stage.name}'.train_data: it had {host['rows']:,} rows for training and has "
                f"{len(self.updates.data):,} now; restore the rows that were removed, or remove those that were added"
            )
        if problems:
            raise InputError(*problems)

    def restore(self, state: TrainState) -> tuple[int, TrainState]:
        """Restore the newest whole checkpoint: return the updates done and the state, 0 and `state` without one.

        Truncates the stage's files to what they held then.
        """
        saved = self.checkpoints.restore(abstract_state(state.trained()), accept=self.require_same)
        if saved is not None:
            self.newest, self.reported = saved.step, saved.host.get("reported", True)
            self.tokens, self.elapsed = saved.host["tokens"], saved.host["elapsed"]
            self.window = MetricWindow.from_json(saved.host["window"])
            self.updates.restore(saved.step, saved.host["updates"], saved.arrays)
            self.best.restore(saved.host["best"])
            metrics = saved.host["metrics"]
            self.metrics = {name: math.nan if value is None else value for name, value in metrics.items()}
            self.stage.metrics.update(self.metrics)
            state = state.with_trained(saved.state)
        if self.stage.is_main:
            cut_files(self.stage.dir, self.newest if self.reported else self.newest - 1)
        return max(self.newest, 0), state

    def save(self, step: int, state: TrainState, *, reported: bool = True, wait: bool = False) -> None:
        """Save the state after `step` updates; `wait`: return once it is on the disk."""
        host, arrays = self.updates.snapshot(step)
        progress = {
            "updates": host,
            "record": dict(self.record),
            "rows": len(self.updates.data),
            "total": self.total,
            "tokens": self.tokens,
            "elapsed": self.elapsed,
            "window": self.window.to_json(),
            "best": self.best.to_json(),
            "metrics": {name: float(x) if math.isfinite(x) else None for name, x in self.metrics.items()},
            "reported": reported,
        }
        metrics = self.stage.dir / METRICS  # the stage's other files were flushed when they were written
        self.checkpoints.save(
            step,
            state.trained(),
            host=progress,
            arrays=arrays,
            protect=self.best.step,
            block=wait,
            before=lambda: flush_lines(metrics),
        )
        self.newest, self.saved_at = step, time.perf_counter()

    def due(self, count: int) -> bool:
        """Return whether the config asks for a checkpoint after `count` updates."""
        minutes = self.config.save_interval_minutes
        if minutes is None and self.config.save_steps is None:
            minutes = DEFAULT_SAVE_MINUTES
        by_time = minutes is not None and time.perf_counter() - self.saved_at >= 60 * minutes
        return by_time or (self.config.save_steps is not None and count % self.config.save_steps == 0)


def cut_files(directory: Path, step: int) -> None:
    """Delete a stage's rows and files of steps after `step`, which a run that resumes there will write again.

    step: −1 when a run begins: everything that an earlier run without a checkpoint left is deleted.
    """

    def cut(folder: Path) -> None:
        later = [
            path
            for path in (folder.iterdir() if folder.is_dir() else ())
            if (match := _NAME.fullmatch(path.name)) and int(match[1]) > step
        ]
        for path in later:
            path.unlink()
        if later:
            flush(folder)

    JsonLines.cut(directory / METRICS, step)
    for folder in FOLDERS:
        attempt(lambda folder=folder: cut(directory / folder), folder, directory / folder)  # type: ignore[misc]
    attempt(lambda: remove(directory / BEST), BEST, directory / BEST)  # written when the stage ends
