"""The training loop of every trainer: update, log, evaluate, save."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.artifacts import save_model, write_atomic
from rlhf_core.config.warnings import config_warnings
from rlhf_core.errors import InputError, RunError, Stopped, warn
from rlhf_core.fit.batches import (
    KNOWN_UPDATES,
    DatasetUpdates,
    Update,
    UpdateSource,
    expected_calls,
    uses_several_batches,
)
from rlhf_core.fit.batches import LazyUpdates as LazyUpdates
from rlhf_core.fit.batches import attention_skips_blocks as attention_skips_blocks
from rlhf_core.fit.batches import choose_row_layout as choose_row_layout
from rlhf_core.fit.evaluation import EvaluationMetrics as EvaluationMetrics
from rlhf_core.fit.evaluation import evaluate_or_warn
from rlhf_core.fit.evaluation import evaluator as evaluator
from rlhf_core.fit.logged import MetricWindow
from rlhf_core.fit.nonfinite import find_nonfinite_rows, nonfinite_error
from rlhf_core.fit.progress import Progress
from rlhf_core.fit.weights import WeightLog
from rlhf_core.mesh import put_rows
from rlhf_core.metrics import Metrics
from rlhf_core.models import Model
from rlhf_core.models.finite import nonfinite_weights
from rlhf_core.optimizers import make_optimizer
from rlhf_core.packing.rows import empty_batches
from rlhf_core.reading import TreeReader, say_if_slow
from rlhf_core.runtime.agreement import any_process, stop_together
from rlhf_core.runtime.peak_memory import peak_memory, return_freed_memory
from rlhf_core.runtime.signals import stop_signals
from rlhf_core.state import TrainState, create_state
from rlhf_core.step import Objective, Programs

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.optimizers import Schedule
    from rlhf_core.stage import Stage

__all__ = [
    "Build",
    "DatasetUpdates",
    "EvaluationMetrics",
    "TreeReader",
    "Update",
    "UpdateSource",
    "empty_batches",
    "fit",
]


NO_PREVIEWS = "the trainer shows no completions; those of reward models are scored pairs, num_preview_samples"
POLICY = "policy"
"""Of several models, the one that becomes the output `model`."""


class PreviewFunction(Protocol):
    """Shows completions of fixed prompts after some updates."""

    @property
    def bytes(self) -> int:
        """What sampling takes per device, at most."""
        ...

    def __call__(self, step: int, state: TrainState, /) -> None: ...


@dataclass(frozen=True)
class Build:
    """What a trainer's `build` returns. Parameters may be shapes: a build computes nothing with them.

    models: the model that is trained, or several by name, {"policy": …, "critic": …}; a state's parameters and the
        objective's are then keyed alike.
    updates: which examples make an update, in which rows. objective: (parameters, rows) → the loss and metrics.
    trains: of several models, {name: the config that it is trained by}; the others are not trained. Default: all are,
        by the stage's config.
    evaluate: (state) → metrics, logged with the prefix `eval_`, every `evaluation_steps` updates and at the end; an
        error after the first update becomes a warning.
    preview: (updates done, state), called before the first update and, without `evaluate`, after the last; a RunError
        after training becomes a warning.
    previews: (updates done, state), called before the first update, every `config.previews.every` updates and after the
        last; an error after the first update becomes a warning. `bytes` is what it takes per device.
    after_update: (updates done, state), called every `after_update_steps` updates, whose loss and gradients are known
        to be finite by then.
    stop_when: (metrics of a logged step) → a reason to give up, or None.
    adjust: (parameters, metrics of an update) → parameters, a part of the update, after the optimizer's.
    held: {name: arrays or shapes} of what is in memory besides the state, such as a copy of what is trained.
    save: saves the outputs from the last state; None: the model, or the one called "policy", is the output `model`.
    """

    models: Model | Mapping[str, Model]
    updates: UpdateSource
    objective: Objective
    trains: Mapping[str, TrainerConfig] = field(default_factory=dict)
    evaluate: Callable[[TrainState], dict[str, float]] | None = None
    preview: Callable[[int, TrainState], None] | None = None
    previews: PreviewFunction | None = None
    after_update: Callable[[int, TrainState], None] | None = None
    after_update_steps: int = 1
    stop_when: Callable[[Mapping[str, float]], str | None] | None = None
    held: Mapping[str, Any] = field(default_factory=dict)
    save: Callable[[TrainState], None] | None = None
    adjust: Callable[[Any, Metrics], Any] | None = None

    def state(self, config: TrainerConfig, stage: Stage) -> tuple[TrainState, Schedule]:
        """Make the state that training starts from, of arrays or of shapes, and the learning rate's schedule."""
        models, total = self.models, self.updates.total
        given, waits = stage.inputs.get("optimizers") or (None, None), "optimizer" in config.offload
        if isinstance(models, Model):
            tx, schedule = make_optimizer(config, stage.registry, total, given)
            state = create_state(models, tx, seed=stage.seed, frozen=config.frozen_parameters, offload=waits)
            return state, schedule
        trains = self.trains or dict.fromkeys(models, config)
        if len(trains) > 1 and given != (None, None):
            raise InputError(
                f"stage '{stage.name}'.optimizers: one optimizer is given, and {len(trains)} models are trained: "
                f"{', '.join(trains)}"
            )
        made = {name: make_optimizer(each, stage.registry, total, given) for name, each in trains.items()}
        frozen: dict[str, Any] = dict.fromkeys(models.keys() - trains.keys(), ".*")
        frozen |= {name: each.frozen_parameters for name, each in trains.items() if each.frozen_parameters}
        txs = {name: tx for name, (tx, _) in made.items()}
        state = create_state(models, txs, seed=stage.seed, frozen=frozen, offload=waits)
        return state, next(iter(made.values()))[1]


def fit(stage: Stage, config: TrainerConfig, build: Build) -> TrainState:
    """Run `build.updates.total` updates, continuing from the stage's newest whole checkpoint; save the outputs.

    After the last update the state is saved before it is evaluated: if anything fails from there on, the same command
    continues after the training.

    The arrays of the build's models are deleted: updates donate them. Returns the last state, or the best one where
    `load_best_model_at_end`.

    Raises RunError, with the last good state saved, where a loss or gradient is not finite, naming the examples, and
    where `stop_when` returns a reason. Raises Stopped, with the state saved, after SIGTERM, SIGINT or SIGHUP.
    """
    given = stage.inputs.get("optimizers") or (None, None)
    for line in config_warnings(config, build.updates.total, given) if stage.is_main else ():
        warn(f"stage '{stage.name}'.{line}")
    held_out = config.max_evaluation_steps != 0 and (config.eval_data or stage.inputs.get("eval_dataset"))
    if build.evaluate is None and stage.is_main and held_out:
        warn(
            f"stage '{stage.name}'.eval_data: given, but the trainer does not evaluate: its build has no `evaluate`"
        )
    if build.previews is None and config.previews is not None and stage.is_main:
        warn(f"stage '{stage.name}'.previews: has no effect: {NO_PREVIEWS}")
    state, schedule = build.state(config, stage)
    run = _Run(stage, config, build, schedule)
    try:
        with stop_signals(stops="saving after this update") as run.stop:
            state = run.loop(state)
    finally:
        run.progress.checkpoints.close()
    if build.preview is not None and build.evaluate is None:
        try:
            build.preview(int(state.step), state)
        except (InputError, RunError) as error:  # a reward that fails now must not cost the trained model
            warn(f"stage '{stage.name}': completions after training were not saved: {error}")
    if build.save is not None:
        build.save(state)
    else:
        model, params = build.models, state.params
        if not isinstance(model, Model):
            model, params = model[POLICY], params[POLICY]
        kind = "language_model" if model.definition.head == "lm" else "reward_model"
        save_model(stage, "model", kind, model.with_params(params))
    return state


class _Run:
    stop: threading.Event

    def __init__(self, stage: Stage, config: TrainerConfig, build: Build, schedule: Schedule) -> None:
        self.stage, self.config, self.build, self.updates = stage, config, build, build.updates
        self.rate = jax.jit(schedule)
        self.mesh = stage.devices()
        self.pending: list[tuple[int, jax.Array, Update, Metrics]] = []
        self.progress = Progress(stage, config, build.updates)
        self.best = self.progress.best
        self.out_of_time = False
        self.reason: str | None = None
        """Why the run must stop, as an update's metrics showed."""

    def loop(self, state: TrainState) -> TrainState:
        updates, progress, after_update = self.updates, self.progress, self.build.after_update
        start, state = progress.restore(state)
        options = self.config.log_weights
        weights = None if options is None else WeightLog(self.stage, options, state)
        steps = self.prepare(start, state)
        progress.saved_at = progress.window.started = time.perf_counter()
        began = progress.window.started - progress.elapsed
        count, ends = start, self.best.exhausted
        if not progress.reported or not updates.total:
            ends = self.settle(start, steps, state)
        for step in range(start, start if ends else updates.total):
            if updates.needs_state(step):
                self.check(steps, state)
                self.stop_for(self.reason, step, steps, state)
            logged = weights if weights is not None and weights.due(step + 1) else None
            before = None if logged is None else logged.keep(state)
            state = self.run_update(step, steps, state)
            if step == start + 1:
                # The first update is done by now; this one is being computed.
                steps.compile(state, expected_calls(updates, step, KNOWN_UPDATES, state))
            elif step == start + 2:
                steps.wait()
            count = step + 1
            if after_update is not None and count % self.build.after_update_steps == 0:
                self.check(steps, state)  # an update that is not finite must not move anything else
                after_update(count, state)
            if logged is not None and before is not None:
                self.check(steps, state)
                logged.log(count, before, state)
            progress.elapsed = time.perf_counter() - began
            if self.settle(count, steps, state):
                break
        progress.checkpoints.wait()
        if self.out_of_time and count < updates.total:
            warn(
                f"stage '{self.stage.name}': training_time_limit reached after update {count} of "
                f"{updates.total}; ending the stage"
            )
        return self.best.final(state, count, progress.checkpoints)

    def prepare(self, start: int, state: TrainState) -> Programs:
        """Write plan.json, start to compile the first update, and evaluate before it where the config asks for that."""
        config, updates = self.config, self.updates
        if self.stage.is_main:
            per_epoch = updates.total / updates.epochs(updates.total) if updates.total else 0.0
            plan = {"updates": updates.total, "start": start, "updates_per_epoch": per_epoch}
            write_atomic(self.stage.dir / "plan.json", json.dumps(plan))
        stop_together(here := f"at stage '{self.stage.name}', after update {start} of {updates.total}")
        several = uses_several_batches(updates, state)
        steps = Programs(
            self.build.objective,
            state,
            from_zero=several,
            by_layer=config.log_grad_norms,
            adjust=self.build.adjust,
        )
        if start < updates.total:
            self.stage.say(f"compiling, for update {start + 1} of {updates.total}")
            steps.compile(state, expected_calls(updates, start, 1, state))
        # A metric asked for by name is looked up now rather than at the first evaluation, hours later.
        fresh = self.progress.newest < 0
        if fresh and self.build.evaluate and (config.eval_on_start or config.metric_for_best_model):
            metrics, _ = self.report(0, state, logs=False, evaluates=True)
            if self.best.compare(start, metrics) and config.load_best_model_at_end:
                self.progress.save(start, state, wait=True)
        stop_together(here)
        return steps

    def run_update(self, step: int, steps: Programs, state: TrainState) -> TrainState:
        """Dispatch update `step`, then check the one before it while this one is computed."""
        update = self.next_update(step, state)
        return_freed_memory()  # before the programs that take the most
        if step == 0 and self.build.preview is not None:
            self.build.preview(0, state)
        if step == 0:
            self.show(0, state)
        done, counts = None, steps.count(state, update.batches)
        for number, batch in enumerate(update.batches):
            done = steps.accumulate(state, put_rows(self.mesh, batch), done, number, counts)
        if done is None:
            raise RunError(f"stage '{self.stage.name}': update {step + 1} has nothing to train on")
        state, metrics = steps.apply(state, done)
        self.check(steps, state)
        self.pending.append((step, jnp.copy(state.guard), update, metrics))
        return state

    def settle(self, count: int, steps: Programs, state: TrainState) -> bool:
        """Save, log, evaluate and compare after update `count`, as far as each is due; return whether training ends.

        At the end the state is saved first, before this step's report: if anything fails from there on, a run that
        continues from it makes the report again.
        """
        config = self.config
        limit = config.training_time_limit
        self.out_of_time = limit is not None and any_process(self.progress.elapsed >= limit)[0]
        ends = count >= self.updates.total or self.out_of_time
        evaluates = ends or bool(config.evaluation_steps and count % config.evaluation_steps == 0)
        evaluates = evaluates and self.build.evaluate is not None
        # An evaluation that is compared may be the last thing that happens, so it logs too.
        due = any(count % steps == 0 for steps in (config.log_steps, config.report_steps) if steps)
        logs = bool(self.updates.total) and (ends or due or (evaluates and self.best.watches))
        improved = False
        if ends and self.progress.newest != count and config.checkpoints.last:
            self.check(steps, state)
            self.progress.save(count, state, reported=False, wait=True)
        if ends and any_process(self.stop.is_set())[0]:
            raise self.stopped(count)
        if logs or evaluates:
            self.check(steps, state)
            metrics, evaluated = self.report(count, state, logs=logs, evaluates=evaluates)
            improved = evaluated and self.compare(count, state, metrics)
            if self.build.stop_when is not None:
                self.stop_for(self.build.stop_when(metrics), count, steps, state)
        self.stop_for(self.reason, count, steps, state)
        every = config.previews.every if config.previews is not None else 0
        if every and (ends or count % every == 0):
            self.check(steps, state)
            self.show(count, state)
        # Last, so that a signal received during an evaluation stops the run after this update.
        saves, stops = any_process(improved or self.progress.due(count), self.stop.is_set())
        exhausted = self.best.exhausted and not ends
        if exhausted or ((saves or stops) and not ends):
            self.check(steps, state)
            self.progress.save(count, state)
        if stops:
            self.progress.checkpoints.wait()
            raise self.stopped(count)
        return ends or exhausted

    def stop_for(self, reason: str | None, count: int, steps: Programs, state: TrainState) -> None:
        """Save the state after `count` updates and raise RunError where there is a reason to give up."""
        if reason is None:
            return
        self.check(steps, state)
        self.progress.save(count, state, wait=True)
        raise RunError(
            f"stage '{self.stage.name}': stopped after update {count} of {self.updates.total}: {reason}. "
            f"The state is kept in {self.stage.dir / 'checkpoints'}."
        )

    def show(self, count: int, state: TrainState) -> None:
        """Show the previews after `count` updates; a failure after the first update must not cost the run."""
        if self.build.previews is None:
            return
        began = time.perf_counter()
        try:
            self.build.previews(count, state)
        except RunError as error:
            if count == 0:
                raise
            warn(f"stage '{self.stage.name}': the previews after update {count} are skipped: {error}")
        self.progress.window.started += time.perf_counter() - began

    def stopped(self, count: int) -> Stopped:
        return Stopped(
            f"stage '{self.stage.name}': stopped after update {count} of {self.updates.total}, state saved; "
            "rerun the same command to resume"
        )

    def compare(self, count: int, state: TrainState, metrics: Mapping[str, float]) -> bool:
        """Return whether this evaluation is the best so far."""
        try:
            return self.best.compare(count, metrics)
        except InputError:
            self.progress.save(count, state, wait=True)
            raise

    def next_update(self, step: int, state: TrainState) -> Update:
        """Fetch an update; if that fails, in a reward for example, save the state reached before it."""
        try:
            return self.updates.update(step, state)
        except (InputError, RunError, Stopped):
            if step > max(self.progress.newest, 0):
                self.progress.save(step, state, wait=True)
                self.stage.say(f"the state after update {step} is saved")
            raise

    def check(self, steps: Programs, state: TrainState) -> None:
        """Read the guards of pending updates; one step late, so that the device is never waited for."""
        while self.pending:
            step, guard, update, metrics = self.pending.pop(0)
            if int(guard) < 0:
                self.progress.tokens += update.tokens
                self.progress.window.add(update, metrics)
                measured = getattr(self.updates, "measured", None)
                if measured is not None and self.reason is None:
                    self.reason = measured(step, metrics)
                continue
            if problem := nonfinite_weights(state.model, state.params):  # as they were loaded
                raise InputError(
                    f"stage '{self.stage.name}': loss or gradient of update {step + 1} is not finite: {problem}"
                )
            sound = replace(state, guard=jax.device_put(np.int32(-1), state.guard.sharding))
            self.progress.save(step, sound, wait=True)
            culprits = find_nonfinite_rows(steps, sound, update, self.updates.shapes(), self.mesh)
            raise nonfinite_error(self.stage, step, culprits)

    def report(
        self, count: int, state: TrainState, *, logs: bool, evaluates: bool
    ) -> tuple[dict[str, float], bool]:
        """Emit one event for a step that logs, evaluates or both; return its metrics and whether it was evaluated."""
        metrics: dict[str, float] = {}
        evaluated = None
        if logs:
            metrics = self.progress.window.read(self.progress.tokens)
            metrics["learning_rate"] = float(self.rate(jnp.int32(count - 1)))
            metrics["epoch"] = self.updates.epochs(count)
            metrics |= peak_memory() if self.config.track_memory else {}
            self.progress.window = MetricWindow()
        if evaluates and self.build.evaluate is not None:
            began = time.perf_counter()
            with say_if_slow(self.stage.say, f"evaluating after update {count}"):
                evaluated = evaluate_or_warn(self.build.evaluate, state, count, self.stage)
            metrics |= evaluated or {}
            self.progress.window.started += time.perf_counter() - began
        self.progress.metrics.update(metrics)
        if metrics:
            self.stage.hook.rlhf_step_end(stage=self.stage, step=count, metrics=metrics)
        return metrics, evaluated is not None
