"""The one supervised loop: next update, step, log, evaluate, save."""

from __future__ import annotations

import json
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.advice import advise
from rlhf_core.agreement import any_of
from rlhf_core.artifacts import write_atomic
from rlhf_core.best import Best
from rlhf_core.checkpoint import Checkpoints
from rlhf_core.continuation import Continuation, without_rows
from rlhf_core.diagnosis import not_finite
from rlhf_core.doors import run_alone as run_alone
from rlhf_core.errors import RunError, Stopped
from rlhf_core.feeds import KNOWN_UPDATES, Feed, Update, calls, several
from rlhf_core.interval import Interval
from rlhf_core.loggers import JsonLines
from rlhf_core.mesh import put_rows
from rlhf_core.metrics import Metric, Metrics, merge, read
from rlhf_core.rows import Packed
from rlhf_core.signals import stop_signals
from rlhf_core.state import TrainState, abstract_state
from rlhf_core.step import Objective, Programs
from rlhf_core.usage import peak_memory

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.optimizers import Schedule
    from rlhf_core.options import TrainerConfig
    from rlhf_core.stage import Stage

DEFAULT_SAVE_MINUTES = 10.0


@dataclass(frozen=True)
class Fitted:
    """How a loop ended: the state, the last metrics logged, and whether the time limit ended it."""

    state: TrainState
    metrics: dict[str, float]
    out_of_time: bool = False


def fit(
    stage: Stage,
    config: TrainerConfig,
    state: TrainState,
    objective: Objective,
    feed: Feed,
    *,
    schedule: Schedule,
    evaluate: Callable[[TrainState], dict[str, float]] | None = None,
    after_update: Callable[[int, TrainState], None] | None = None,
    stop_when: Callable[[Mapping[str, float]], str | None] | None = None,
) -> Fitted:
    """Run `feed.total` updates, continuing from the newest whole checkpoint of the stage.

    objective: see `rlhf_core.step.Objective`. evaluate: returns metrics, reported with `eval_` in front, every
    `evaluation_steps` updates and at the end. after_update: called with the number of updates done and the state.
    stop_when: given the metrics of a logged step, a reason to give up, or None.

    `state` is donated: its arrays, and those of the model it was made from, are gone afterwards.

    Raises RunError where a loss or gradient is not finite, naming the examples, with the last good state on disk; and
    where `stop_when` gives a reason, with the state saved.
    Raises Stopped after SIGTERM or SIGINT, with the state saved.
    """
    for line in advise(config, feed.total) if stage.is_main else ():
        warnings.warn(f"stage '{stage.name}'.{line}", stacklevel=2)
    run = _Run(stage, config, objective, feed, schedule, evaluate, stop_when)
    checkpoints = Checkpoints(stage.dir / "checkpoints", keep=config.save_total_limit)
    try:
        with stop_signals() as stop:
            return run.loop(state, checkpoints, stop, after_update)
    finally:
        checkpoints.close()


class _Run:
    def __init__(
        self,
        stage: Stage,
        config: TrainerConfig,
        objective: Objective,
        feed: Feed,
        schedule: Schedule,
        evaluate: Callable[[TrainState], dict[str, float]] | None,
        stop_when: Callable[[Mapping[str, float]], str | None] | None,
    ) -> None:
        self.stage, self.config, self.objective, self.feed = stage, config, objective, feed
        self.evaluate, self.stop_when = evaluate, stop_when
        self.rate = jax.jit(schedule)
        self.mesh = stage.devices()
        self.tokens = 0
        self.elapsed = 0.0
        self.metrics: dict[str, float] = {}
        self.pending: list[tuple[int, jax.Array, Update, Metrics]] = []
        self.interval = Interval()
        self.best = Best(config, stage)
        self.continuation = Continuation(stage, config, feed, schedule)

    def loop(
        self,
        state: TrainState,
        checkpoints: Checkpoints,
        stop: threading.Event,
        after_update: Callable[[int, TrainState], None] | None,
    ) -> Fitted:
        config, feed = self.config, self.feed
        start, state = self.restore(state, checkpoints)
        if self.stage.is_main:
            plan = {"updates": feed.total, "start": start, "updates_per_epoch": feed.updates_per_epoch}
            write_atomic(self.stage.dir / "plan.json", json.dumps(plan))
            JsonLines.cut(self.stage.dir / "metrics.jsonl", start)
        steps = Programs(self.objective, state, from_zero=several(feed, state))
        if start < feed.total:
            steps.compile(state, calls(feed, start, 1, state))
        # A metric asked for by name is looked up now rather than at the first evaluation, hours later.
        if start == 0 and self.evaluate and (config.eval_on_start or config.metric_for_best_model):
            metrics = self.report(0, state, logs=False, evaluates=True)
            if self.best.watches:
                self.best.name(metrics)
        began, saved_at = time.perf_counter() - self.elapsed, time.perf_counter()
        self.interval.started = time.perf_counter()
        count, out_of_time = start, False
        for step in range(start, start if self.best.exhausted else feed.total):
            if feed.needs_state(step):
                self.check(steps, state, checkpoints)
            update = feed.update(step, state)
            done = None
            for number, batch in enumerate(update.batches):
                done = steps.accumulate(state, put_rows(self.mesh, batch), done, number)
            if done is None:
                raise RunError(f"stage '{self.stage.name}': update {step + 1} has nothing to train on")
            state, measured = steps.apply(state, done)
            if step == start + 1:
                # The first update is done by now; this one is being computed.
                steps.compile(state, calls(feed, step, KNOWN_UPDATES, state))
            elif step == start + 2:
                steps.wait()
            self.check(steps, state, checkpoints)  # the one before: this one is still being computed
            self.pending.append((step, jnp.copy(state.guard), update, measured))
            count = step + 1
            if after_update is not None:
                after_update(count, state)
            self.elapsed = time.perf_counter() - began
            limit = config.training_time_limit
            out_of_time = limit is not None and any_of(self.elapsed >= limit)[0]
            ends = count == feed.total or out_of_time
            evaluates = ends or bool(config.evaluation_steps and count % config.evaluation_steps == 0)
            evaluates = evaluates and self.evaluate is not None
            # An evaluation that is compared may be the last thing that happens, so it logs too.
            logs = ends or count % config.log_steps == 0 or (evaluates and self.best.watches)
            improved = False
            if logs or evaluates:
                self.check(steps, state, checkpoints)
                metrics = self.report(count, state, logs=logs, evaluates=evaluates)
                improved = evaluates and self.best.see(count, metrics)
                ends = ends or self.best.exhausted
                if self.stop_when is not None and (reason := self.stop_when(metrics)):
                    self.save(count, state, checkpoints)
                    checkpoints.wait()
                    raise RunError(
                        f"stage '{self.stage.name}': stopped after update {count} of {feed.total}: {reason}. "
                        f"The state is kept in {self.stage.dir / 'checkpoints'}."
                    )
            # Asked last, so that a signal that comes during an evaluation stops after this update.
            saves, stops = any_of(improved or self.save_due(count, saved_at), stop.is_set())
            if saves and not ends:
                self.check(steps, state, checkpoints)
                self.save(count, state, checkpoints)
                saved_at = time.perf_counter()
            if stops:
                self.check(steps, state, checkpoints)
                self.save(count, state, checkpoints)
                checkpoints.wait()
                raise Stopped(
                    f"stage '{self.stage.name}': stopped after update {count} of {feed.total}, state saved; "
                    "the same command goes on from here"
                )
            if ends:
                break
        checkpoints.wait()
        if out_of_time and count < feed.total:
            warnings.warn(
                f"stage '{self.stage.name}': training_time_limit reached after update {count} of {feed.total}; "
                "the stage ends here",
                stacklevel=2,
            )
        return Fitted(self.best.final(state, count, checkpoints), self.metrics, out_of_time)

    def restore(self, state: TrainState, checkpoints: Checkpoints) -> tuple[int, TrainState]:
        found = checkpoints.restore(abstract_state(state.trained()), accept=self.continuation.accept)
        if found is None:
            return 0, state
        self.tokens, self.elapsed = found.host["tokens"], found.host["elapsed"]
        self.interval = Interval.from_json(found.host["interval"])
        self.feed.restore(found.step, found.host["feed"], without_rows(found.arrays))
        self.best.restore(found.host["best"])
        kept = found.host["metrics"]
        self.metrics = {name: math.nan if value is None else value for name, value in kept.items()}
        self.stage.metrics.update(self.metrics)
        return found.step, state.with_trained(found.state)

    def check(self, steps: Programs, state: TrainState, checkpoints: Checkpoints) -> None:
        """Read the guards of updates that have not been looked at; a step late, the device is never waited for."""
        while self.pending:
            step, guard, update, metrics = self.pending.pop(0)
            if int(guard) < 0:
                self.tokens += update.tokens
                self.interval.add(update, metrics)
                continue
            sound = replace(state, guard=jax.device_put(np.int32(-1), state.guard.sharding))
            self.save(step, sound, checkpoints)
            checkpoints.wait()
            culprits = not_finite(steps, sound, update, self.feed.shapes(), self.mesh)
            listed = "; ".join(culprits[:5]) + (
                f"; and {len(culprits) - 5} more" if len(culprits) > 5 else ""
            )
            raise RunError(
                f"stage '{self.stage.name}': loss or gradient of update {step + 1} is not finite. "
                f"It comes from {listed or 'the sum of its rows, each of which is finite by itself'}. "
                f"The state before it is kept in {self.stage.dir / 'checkpoints'}. "
                + ("Lower learning_rate, set max_grad_norm, look" if step else "Look")
                + " at these examples, or try a loss of your own with rlhf_core.testing."
            )

    def report(self, count: int, state: TrainState, *, logs: bool, evaluates: bool) -> dict[str, float]:
        """One event a step, whether it logs, evaluates or both; its metrics."""
        metrics: dict[str, float] = {}
        if logs:
            metrics = self.interval.read(self.tokens)
            metrics["learning_rate"] = float(self.rate(jnp.int32(count - 1)))
            metrics["epoch"] = count / self.feed.updates_per_epoch
            metrics |= peak_memory() if self.config.track_memory else {}
            self.interval = Interval()
        if evaluates and self.evaluate is not None:
            began = time.perf_counter()
            metrics |= {f"eval_{name}": value for name, value in self.evaluate(state).items()}
            self.interval.started += time.perf_counter() - began
        self.metrics.update(metrics)
        self.stage.hook.rlhf_step_end(stage=self.stage, step=count, metrics=metrics)
        return metrics

    def save_due(self, count: int, saved_at: float) -> bool:
        config = self.config
        minutes = config.save_interval_minutes
        if minutes is None and config.save_steps is None:
            minutes = DEFAULT_SAVE_MINUTES
        by_time = minutes is not None and time.perf_counter() - saved_at >= 60 * minutes
        return by_time or (config.save_steps is not None and count % config.save_steps == 0)

    def save(self, step: int, state: TrainState, checkpoints: Checkpoints) -> None:
        host, arrays = self.feed.snapshot(step)
        kept = {
            "feed": host,
            **self.continuation.host(step),
            "tokens": self.tokens,
            "elapsed": self.elapsed,
            "interval": self.interval.to_json(),
            "best": self.best.to_json(),
            "metrics": {name: float(x) if math.isfinite(x) else None for name, x in self.metrics.items()},
        }
        arrays = {**arrays, **self.continuation.arrays()}
        checkpoints.save(step, state.trained(), host=kept, arrays=arrays, protect=self.best.step)


def evaluator(
    objective: Objective, mesh: Mesh, batches: Sequence[Packed]
) -> Callable[[TrainState], dict[str, float]]:
    """A function of the state: the objective's loss and metrics over `batches`, every example once, no gradient."""
    forward = jax.jit(objective)

    def evaluate(state: TrainState) -> dict[str, float]:
        total: dict[str, Metric] = {}
        for batch in batches:
            loss, metrics = forward(state.params, put_rows(mesh, batch))
            total = merge(total, {**metrics, "loss": loss})
        return read(total)

    return evaluate
