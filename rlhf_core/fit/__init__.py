"""The training loop of every trainer: update, then the actions that are due."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.artifacts import save_model, write_atomic
from rlhf_core.config.warnings import config_warnings
from rlhf_core.errors import InputError, RunError, Stopped, warn
from rlhf_core.fit.actions import ORDER, UNTIMED, Action, Moment, Place
from rlhf_core.fit.batches import (
    KNOWN_UPDATES,
    ExampleUpdates,
    Update,
    UpdateSource,
    expected_calls,
    uses_several_batches,
)
from rlhf_core.fit.batches import attention_skips_blocks as attention_skips_blocks
from rlhf_core.fit.batches import choose_row_layout as choose_row_layout
from rlhf_core.fit.evaluation import EVALUATION
from rlhf_core.fit.evaluation import EvaluationMetrics as EvaluationMetrics
from rlhf_core.fit.evaluation import evaluate_or_warn as evaluate_or_warn
from rlhf_core.fit.evaluation import evaluator as evaluator
from rlhf_core.fit.nonfinite import find_nonfinite_rows, nonfinite_error
from rlhf_core.fit.progress import MetricWindow, Progress
from rlhf_core.fit.values import UpdateValues as UpdateValues
from rlhf_core.fit.values import read_values
from rlhf_core.fit.weights import log_weights
from rlhf_core.mesh import put_rows
from rlhf_core.metrics import Metrics
from rlhf_core.models import Model
from rlhf_core.models.finite import nonfinite_weights
from rlhf_core.optimizers import make_optimizer
from rlhf_core.packing.rows import empty_batches
from rlhf_core.reading import TreeReader
from rlhf_core.runtime.agreement import any_process, stop_together
from rlhf_core.runtime.machine import peak_memory, return_freed_memory
from rlhf_core.runtime.signals import stop_signals
from rlhf_core.state import TrainState, create_state
from rlhf_core.step import Objective, Programs, Values

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.optimizers import Schedule
    from rlhf_core.stage import Stage

__all__ = [
    "Action",
    "Build",
    "EvaluationMetrics",
    "ExampleUpdates",
    "TreeReader",
    "Update",
    "UpdateSource",
    "empty_batches",
    "fit",
]


PREVIEWS = "previews"
"""The name of the action that completes the prompts of `previews`."""
NO_PREVIEWS = "the trainer shows no completions; those of reward models are scored pairs, num_preview_samples"
POLICY = "policy"
"""Of several models, the one that becomes the output `model`."""


@dataclass(frozen=True)
class Build:
    """What a trainer's `build` returns. Parameters may be shapes: a build computes nothing with them.

    models: the model that is trained, or several by name, {"policy": …, "critic": …}; a state's parameters and the
        objective's are then keyed alike.
    updates: which examples make an update, in which rows. objective: (parameters, rows) → the loss and metrics.
    actions: what happens besides the updates, such as evaluations; of those that are due after one update and have the
        same place, in this order. See `fit`.
    trains: of several models, {name: the config that it is trained by}; the others are not trained. Default: all are,
        by the stage's config.
    held: {name: arrays or shapes} of what is in memory besides the state, such as a copy of what is trained.
    save: saves the outputs from the last state; None: the model, or the one called "policy", is the output `model`.
    adjust: (parameters, metrics of an update) → parameters, a part of the update, after the optimizer's.
    """

    models: Model | Mapping[str, Model]
    updates: UpdateSource
    objective: Objective
    actions: Sequence[Action] = ()
    trains: Mapping[str, TrainerConfig] = field(default_factory=dict)
    held: Mapping[str, Any] = field(default_factory=dict)
    save: Callable[[TrainState], None] | None = None
    adjust: Callable[[Any, Metrics], Any] | None = None

    def state(self, config: TrainerConfig, stage: Stage) -> tuple[TrainState, Schedule]:
        """Make the state that training starts from, of arrays or of shapes, and the learning rate's schedule."""
        models, total = self.models, self.updates.total
        given = stage.inputs.get("optimizers") or (None, None)
        waits = "optimizer" in config.offload
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

    def programs(self, state: TrainState, config: TrainerConfig, *, from_zero: bool) -> Programs:
        """Make the programs of an update, which return what the actions read; `from_zero` is explained there."""
        return Programs(
            self.objective,
            state,
            from_zero=from_zero,
            by_layer=config.log_grad_norms,
            adjust=self.adjust,
            values=sorted({name for action in self.actions for name in action.values}),
        )


def fit(stage: Stage, config: TrainerConfig, build: Build) -> TrainState:
    """Run `build.updates.total` updates, continuing from the stage's newest whole checkpoint; save the outputs.

    Each update is the next examples, the sums over their micro-batches, and the optimizer's step; then come the actions
    that are due. Before the first of them the guard of the update is read, so that nothing is moved, told or saved
    after a loss or gradient that is not finite; where none is due, it is read once the next update has begun, and the
    device is never waited for. What is due after one update happens in this order:

    | place | what | due |
    |---|---|---|
    | move | references move, the parameters of `log_weights` are logged | as the action says |
    | keep | the state is saved, marked as not reported yet | at the end |
    | log | the metrics of the updates since the last time are read | `log_steps`, `report_steps`, at the end |
    | measure | evaluations, and other actions that return metrics | `evaluation_steps`, at the end |
    | report | loggers get the metrics of the step | where there are any |
    | compare | the evaluation is compared with the best one | after an evaluation |
    | watch | limits end the run with an error, its state saved | where there are metrics |
    | show | completions of fixed prompts | `previews.every`, at the start and at the end |
    | save | the state is saved; a signal ends the run | `save_steps`, `save_interval_minutes`, the best, a signal |

    If anything fails at the end, once the state is kept, the same command continues after the training: all but the
    moves is done again. A signal that comes during any of these ends the run after this update. Before the first
    update of a run come evaluations (`eval_on_start`, `metric_for_best_model`), and once its examples are there, what
    is shown.

    The arrays of the build's models are deleted: updates donate them. Returns the last state, or the best one where
    `load_best_model_at_end`.

    Raises RunError, with the last good state saved, where a loss or gradient is not finite, naming the examples, and
    where an action stops the run. Raises Stopped, with the state saved, after SIGTERM, SIGINT or SIGHUP.
    """
    _warn_of_fields_without_effect(stage, config, build)
    state, schedule = build.state(config, stage)
    run = _Run(stage, config, build, schedule)
    try:
        with stop_signals(stops="saving after this update") as run.stop:
            state = run.loop(state)
    finally:
        run.progress.checkpoints.close()
    if build.save is not None:
        build.save(state)
    else:
        model, params = build.models, state.params
        if not isinstance(model, Model):
            model, params = model[POLICY], params[POLICY]
        kind = "language_model" if model.definition.head == "lm" else "reward_model"
        save_model(stage, "model", kind, model.with_params(params))
    return state


def _warn_of_fields_without_effect(stage: Stage, config: TrainerConfig, build: Build) -> None:
    if not stage.is_main:
        return
    given = stage.inputs.get("optimizers") or (None, None)
    for line in config_warnings(config, build.updates.total, given):
        warn(f"stage '{stage.name}'.{line}")
    names = {action.name for action in build.actions}
    held_out = config.max_evaluation_steps != 0 and (config.eval_data or stage.inputs.get("eval_dataset"))
    if held_out and EVALUATION not in names:
        warn(
            f"stage '{stage.name}'.eval_data: given, but the trainer does not evaluate: its build has no evaluation"
        )
    if config.previews is not None and PREVIEWS not in names:
        warn(f"stage '{stage.name}'.previews: has no effect: {NO_PREVIEWS}")


class _Run:
    stop: threading.Event

    def __init__(self, stage: Stage, config: TrainerConfig, build: Build, schedule: Schedule) -> None:
        self.stage, self.config, self.build, self.updates = stage, config, build, build.updates
        self.rate = jax.jit(schedule)
        self.mesh = stage.devices()
        self.pending: list[tuple[int, jax.Array, Update, Metrics, list[Values]]] = []
        self.progress = Progress(stage, config, build.updates)
        self.best = self.progress.best
        self.out_of_time = False
        self.signalled = False
        """Whether a process got a signal, as all processes agreed."""
        self.reason: str | None = None
        """Why the run must stop, as an update's metrics showed."""
        self.actions: list[Action] = []
        self.reads = [action for action in build.actions if action.values]
        """Actions that take values, one update late."""

    def own_actions(self, state: TrainState) -> list[Action]:
        """Make the actions of every run."""
        own = [
            Action(lambda at: at.ends, self.keep, "keep"),
            Action(self.logs, self.log, "log"),
            Action(lambda at: bool(at.metrics), self.report, "report"),
            Action(lambda at: any(name.startswith("eval_") for name in at.metrics), self.compare, "compare"),
            Action(lambda at: self.reason is not None, lambda at: at.stop(str(self.reason)), "watch"),
            Action(self.saves, self.save, "save"),
        ]
        if self.config.log_weights is not None:
            own.append(log_weights(self.stage, self.config.log_weights, state))
        return own

    def loop(self, state: TrainState) -> TrainState:
        updates, progress = self.updates, self.progress
        start, state = progress.restore(state)
        actions = [*(each for each in self.build.actions if not each.values), *self.own_actions(state)]
        self.actions = sorted(actions, key=lambda action: ORDER.index(action.place))
        steps = self.prepare(start, state)
        progress.saved_at = progress.window.started = time.perf_counter()
        began = progress.window.started - progress.elapsed
        count, ends = start, self.best.exhausted
        if not progress.reported or not updates.total:
            ends = self.act(self.moment(start, state), steps, ORDER[1:])
        for step in range(start, start if ends else updates.total):
            if updates.needs_state(step):
                self.check(steps, state)
                self.stop_for(self.reason, step, steps, state)
            state = self.run_update(step, steps, state)
            if step == start + 1:
                # The first update is done by now; this one is being computed.
                steps.compile(state, expected_calls(updates, step, KNOWN_UPDATES, state))
            elif step == start + 2:
                steps.wait()
            count = step + 1
            progress.elapsed = time.perf_counter() - began
            if self.act(self.moment(count, state), steps):
                break
        progress.checkpoints.wait()
        if self.out_of_time and count < updates.total:
            warn(
                f"stage '{self.stage.name}': training_time_limit reached after update {count} of "
                f"{updates.total}; ending the stage"
            )
        return self.best.final(state, count, progress.checkpoints)

    def prepare(self, start: int, state: TrainState) -> Programs:
        """Write plan.json, start to compile the first update, and take the actions before it."""
        config, updates = self.config, self.updates
        if self.stage.is_main:
            per_epoch = updates.total / updates.epochs(updates.total) if updates.total else 0.0
            plan = {"updates": updates.total, "start": start, "updates_per_epoch": per_epoch}
            write_atomic(self.stage.dir / "plan.json", json.dumps(plan))
        here = f"at stage '{self.stage.name}', after update {start} of {updates.total}"
        stop_together(here)
        several = uses_several_batches(updates, state)
        steps = self.build.programs(state, config, from_zero=several)
        if start < updates.total:
            self.stage.say(f"compiling, for update {start + 1} of {updates.total}")
            steps.compile(state, expected_calls(updates, start, 1, state))
        # A metric asked for by name is looked up now rather than at the first evaluation, hours later.
        fresh: tuple[Place, ...] = ("measure", "report", "compare") if self.progress.newest < 0 else ()
        self.act(Moment(start, state, starts=True), steps, ("move", *fresh))
        stop_together(here)
        return steps

    def run_update(self, step: int, steps: Programs, state: TrainState) -> TrainState:
        """Dispatch update `step`, then check the one before it while this one is computed."""
        update = self.next_update(step, state)
        return_freed_memory()  # before the programs that take the most
        if step == 0:
            self.act(Moment(0, state, starts=True), steps, ("show",))
        done = None
        counts = steps.count(state, update.batches)
        values: list[Values] = []
        for number, batch in enumerate(update.batches):
            done = steps.accumulate(state, put_rows(self.mesh, batch), done, number, counts)
            values.append(done.values)
        if done is None:
            raise RunError(f"stage '{self.stage.name}': update {step + 1} has nothing to train on")
        state, metrics = steps.apply(state, done)
        self.check(steps, state)
        self.pending.append((step, jnp.copy(state.guard), update, metrics, values))
        return state

    def moment(self, count: int, state: TrainState) -> Moment:
        """Describe the point after `count` updates."""
        limit = self.config.training_time_limit
        self.out_of_time = limit is not None and any_process(self.progress.elapsed >= limit)[0]
        return Moment(count, state, ends=count >= self.updates.total or self.out_of_time)

    def act(self, at: Moment, steps: Programs, places: Sequence[Place] = ORDER) -> bool:
        """Take the actions of these places that are due, in order; return whether the training ends here."""
        for action in self.actions:
            if action.place not in places or not action.due(at):
                continue
            self.check(steps, at.state)
            began = time.perf_counter()
            at.metrics |= action.run(at) or {}
            if action.place in UNTIMED:
                self.progress.window.started += time.perf_counter() - began
            self.stop_for(at.reason, at.step, steps, at.state)
        return at.ends or self.best.exhausted

    def keep(self, at: Moment) -> None:
        """Save the last state before this step is reported: where that fails, a run that continues reports it again."""
        if self.progress.newest != at.step and self.config.checkpoints.last:
            self.progress.save(at.step, at.state, reported=False, wait=True)
        if any_process(self.stop.is_set())[0]:
            raise self.stopped(at.step)

    def logs(self, at: Moment) -> bool:
        """Return whether the metrics of the updates are read at this step."""
        config = self.config
        if at.starts or not self.updates.total:
            return False
        every = [config.log_steps, config.report_steps]
        # An evaluation that is compared may be the last thing that happens, so it logs too.
        if self.best.watches and any(action.name == EVALUATION for action in self.actions):
            every.append(config.evaluation_steps)
        return at.ends or any(at.step % steps == 0 for steps in every if steps)

    def log(self, at: Moment) -> dict[str, float]:
        """Return the metrics of the updates since the last logged step."""
        metrics = self.progress.window.read(self.progress.tokens)
        metrics["learning_rate"] = float(self.rate(jnp.int32(at.step - 1)))
        metrics["epoch"] = self.updates.epochs(at.step)
        metrics |= peak_memory() if self.config.track_memory else {}
        self.progress.window = MetricWindow()
        return metrics

    def report(self, at: Moment) -> None:
        """Tell loggers the metrics of a step, and keep them for the result."""
        self.progress.metrics.update(at.metrics)
        self.stage.hook.rlhf_step_end(stage=self.stage, step=at.step, metrics=dict(at.metrics))

    def compare(self, at: Moment) -> None:
        """Compare an evaluation with the best one so far."""
        try:
            at.improved = self.best.compare(at.step, at.metrics)
        except InputError:
            if not at.starts:
                self.progress.save(at.step, at.state, wait=True)
            raise
        if at.starts and at.improved and self.config.load_best_model_at_end:
            self.progress.save(at.step, at.state, wait=True)

    def saves(self, at: Moment) -> bool:
        """Return whether the state is saved after this update; all processes ask at the same time, and agree.

        A signal is asked for here, after everything else, so that one that came during an evaluation stops the run.
        """
        asked, self.signalled = any_process(at.improved or self.progress.due(at.step), self.stop.is_set())
        return self.signalled or (not at.ends and (asked or self.best.exhausted))

    def save(self, at: Moment) -> None:
        """Save the state, which at the end was kept before; end the run after a signal."""
        if not at.ends:
            self.progress.save(at.step, at.state)
        if self.signalled:
            self.progress.checkpoints.wait()
            raise self.stopped(at.step)

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

    def stopped(self, count: int) -> Stopped:
        return Stopped(
            f"stage '{self.stage.name}': stopped after update {count} of {self.updates.total}, state saved; "
            "rerun the same command to resume"
        )

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
            step, guard, update, metrics, values = self.pending.pop(0)
            if int(guard) < 0:
                self.progress.tokens += update.tokens
                found = self.hand_out(step + 1, update, values)
                self.progress.window.add(update._replace(metrics={**update.metrics, **found}), metrics)
                measured = getattr(self.updates, "measured", None)
                if measured is not None and self.reason is None:
                    self.reason = measured(step, metrics)
                continue
            problem = nonfinite_weights(state.model, state.params)
            if problem:  # as they were loaded
                raise InputError(
                    f"stage '{self.stage.name}': loss or gradient of update {step + 1} is not finite: {problem}"
                )
            sound = replace(state, guard=jax.device_put(np.int32(-1), state.guard.sharding))
            self.progress.save(step, sound, wait=True)
            culprits = find_nonfinite_rows(steps, sound, update, self.updates.shapes(), self.mesh)
            raise nonfinite_error(self.stage, step, culprits)

    def hand_out(self, count: int, update: Update, values: Sequence[Values]) -> dict[str, float]:
        """Call the actions that take values of update `count`, as far as they are due; return its metrics from them."""
        found: dict[str, float] = {}
        for action in self.reads:
            at = Moment(count, None, ends=count >= self.updates.total)
            if action.due(at):
                at.values = read_values(update, values, action.values)
                found |= action.run(at) or {}
                self.reason = self.reason or at.reason
        return found
