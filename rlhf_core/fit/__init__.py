"""The one supervised loop: next update, step, log, evaluate, save."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.artifacts import write_atomic
from rlhf_core.config.warnings import advise
from rlhf_core.errors import InputError, RunError, Stopped
from rlhf_core.fit.batches import KNOWN_UPDATES, Feed, Update, calls, several
from rlhf_core.fit.evaluation import evaluated
from rlhf_core.fit.evaluation import evaluator as evaluator
from rlhf_core.fit.in_turn import said_if_slow
from rlhf_core.fit.logged import Interval
from rlhf_core.fit.nonfinite import not_finite, not_finite_error
from rlhf_core.fit.progress import Progress
from rlhf_core.mesh import put_rows
from rlhf_core.metrics import Metrics
from rlhf_core.runtime.agreement import any_process, stop_together
from rlhf_core.runtime.peak_memory import peak_memory
from rlhf_core.runtime.signals import stop_signals
from rlhf_core.state import TrainState
from rlhf_core.step import Objective, Programs

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.optimizers import Schedule
    from rlhf_core.stage import Stage


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
    after_update_steps: int = 1,
    stop_when: Callable[[Mapping[str, float]], str | None] | None = None,
) -> Fitted:
    """Run `feed.total` updates, continuing from the newest whole checkpoint of the stage.

    objective: see `rlhf_core.step.Objective`. evaluate: returns metrics, reported with `eval_` in front, every
    `evaluation_steps` updates and at the end; where it raises after the first update, that is a warning, and training
    goes on. after_update: called with the number of updates done and the state every `after_update_steps` updates, once
    their loss and gradient are known to be finite, for which the loop waits. stop_when: given the metrics of a logged
    step, a reason to give up, or None.

    After the last update the state is saved first, then evaluated: whatever fails from there on, the same command goes
    on after the training.

    `state` is donated: its arrays, and those of the model it was made from, are gone afterwards.

    Raises RunError where a loss or gradient is not finite, naming the examples, with the last good state on disk; and
    where `stop_when` gives a reason, with the state saved.
    Raises Stopped after SIGTERM, SIGINT or SIGHUP, with the state saved.
    """
    for line in advise(config, feed.total) if stage.is_main else ():
        warnings.warn(f"stage '{stage.name}'.{line}", stacklevel=2)
    if evaluate is None and stage.is_main and (config.eval_data or stage.inputs.get("eval_dataset")):
        warnings.warn(
            f"stage '{stage.name}'.eval_data: given, but the trainer evaluates nothing: it passes no `evaluate` to "
            "`rlhf_core.fit.fit`",
            stacklevel=2,
        )
    run = _Run(stage, config, objective, feed, schedule, evaluate, stop_when)
    try:
        with stop_signals() as run.stop:
            return run.loop(state, after_update, after_update_steps)
    finally:
        run.progress.checkpoints.close()


class _Run:
    stop: threading.Event

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
        self.pending: list[tuple[int, jax.Array, Update, Metrics]] = []
        self.progress = Progress(stage, config, feed, schedule)
        self.best = self.progress.best
        self.out_of_time = False

    def loop(
        self, state: TrainState, after_update: Callable[[int, TrainState], None] | None, every: int
    ) -> Fitted:
        config, feed = self.config, self.feed
        start, state = self.progress.restore(state)
        fresh = self.progress.newest < 0
        if self.stage.is_main:
            plan = {"updates": feed.total, "start": start, "updates_per_epoch": feed.updates_per_epoch}
            write_atomic(self.stage.dir / "plan.json", json.dumps(plan))
        stop_together(here := f"at stage '{self.stage.name}', after update {start} of {feed.total}")
        steps = Programs(self.objective, state, from_zero=several(feed, state))
        if start < feed.total:
            self.stage.say(f"compiling, for update {start + 1} of {feed.total}")
            steps.compile(state, calls(feed, start, 1, state))
        # A metric asked for by name is looked up now rather than at the first evaluation, hours later.
        if fresh and self.evaluate and (config.eval_on_start or config.metric_for_best_model):
            metrics, _ = self.report(0, state, logs=False, evaluates=True)
            if self.best.watches:
                self.best.name(metrics)
        stop_together(here)
        self.progress.saved_at = self.progress.interval.started = time.perf_counter()
        began = self.progress.interval.started - self.progress.elapsed
        count, ends = start, self.best.exhausted
        if not self.progress.reported:
            ends = self.settle(start, steps, state)
        for step in range(start, start if ends else feed.total):
            if feed.needs_state(step):
                self.check(steps, state)
            update = self.next_update(step, state)
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
            self.check(steps, state)  # the one before: this one is still being computed
            self.pending.append((step, jnp.copy(state.guard), update, measured))
            count = step + 1
            if after_update is not None and count % every == 0:
                self.check(steps, state)  # nothing else moves for an update that was none
                after_update(count, state)
            self.progress.elapsed = time.perf_counter() - began
            if self.settle(count, steps, state):
                break
        self.progress.checkpoints.wait()
        if self.out_of_time and count < feed.total:
            warnings.warn(
                f"stage '{self.stage.name}': training_time_limit reached after update {count} of {feed.total}; "
                "the stage ends here",
                stacklevel=2,
            )
        return Fitted(
            self.best.final(state, count, self.progress.checkpoints), self.progress.metrics, self.out_of_time
        )

    def settle(self, count: int, steps: Programs, state: TrainState) -> bool:
        """Save, log, evaluate and compare after update `count`, as far as each is due; True where training ends here.

        Where it ends the state comes first, without anything of this step's report in it: whatever fails from there on,
        a run that goes on from it does the report again.
        """
        config = self.config
        limit = config.training_time_limit
        self.out_of_time = limit is not None and any_process(self.progress.elapsed >= limit)[0]
        ends = count >= self.feed.total or self.out_of_time
        evaluates = ends or bool(config.evaluation_steps and count % config.evaluation_steps == 0)
        evaluates = evaluates and self.evaluate is not None
        # An evaluation that is compared may be the last thing that happens, so it logs too.
        logs = ends or count % config.log_steps == 0 or (evaluates and self.best.watches)
        improved = False
        if ends and self.progress.newest != count:
            self.check(steps, state)
            self.progress.save(count, state, reported=False, wait=True)
        if ends and any_process(self.stop.is_set())[0]:
            raise self.stopped(count)
        if logs or evaluates:
            self.check(steps, state)
            metrics, evaluated = self.report(count, state, logs=logs, evaluates=evaluates)
            improved = evaluated and self.compare(count, state, metrics)
            if self.stop_when is not None and (reason := self.stop_when(metrics)):
                self.progress.save(count, state, wait=True)
                raise RunError(
                    f"stage '{self.stage.name}': stopped after update {count} of {self.feed.total}: {reason}. "
                    f"The state is kept in {self.stage.dir / 'checkpoints'}."
                )
        # Asked last, so that a signal that comes during an evaluation stops after this update.
        saves, stops = any_process(improved or self.progress.due(count), self.stop.is_set())
        exhausted = self.best.exhausted and not ends
        if exhausted or ((saves or stops) and not ends):
            self.check(steps, state)
            self.progress.save(count, state)
        if stops:
            self.progress.checkpoints.wait()
            raise self.stopped(count)
        return ends or exhausted

    def stopped(self, count: int) -> Stopped:
        return Stopped(
            f"stage '{self.stage.name}': stopped after update {count} of {self.feed.total}, state saved; "
            "the same command goes on from here"
        )

    def compare(self, count: int, state: TrainState, metrics: Mapping[str, float]) -> bool:
        """Whether this evaluation is the best so far."""
        try:
            return self.best.see(count, metrics)
        except InputError:
            self.progress.save(count, state, wait=True)
            raise

    def next_update(self, step: int, state: TrainState) -> Update:
        """Ask the feed for an update; where that fails, as by a reward, save what was reached before."""
        try:
            return self.feed.update(step, state)
        except (InputError, RunError):
            if step > max(self.progress.newest, 0):
                self.progress.save(step, state, wait=True)
                self.stage.say(f"the state after update {step} is saved")
            raise

    def check(self, steps: Programs, state: TrainState) -> None:
        """Read the guards of updates that have not been looked at; a step late, the device is never waited for."""
        while self.pending:
            step, guard, update, metrics = self.pending.pop(0)
            if int(guard) < 0:
                self.progress.tokens += update.tokens
                self.progress.interval.add(update, metrics)
                continue
            sound = replace(state, guard=jax.device_put(np.int32(-1), state.guard.sharding))
            self.progress.save(step, sound, wait=True)
            culprits = not_finite(steps, sound, update, self.feed.shapes(), self.mesh)
            raise not_finite_error(self.stage, step, culprits)

    def report(
        self, count: int, state: TrainState, *, logs: bool, evaluates: bool
    ) -> tuple[dict[str, float], bool]:
        """Emit one event per step, whether it logs, evaluates or both; its metrics, and whether it was evaluated."""
        metrics: dict[str, float] = {}
        found = None
        if logs:
            metrics = self.progress.interval.read(self.progress.tokens)
            metrics["learning_rate"] = float(self.rate(jnp.int32(count - 1)))
            metrics["epoch"] = count / self.feed.updates_per_epoch
            metrics |= peak_memory() if self.config.track_memory else {}
            self.progress.interval = Interval()
        if evaluates and self.evaluate is not None:
            began = time.perf_counter()
            with said_if_slow(self.stage.say, f"evaluating after update {count}"):
                found = evaluated(self.evaluate, state, count, self.stage.name)
            metrics |= found or {}
            self.progress.interval.started += time.perf_counter() - began
        self.progress.metrics.update(metrics)
        if metrics:
            self.stage.hook.rlhf_step_end(stage=self.stage, step=count, metrics=metrics)
        return metrics, found is not None
