"""One distillation stage, top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core import create_state
from rlhf_core.artifacts import save_model
from rlhf_core.fit import TokenReader, fit
from rlhf_core.optimizers import make_optimizer
from rlhf_core.rollouts import FixedPrompts, choose_rollout_rows, open_collector
from rlhf_core.training import Context, HeldOut, dataset_updates, open_model, open_texts, python_trainer
from rlhf_distill.config import DistillConfig
from rlhf_distill.objective import (
    STUDENT,
    TEACHER,
    objective,
    open_divergence,
    read_divergences,
    require_separate_terms,
)
from rlhf_distill.teacher import open_teacher, teacher_source
from rlhf_distill.updates import DistillUpdates

if TYPE_CHECKING:
    from rlhf_core import Stage, TrainState
    from rlhf_core.fit import DatasetUpdates
    from rlhf_core.models import Model
    from rlhf_core.rollouts import Rollout, RolloutCollector
    from rlhf_distill.divergences import Divergence


def run(config: DistillConfig, stage: Stage) -> None:
    """Train `config.model` towards the distributions of its teacher and save the artifact `model`."""
    divergence = open_divergence(config, stage)
    require_separate_terms(divergence, config, stage)
    student = open_model(config, stage, head="lm")
    models = {STUDENT: student, TEACHER: open_teacher(config, stage, student)}
    collector = open_prompts(config, stage, student) if config.sampled_per_update else None
    updates: DistillUpdates | DatasetUpdates
    if collector is not None:
        sampled = config.replace(total_batch_size=config.sampled_per_update, on_policy_fraction=1.0)
        chosen = {
            name: choose_rollout_rows(model, sampled, stage, collector) for name, model in models.items()
        }
        models, layout = {name: model for name, (model, _) in chosen.items()}, chosen[STUDENT][1]
        updates = DistillUpdates(stage, config, collector, layout)
        if config.given_per_update:
            given = given_config(config, stage.seed, updates.total)
            updates.add_given(_given_updates(given, stage, {STUDENT: student})[1])
    else:
        models, updates = _given_updates(config, stage, models)
    tx, schedule = make_optimizer(config, stage.registry, updates.total)
    evaluate, preview = _evaluation(config, stage, student, models, divergence, collector)
    frozen = {TEACHER: ".*", **({STUDENT: config.frozen_parameters} if config.frozen_parameters else {})}
    fitted = fit(
        stage,
        config,
        create_state(models, {STUDENT: tx}, seed=stage.seed, frozen=frozen),
        objective({name: model.definition for name, model in models.items()}, divergence, config),
        updates,
        schedule=schedule,
        evaluate=evaluate,
        preview=preview,
    )
    save_model(stage, "model", "language_model", models[STUDENT].with_params(fitted.state.params[STUDENT]))


def open_prompts(
    config: DistillConfig, stage: Stage, student: Model, field: str = "train_data"
) -> RolloutCollector | None:
    """Open the prompts of a field and a sampler for them; None without `eval_data`."""
    size = config.sampled_per_update * config.steps_per_generation
    return open_collector(
        config,
        stage,
        student,
        [],
        field,
        max_prompt_length=config.max_prompt_length,
        num_generations=1,
        sampling=config.sampling,
        prompts_per_call=size if field == "train_data" else config.eval_batch_size or size,
        sampler=config.sampler,
        policy=lambda params: params[STUDENT],
        frozen_models={TEACHER: teacher_source(config, stage)},
    )


def given_config(config: DistillConfig, seed: int, total: int) -> DistillConfig:
    """Return the config of the given examples of `total` updates that also have sampled ones.

    They have an order of their own, so that an update does not have the prompts that it samples for a second time.
    """
    order = (seed if config.shuffle_seed_train is None else config.shuffle_seed_train) + 1
    size = config.given_per_update
    return config.replace(
        total_batch_size=size, on_policy_fraction=0.0, max_training_steps=total, shuffle_seed_train=order
    )


def _given_updates(
    config: DistillConfig, stage: Stage, models: Mapping[str, Model]
) -> tuple[dict[str, Model], DatasetUpdates]:
    """Open the given completions of `train_data`; return the models with the attention that suits them, and updates."""
    texts = open_texts(config, stage, models[STUDENT].tokenizer, "train_data")
    assert texts is not None
    trees = texts.trees()
    made = {
        name: dataset_updates(model, config, stage, texts, trees, reads_tokens=True)
        for name, model in models.items()
    }
    return {name: model for name, (model, _) in made.items()}, made[STUDENT][1]


def _evaluation(
    config: DistillConfig,
    stage: Stage,
    student: Model,
    models: Mapping[str, Model],
    divergence: Divergence,
    collector: RolloutCollector | None,
) -> tuple[Callable[[TrainState], dict[str, float]] | None, Callable[[int, TrainState], None] | None]:
    """Return what evaluates, and what writes completions to be read; None where there is nothing to.

    What the student samples is evaluated on prompts of `eval_data`; without sampling, its given completions are.
    student: as `collector` samples from it, so that both samplers share programs. models: as they are trained.
    """
    definitions = {name: model.definition for name, model in models.items()}

    def stored(params: Any) -> Any:
        return {**params, STUDENT: student.as_stored(params[STUDENT])}

    if collector is None:
        texts = open_texts(config, stage, student.tokenizer, "eval_data", needed=False)
        if texts is None:
            return None, None
        rows = HeldOut(
            Context(config, stage), models[STUDENT], texts, texts.trees(), reads_tokens=True, stored=stored
        )
        return rows.evaluator(objective(definitions, divergence, config)), None
    held_out = open_prompts(config, stage, student, "eval_data")
    if held_out is None:
        shown = FixedPrompts(
            collector, len(collector.prompts), config.num_preview_samples, stored=student.as_stored
        )
        return None, shown.preview
    size = config.eval_batch_size or config.total_batch_size
    count, steps = len(held_out.prompts), config.max_evaluation_steps
    count = count if steps is None else min(count, size * steps)
    single = config.replace(total_batch_size=min(size, count), on_policy_fraction=1.0)
    _, layout = choose_rollout_rows(student, single, stage, held_out)
    reader = TokenReader(read_divergences(definitions, divergence, config), layout, stage.devices())

    def measure(rollout: Rollout, state: TrainState) -> dict[str, float]:
        values = reader(stored(state.params), rollout.trees(held_out.prompts))
        return {"loss": float(np.concatenate(values).mean(dtype=np.float64))}

    fixed = FixedPrompts(
        held_out, count, config.num_preview_samples, stored=student.as_stored, measure=measure
    )
    fixed.warm_up(student)
    return fixed.evaluate, fixed.preview


DistillTrainer = python_trainer("distill", DistillConfig, __name__)
