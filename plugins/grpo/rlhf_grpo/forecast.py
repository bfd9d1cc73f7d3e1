"""Forecast a GRPO stage."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlhf_core import POLICY_LOSS, PolicyInputs
from rlhf_core.objective import trained_logps
from rlhf_core.rollouts import forecast_rollouts, rollout_programs
from rlhf_core.training import try_loss
from rlhf_grpo.config_warnings import config_warnings
from rlhf_grpo.objective import Terms, combine, objective
from rlhf_grpo.policies import policies_read, read_values, values_read
from rlhf_grpo.updates import batch_values

if TYPE_CHECKING:
    from rlhf_core import Forecast, Stage, StagePrograms
    from rlhf_core.models import Definition
    from rlhf_grpo.config import GRPOConfig


def forecast(config: GRPOConfig, stage: Stage) -> Forecast:
    """Forecast `run` from the data and the model's config alone."""
    _try_loss(config, stage)
    return forecast_rollouts(
        config,
        stage,
        reward_weights=config.reward_weights,
        evaluation_sampling=config.evaluation_sampling,
        max_rounds=config.dynamic_sampling.max_rounds if config.dynamic_sampling else 1,
        **_rollouts(config),
        warn=lambda updates, positions, longest: config_warnings(
            config, updates=updates, context=positions, longest_prompt=longest
        ),
    )


def programs(config: GRPOConfig, stage: Stage) -> StagePrograms:
    """Describe the programs of `run` from the prompts and the shapes of its models."""
    loss = stage.registry.get(POLICY_LOSS, config.loss.name, **config.loss.options)
    temperature, values = config.sampling.temperature, values_read(config, reference=config.keeps_reference)

    def reader(model: Definition) -> Any:
        logps = partial(trained_logps, model, temperature=temperature, entropy=True)
        return partial(read_values, logps, values)

    return rollout_programs(
        config,
        stage,
        objective=lambda model: partial(
            objective,
            model,
            loss,
            Terms.of(config),
            temperature=temperature,
            correction=config.sampler_correction,
        ),
        reader=reader,
        policies=policies_read(values),
        sampler=config.sampler,
        **batch_values(config, values),  # type: ignore[arg-type]  # mypy takes its names for any argument's
        **_rollouts(config),
    )


def _rollouts(config: GRPOConfig) -> dict[str, Any]:
    """Describe rollouts as `forecast_rollouts` and `rollout_programs` take it."""
    return {
        "rewards": config.rewards,
        "max_prompt_length": config.max_prompt_length,
        "num_generations": config.num_generations,
        "sampling": config.sampling,
        "updates_per_rollout": config.updates_per_rollout,
        "minibatches": config.steps_per_generation,
        "copies": ("reference",) if config.keeps_reference else (),
        "environment": config.environment,
    }


def _try_loss(config: GRPOConfig, stage: Stage) -> None:
    loss = stage.registry.get(POLICY_LOSS, config.loss.name, **config.loss.options)
    tokens = jax.ShapeDtypeStruct((2, 3), jnp.float32)

    def measure(logps: jax.Array, ref_logps: jax.Array) -> Any:
        inputs = PolicyInputs(
            logps=logps,
            old_logps=logps,
            advantages=logps,
            mask=jnp.ones_like(logps),
            ref_logps=ref_logps if config.keeps_reference else None,
            entropies=logps,
            sequence=jnp.zeros(logps.shape, jnp.int32),
            sequences=4,
            rewards=logps,
        )
        return combine(loss, inputs, Terms.of(config), sequences=4)

    try_loss(stage, measure, tokens, tokens)
