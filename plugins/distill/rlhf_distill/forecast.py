"""Forecast a distillation stage."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf_core import Forecast, StagePrograms
from rlhf_core.rollouts import forecast_rollouts, rollout_programs
from rlhf_core.training import dataset_programs, forecast_lines, open_texts
from rlhf_distill.objective import TEACHER, objective, open_divergence
from rlhf_distill.teacher import check_teacher, teacher_source
from rlhf_distill.train import given_config

if TYPE_CHECKING:
    from rlhf_core import Stage
    from rlhf_distill.config import DistillConfig


def forecast(config: DistillConfig, stage: Stage) -> Forecast:
    """Forecast `run` from the data and the models' configs alone."""
    open_divergence(config, stage)
    check_teacher(config, stage)
    texts = partial(
        forecast_lines, unit="texts", head="lm", open_data=open_texts, frozen_models=_frozen(config, stage)
    )
    if not config.sampled_per_update:
        return texts(config, stage)
    made = forecast_rollouts(_sampled(config), stage, **_rollouts(config, stage))
    if not config.given_per_update:
        return made
    given = texts(given_config(config, stage.seed, config.max_training_steps or 1), stage)
    size = f"an update also has {config.given_per_update} of the given completions"
    return replace(made, lines=(*made.lines, f"{given.lines[0]}; {size}"))


def programs(config: DistillConfig, stage: Stage) -> StagePrograms:
    """Describe the programs of `run` from the data and the shapes of its models."""
    divergence = open_divergence(config, stage)
    texts = partial(
        dataset_programs,
        head="lm",
        open_data=open_texts,
        objective=lambda models: objective(models, divergence, config),
        reads_tokens=True,
        frozen_models=_frozen(config, stage),
    )
    if not config.sampled_per_update:
        return texts(config, stage)
    made = rollout_programs(
        _sampled(config),
        stage,
        objective=lambda models: objective(models, divergence, config),
        sampler=config.sampler,
        **_rollouts(config, stage),
    )
    if not config.given_per_update or not made.programs:
        return made
    given = texts(given_config(config, stage.seed, config.max_training_steps or 1), stage)
    extra = tuple(
        replace(each, name=f"{each.name}, given") for each in given.programs if each.work == "train"
    )
    return replace(made, programs=(*made.programs, *extra))


def _sampled(config: DistillConfig) -> DistillConfig:
    """Return the config of an update's sampled examples alone."""
    return config.replace(total_batch_size=config.sampled_per_update, on_policy_fraction=1.0)


def _frozen(config: DistillConfig, stage: Stage) -> dict[str, Any]:
    return {TEACHER: teacher_source(config, stage)}


def _rollouts(config: DistillConfig, stage: Stage) -> dict[str, Any]:
    """Describe rollouts as `forecast_rollouts` and `rollout_programs` take it."""
    return {
        "rewards": None,
        "max_prompt_length": config.max_prompt_length,
        "num_generations": 1,
        "sampling": config.sampling,
        "updates_per_rollout": config.steps_per_generation,
        "minibatches": config.steps_per_generation,
        "frozen_models": _frozen(config, stage),
    }
