"""Forecast a GRPO stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlhf_core import POLICY_LOSS, PolicyInputs
from rlhf_core.rollouts import forecast_rollouts
from rlhf_core.training import try_loss
from rlhf_grpo.config_warnings import config_warnings
from rlhf_grpo.objective import Terms, combine

if TYPE_CHECKING:
    from rlhf_core import Forecast, Stage
    from rlhf_grpo.config import GRPOConfig


def forecast(config: GRPOConfig, stage: Stage) -> Forecast:
    """Forecast `run` from the data and the model's config alone."""
    _try_loss(config, stage)
    return forecast_rollouts(
        config,
        stage,
        rewards=config.rewards,
        reward_weights=config.reward_weights,
        max_prompt_length=config.max_prompt_length,
        num_generations=config.num_generations,
        sampling=config.sampling,
        evaluation_sampling=config.evaluation_sampling,
        updates_per_rollout=config.updates_per_rollout,
        minibatches=config.steps_per_generation,
        max_rounds=config.dynamic_sampling.max_rounds if config.dynamic_sampling else 1,
        copies=("reference",) if config.keeps_reference else (),
        warn=lambda updates, positions, longest: config_warnings(
            config, updates=updates, context=positions, longest_prompt=longest
        ),
    )


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
