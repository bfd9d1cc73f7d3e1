"""The progress of a training loop, as its checkpoints hold it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from rlhf_core.artifacts import hash_file
from rlhf_core.checkpoint import Checkpoints
from rlhf_core.errors import InputError
from rlhf_core.fit.best import BEST, Best, saved_form
from rlhf_core.fit.weights import FILE as WEIGHTS
from rlhf_core.loggers.jsonl import DIGESTS, JsonLines
from rlhf_core.loggers.jsonl import FILE as METRICS
from rlhf_core.metrics import Metric, Metrics, fetch_metrics, from_json, merge, to_json
from rlhf_core.runtime.agreement import any_process
from rlhf_core.runtime.files import attempt, flush, flush_lines, remove
from rlhf_core.stage.decide import Begun, decide
from rlhf_core.state import TrainState

if TYPE_CHECKING:
    from rlhf_core.checkpoint import Restored
    from rlhf_core.config import TrainerConfig
    from rlhf_core.fit.batches import Update, UpdateSource
    from rlhf_core.stage import Stage

DEFAULT_SAVE_MINUTES = 10.0
FOLDERS = ("samples", "evaluations")
"""Folders of files named by the updates done: `update-000012.jsonl`, `evaluation-000012.jsonl`, `000012.json`."""
_NAME = re.compile(r"(?:.*-)?(\d{6,})\.jsonl?")


TIME = "time/"
"""Begins the names of seconds per update; time/update is the part of `step_time` that an Update does not report."""


@dataclass
class MetricWindow:
    """Metrics of the sound updates since the last logged step."""

    device: list[Metrics] = field(default_factory=list)
    host: list[Mapping[str, float]] = field(default_factory=list)
    merged_host: dict[str, Metric] = field(default_factory=dict)
    tokens: int = 0
    slots: int = 0
    updates: int = 0
    before: float = 0.0  # seconds, in the process that was interrupted
    started: float = field(default_factory=time.perf_counter)

    def add(self, update: Update, metrics: Metrics) -> None:
        """Add one update. Raises InputError where it reports a metric of the step or the objective."""
        reported = {**update.metrics, **update.timing}
        both = sorted(reported.keys() & metrics.keys())
        if both:
            raise InputError(
                f"metrics: {', '.join(both)} reported both by the Update and by the objective or the step; "
                "rename the Update's"
            )
        self.device.append(metrics)
        self.host.append({name: value for name, value in reported.items() if not isinstance(value, Metric)})
        self.merged_host = merge(
            self.merged_host, {name: value for name, value in reported.items() if isinstance(value, Metric)}
        )
        self.tokens += update.tokens
        self.slots += sum(batch.rows.tokens.size for batch in update.batches)
        self.updates += 1

    def elapsed(self) -> float:
        return self.before + time.perf_counter() - self.started

    def merged(self) -> dict[str, Metric]:
        total: dict[str, Metric] = {}
        for metrics in jax.device_get(self.device):
            total = merge(total, metrics)
        return total

    def read(self, total_tokens: int) -> dict[str, float]:
        elapsed = self.elapsed()
        names = dict.fromkeys(name for metrics in self.host for name in metrics)
        averages = {}
        for name in names:
            values = [m[name] for m in self.host if name in m and np.isfinite(m[name])]
            averages[name] = float(np.mean(values)) if values else float("nan")
        step_time = elapsed / max(self.updates, 1)
        parts = [value for name, value in averages.items() if name.startswith(TIME)]
        return {
            **fetch_metrics(self.merged()),
            **averages,
            **fetch_metrics(self.merged_host),
            **({f"{TIME}update": max(step_time - sum(parts), 0.0)} if parts else {}),
            "num_tokens": float(total_tokens),
            "tokens_per_second": self.tokens / elapsed,
            "useful_fraction": self.tokens / max(self.slots, 1),
            "step_time": step_time,
        }

    def to_json(self) -> dict[str, Any]:
        """Describe the window for a checkpoint, so that the next logged step is the same as without a stop."""
        return {
            "device": to_json(self.merged()),
            "host": [dict(metrics) for metrics in self.host],
            "merged_host": to_json(self.merged_host),
            "tokens": self.tokens,
            "slots": self.slots,
            "updates": self.updates,
            "elapsed": self.elapsed(),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> MetricWindow:
        return cls(
            [from_json(saved["device"])],
            saved["host"],
            from_json(saved["merged_host"]),
            saved["tokens"],
            saved["slots"],
            saved["updates"],
            saved["elapsed"],
        )


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
        self.options = config.checkpoints
        self.metrics: dict[str, float] = {}
        self.tokens = 0
        self.elapsed = 0.0
        self.window = MetricWindow()
        self.best = Best(config, stage)
        self.newest = -1
        self.reported = True
        self.saved_at = time.perf_counter()

    def require_same(self, saved: Restored) -> None:
        """Raise InputError where a checkpoint belongs to another run. Called before its state is read."""
        stage, host = self.stage, saved.host
        begun = Begun(host["record"], made=saved.step, total=host["total"])
        decision = decide(begun, stage.specification(), total=self.total)
        problems = list(decision.reasons)
        if host["rows"] != len(self.updates.data):
            problems.append(
                f"stage '{stage.name}'.train_data: it had {host['rows']:,} rows for training and has "
                f"{len(self.updates.data):,} now; restore the rows that were removed, or remove those that were added"
            )
        if problems:
            raise InputError(*problems)

    def restore(self, state: TrainState) -> tuple[int, TrainState]:
        """Restore the newest whole checkpoint: return the updates done and the state.

        Without one, or where `checkpoints.resume` is false: `checkpoints.start` and `state`. Truncates the stage's
        files to what they held then. Raises InputError where nothing is left to do after `checkpoints.start`.
        """
        if not self.options.resume:
            for step in self.checkpoints.steps():
                self.checkpoints.remove(step)
        saved = self.checkpoints.restore(saved_form(state.trained()), accept=self.require_same)
        start = self.options.start if self.total else 0
        if saved is None and start:
            state = self._pass_over(state, start)
        if saved is not None:
            self.newest, self.reported = saved.step, saved.host.get("reported", True)
            self.tokens, self.elapsed = saved.host["tokens"], saved.host["elapsed"]
            self.window = MetricWindow.from_json(saved.host["window"])
            self.updates.restore(saved.step, saved.host["updates"], saved.arrays)
            self.best.restore(saved.host["best"])
            metrics = saved.host["metrics"]
            self.metrics = {name: math.nan if value is None else value for name, value in metrics.items()}
            self.stage.metrics.update(self.metrics)
            if saved.state.opt_state == ():
                self.stage.say(
                    f"the optimizer starts from a fresh state at update {saved.step}: "
                    f"checkpoints.optimizer_state was false"
                )
                fresh = _at_update(state.opt_state, saved.step)
                saved = saved._replace(state=replace(saved.state, opt_state=fresh))
            state = state.with_trained(saved.state)
            if self.options.remove_loaded and saved.step != self.best.step:
                any_process(False)  # all have read it
                self.checkpoints.remove(saved.step)
        if self.stage.is_main:
            cut_files(self.stage.dir, self.newest, reported=self.reported)
        return start if saved is None else saved.step, state

    def _pass_over(self, state: TrainState, start: int) -> TrainState:
        """Place a state that begins after the first `start` updates of the run, which it passes over."""
        require_rest(self.stage.name, start, self.total)
        self.stage.say(f"the first {start:,} of {self.total:,} updates are skipped: checkpoints.start")
        step = jax.device_put(np.int32(start), state.step.sharding)
        return replace(state, step=step, opt_state=_at_update(state.opt_state, start))

    def save(self, step: int, state: TrainState, *, reported: bool = True, wait: bool = False) -> None:
        """Save the state after `step` updates; `wait`: return once it is on the disk."""
        host, arrays = self.updates.snapshot(step)
        progress = {
            "updates": host,
            "record": dict(self.stage.specification().record),
            "rows": len(self.updates.data),
            "total": self.total,
            "tokens": self.tokens,
            "elapsed": self.elapsed,
            "window": self.window.to_json(),
            "best": self.best.to_json(),
            "metrics": {name: float(x) if math.isfinite(x) else None for name, x in self.metrics.items()},
            "reported": reported,
            "logged": self._logged() if reported else None,
            "optimizer_state": self.options.optimizer_state,
        }
        trained = state.trained()

        def flush_metrics() -> None:  # the stage's other files were flushed when they were written
            for file in (*metric_files(self.stage.dir), self.stage.dir / DIGESTS):
                flush_lines(file)

        self.checkpoints.save(
            step,
            trained if self.options.optimizer_state else replace(trained, opt_state=()),
            host=progress,
            arrays=arrays,
            protect=self.best.step,
            block=wait,
            before=flush_metrics,
        )
        self.newest, self.saved_at = step, time.perf_counter()

    def _logged(self) -> tuple[int, str] | None:
        """Return the size and the hash of the rows that are logged so far; None without any.

        A row that is changed later no longer fits any checkpoint after it.
        """
        path = self.stage.dir / METRICS
        return (path.stat().st_size, hash_file(path)) if path.is_file() else None

    def due(self, count: int) -> bool:
        """Return whether the config asks for a checkpoint after `count` updates."""
        minutes = self.config.save_interval_minutes
        if minutes is None and self.config.save_steps is None:
            minutes = DEFAULT_SAVE_MINUTES
        by_time = minutes is not None and time.perf_counter() - self.saved_at >= 60 * minutes
        return by_time or (self.config.save_steps is not None and count % self.config.save_steps == 0)


def cut_files(directory: Path, step: int, *, reported: bool = True) -> None:
    """Delete a stage's rows and files of steps after `step`, which a run that resumes there will write again.

    step: −1 when a run begins: everything that an earlier run without a checkpoint left is deleted. reported: whether
    the step was reported before it was saved; if not, what there is of it goes, too, but for its weights, which are
    logged first.
    """
    last = step if reported else step - 1

    def cut(folder: Path) -> None:
        later = [
            path
            for path in (folder.iterdir() if folder.is_dir() else ())
            if (match := _NAME.fullmatch(path.name)) and int(match[1]) > last
        ]
        for path in later:
            path.unlink()
        if later:
            flush(folder)

    for file in metric_files(directory):
        JsonLines.cut(file, step if file.name == WEIGHTS else last)
    for folder in FOLDERS:
        attempt(partial(cut, directory / folder), folder, directory / folder)
    attempt(lambda: remove(directory / BEST), BEST, directory / BEST)  # written when the stage ends


def metric_files(directory: Path) -> list[Path]:
    """List a stage's files of rows: the metrics of the first process, weights, with `log_all_workers` other metrics."""
    return [directory / METRICS, directory / WEIGHTS, *directory.glob("metrics-*.jsonl")]


def require_rest(stage: str, start: int, total: int) -> None:
    """Raise InputError where none of a run's updates is left after the `start` that `checkpoints.start` skips."""
    if start and 0 < total <= start:
        raise InputError(
            f"stage '{stage}'.checkpoints.start: {start:,} updates are skipped, but the run has only {total:,}"
        )


def _at_update(opt_state: Any, step: int) -> Any:
    """Place an optimizer state without history at update `step` of its schedule; its moments still begin at 0."""

    def of_schedule(path: Any, _: Any) -> bool:
        return getattr(path[-1], "tuple_name", "") == "ScaleByScheduleState"

    counts = optax.tree.get_all_with_path(opt_state, "count", of_schedule)
    if not counts:
        return opt_state
    count = jax.device_put(np.int32(step), counts[0][1].sharding)
    return optax.tree.set(opt_state, of_schedule, count=count)
