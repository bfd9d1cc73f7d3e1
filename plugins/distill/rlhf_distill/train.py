"""The distillation trainer: student, teacher, rollouts and objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.fit import TreeReader, Update, UpdateSource
from rlhf_core.packing import Layout, Packed, pack
from rlhf_core.rollouts import (
    FixedPrompts,
    Rollout,
    RolloutUpdates,
    SamplingTest,
    choose_rollout_rows,
    open_collector,
)
from rlhf_core.training import Build, Context, define_trainer, python_trainer
from rlhf_distill.config import DistillConfig
from rlhf_distill.objective import (
    STUDENT,
    TEACHER,
    objective,
    open_divergence,
    read_divergences,
)
from rlhf_distill.teacher import open_teacher

if TYPE_CHECKING:
    from rlhf_core import TrainState
    from rlhf_core.models import Model
    from rlhf_core.rollouts import RolloutCollector
    from rlhf_distill.contract import Divergence


def build(config: DistillConfig, context: Context) -> Build:
    """Train `config.model` towards the distributions of its teacher."""
    divergence = open_divergence(config, context.stage)
    student = context.model("lm")
    models = {STUDENT: student, TEACHER: open_teacher(config, context, student)}
    trains = {STUDENT: config}
    if not config.sampled_per_update:
        models, of_data = _given(context, models)
        loss = objective(_definitions(models), divergence, config)
        texts = context.texts("eval_data")
        if texts is None:
            return Build(models, of_data, loss, trains=trains)

        def stored(params: Any) -> Any:
            return {**params, STUDENT: student.as_stored(params[STUDENT])}

        rows = context.held_out(models[STUDENT], texts, reads_tokens=True, stored=stored)
        actions = context.evaluations(lambda _: rows.evaluator(loss, {"loss": "token"}))
        return Build(models, of_data, loss, actions, trains=trains)

    sampled = context.by(config.replace(total_batch_size=config.sampled_per_update, on_policy_fraction=1.0))
    size = config.sampled_per_update * config.steps_per_generation
    options = config.rollout_options(
        1,
        size,
        updates_per_rollout=config.steps_per_generation,
        policy=STUDENT,
        test=config.sampling_test,
    )
    collector = open_collector(sampled, student, [], options, others=[models[TEACHER]])
    assert collector is not None
    evaluated = replace(options, prompts_per_rollout=config.eval_batch_size or size)
    held_out = open_collector(sampled, student, [], evaluated, "eval_data", others=[models[TEACHER]])
    chosen = {name: choose_rollout_rows(sampled, model, collector) for name, model in models.items()}
    models = {name: model for name, (model, _) in chosen.items()}
    layout = chosen[STUDENT][1]
    steps = DistillSteps(collector.prompts, layout, config.sampled_per_update)
    test = SamplingTest(sampled, collector, models[STUDENT], layout)
    source = RolloutUpdates(context, collector, layout, steps, test=test)
    updates: RolloutUpdates | WithGiven = source
    if config.given_per_update:
        given = given_config(config, context.seed, source.total)
        updates = WithGiven(
            source, _given(context.by(given), {STUDENT: student})[1], config.sampled_per_update
        )
    loss = objective(_definitions(models), divergence, config)
    stored = student.as_stored
    if held_out is None:
        shown = FixedPrompts(collector, len(collector.prompts), config.num_preview_samples, stored=stored)
        return Build(models, updates, loss, [shown.previews()], trains=trains)
    fixed = _fixed_prompts(context, student, models, divergence, held_out)
    actions = [*context.evaluations(lambda _: fixed.evaluate), fixed.previews(end=False)]
    return Build(models, updates, loss, actions, trains=trains)


def given_config(config: DistillConfig, seed: int, total: int) -> DistillConfig:
    """Return the config of the given examples of `total` updates that also have sampled ones.

    They have a separate order, so that an update does not also train on the prompts it samples for.
    """
    order = (seed if config.shuffle_seed_train is None else config.shuffle_seed_train) + 1
    size = config.given_per_update
    return config.replace(
        total_batch_size=size, on_policy_fraction=0.0, max_training_steps=total, shuffle_seed_train=order
    )


def _definitions(models: Mapping[str, Model]) -> dict[str, Any]:
    return {name: model.definition for name, model in models.items()}


def _given(context: Context, models: Mapping[str, Model]) -> tuple[dict[str, Model], UpdateSource]:
    """Open the given completions of `train_data`; return the models with the attention that suits them, and updates."""
    texts = context.texts("train_data")
    made = {name: context.updates(model, texts, reads_tokens=True) for name, model in models.items()}
    return {name: model for name, (model, _) in made.items()}, made[STUDENT][1]


def _fixed_prompts(
    context: Context,
    student: Model,
    models: Mapping[str, Model],
    divergence: Divergence,
    collector: RolloutCollector,
) -> FixedPrompts:
    """Prepare what evaluates the student on prompts of `eval_data`.

    student: as the collector samples from it, so that both samplers share programs. models: as they are trained.
    """
    config: Any = context.config
    count = len(collector.prompts)
    steps = config.max_evaluation_steps
    shown = config.num_preview_samples
    size = config.eval_batch_size or config.total_batch_size
    count = count if steps is None else min(count, size * steps)
    single = context.by(config.replace(total_batch_size=min(size, count), on_policy_fraction=1.0))
    _, layout = choose_rollout_rows(single, student, collector)
    read = read_divergences(_definitions(models), divergence, config)
    reader = TreeReader(read, layout, context.mesh, per="token")

    def measure(rollout: Rollout, state: TrainState) -> tuple[dict[str, float], dict[str, Any]]:
        params = {**state.params, STUDENT: student.as_stored(state.params[STUDENT])}
        values = reader(params, rollout.trees(collector.prompts))
        each = [value.mean(dtype=np.float64) if len(value) else np.nan for value in values]
        return {"loss": float(np.concatenate(values).mean(dtype=np.float64))}, {"loss": each}

    fixed = FixedPrompts(collector, count, shown, stored=student.as_stored, measure=measure)
    context.ahead(fixed.warm_up, student)
    return fixed


class DistillSteps:
    """Cuts what the student sampled into updates of `size` completions."""

    token_names = ()
    sequence_names = ("index",)

    def __init__(self, prompts: Any, layout: Layout, size: int) -> None:
        self.prompts, self.layout, self.size = prompts, layout, size

    def prepare(self, rollout: Rollout, state: TrainState) -> Rollout:
        return rollout

    def minibatches(self, rollout: Rollout) -> list[list[Packed]]:
        starts = range(0, len(rollout.prompts), self.size)
        return [
            pack(
                rollout.trees(self.prompts, at, at + self.size),
                self.layout,
                sequence_names=self.sequence_names,
            )
            for at in starts
        ]


class WithGiven:
    """An `UpdateSource` whose updates have the examples of two: `count` sampled ones, and those of `given`."""

    def __init__(self, sampled: RolloutUpdates, given: UpdateSource, count: int) -> None:
        self.sampled, self.given, self.count = sampled, given, count
        self.data = _BothRows(sampled.prompts, given.data, len(sampled.prompts))

    @property
    def total(self) -> int:
        return self.sampled.total

    def shapes(self) -> list[Packed]:
        return [*self.sampled.shapes(), *self.given.shapes()]

    def needs_state(self, step: int) -> bool:
        return self.sampled.needs_state(step)

    def update(self, step: int, state: TrainState) -> Update:
        sampled = self.sampled.update(step, state)
        given = self.given.update(step, state)
        count = self.count
        numbered = [
            batch._replace(example=np.where(batch.example < 0, -1, batch.example + count))
            for batch in given.batches
        ]
        return sampled._replace(
            batches=[*sampled.batches, *numbered],
            tokens=sampled.tokens + given.tokens,
            where=lambda i: sampled.where(i) if i < count else given.where(i - count),
            numbers=lambda batch: _numbers(batch, sampled, given, count),
        )

    def epochs(self, step: int) -> float:
        return self.sampled.epochs(step)

    def snapshot(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        host, arrays = self.sampled.snapshot(step)
        return {"sampled": host, "given": self.given.snapshot(step)[0]}, arrays

    def restore(self, step: int, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        self.sampled.restore(step, host["sampled"], arrays)
        self.given.restore(step, host["given"], {})


def _numbers(batch: Packed, sampled: Update, given: Update, count: int) -> NDArray[np.integer[Any]]:
    """Number the sequences of a micro-batch of either: completions, then `count` + the row of a given example."""
    if batch.example.max() < count:
        return sampled.numbers(batch)
    there = batch.example >= 0
    rows = given.numbers(batch._replace(example=np.where(there, batch.example - count, -1)))
    return np.where(there, rows + count, -1)


@dataclass(frozen=True)
class _BothRows:
    """The rows of prompts, followed by those of given completions."""

    prompts: Any
    given: Any
    count: int
    """Of prompts."""

    def __len__(self) -> int:
        return self.count + len(self.given)

    def where(self, i: int) -> str:
        return str(self.prompts.where(i) if i < self.count else self.given.where(i - self.count))


trainer = define_trainer(DistillConfig, {"model": "language_model"}, build)
DistillTrainer = python_trainer("distill", DistillConfig, __name__)
