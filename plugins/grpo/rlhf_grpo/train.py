"""What a GRPO stage trains, on what, towards what."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlhf_core import ADVANTAGE, POLICY_LOSS, PolicyInputs
from rlhf_core.objective import trained_logps
from rlhf_core.rollouts import (
    FixedPrompts,
    RolloutOptions,
    RolloutUpdates,
    choose_rollout_rows,
    open_collector,
    open_previews,
)
from rlhf_core.training import Build, Context, Reference, open_rewards, python_trainer
from rlhf_grpo.config import GRPOConfig, watch
from rlhf_grpo.config_warnings import config_warnings
from rlhf_grpo.objective import Terms, combine, objective
from rlhf_grpo.updates import GRPOSteps, PolicyReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlhf_core import PolicyLoss, TrainState
    from rlhf_core.models import Model
    from rlhf_core.rollouts import Reward


def build(config: GRPOConfig, context: Context) -> Build:
    """Improve `config.model` on the prompts of `config.train_data`, by the rewards of its own completions."""
    registry, temperature = context.registry, config.sampling.temperature
    advantage = registry.get(ADVANTAGE, config.advantage.name, **config.advantage.options)
    loss = registry.get(POLICY_LOSS, config.loss.name, **config.loss.options)
    _try_loss(config, context, loss)
    model = context.model("lm")
    rewards = open_rewards(
        config.rewards, context.stage, weights=config.reward_weights, environment=config.environment
    )

    collector = open_collector(context, model, rewards, _sampled(config))
    assert collector is not None
    frozen, moves = config.frozen_parameters, config.sync_ref_model
    reference = Reference(model.params, frozen, context.mesh, moves=moves) if config.keeps_reference else None
    # Before the rows are chosen, which may change the model's attention: equal samplers then share programs.
    held_out = _held_out(config, context, model, rewards)
    model, layout = choose_rollout_rows(context, model, collector)
    logps = partial(trained_logps, model.definition, temperature=temperature, entropy=True)
    policies = PolicyReader(config, logps, reference, layout, context.mesh)
    context.ahead(policies.compile, model.params)
    steps = GRPOSteps(config, collector, advantage, policies, layout)
    updates = RolloutUpdates(
        context,
        collector,
        layout,
        steps,
        reference=reference,
        reading=policies.reading,
        completions_to_print=config.num_completions_to_print if config.log_completions else 0,
    )
    if held_out is not None:
        context.ahead(held_out.warm_up, model)
    positions, longest = model.hf_config.get("max_position_embeddings"), int(collector.prompts.sizes.max())
    context.warn(*config_warnings(config, updates=updates.total, context=positions, longest_prompt=longest))
    previewed = held_out or FixedPrompts(
        collector, len(collector.prompts), config.num_preview_samples, model.as_stored
    )
    return Build(
        model,
        updates,
        partial(
            objective,
            model.definition,
            loss,
            Terms.of(config),
            temperature=temperature,
            correction=config.sampler_correction,
        ),
        evaluate=None if held_out is None else held_out.evaluate,
        preview=previewed.preview,
        previews=open_previews(context, model),
        after_update=_reference_sync(config, context, reference) if moves and reference else None,
        after_update_steps=config.ref_model_sync_steps,
        stop_when=watch(config.limits),
        held={} if reference is None else {"reference": reference.copied},
    )


def _sampled(config: GRPOConfig) -> RolloutOptions:
    return RolloutOptions(
        config.max_prompt_length,
        config.num_generations,
        config.sampling,
        config.prompts_per_rollout,
        config.updates_per_rollout,
        max_rounds=config.dynamic_sampling.max_rounds if config.dynamic_sampling else 1,
        sampler=config.sampler,
        environment=config.environment,
    )


def _held_out(
    config: GRPOConfig, context: Context, model: Model, rewards: list[Reward]
) -> FixedPrompts | None:
    """Open the prompts of `eval_data`, with a sampler of their own; None without."""
    own = config.evaluation
    size = config.eval_batch_size or max(config.total_batch_size // own.num_generations, 1)
    options = RolloutOptions(
        config.max_prompt_length,
        own.num_generations,
        config.evaluation_sampling,
        size,
        sampler=config.sampler,
        environment=config.environment,
    )
    collector = open_collector(context, model, rewards, options, "eval_data")
    if collector is None:
        return None
    count, steps = len(collector.prompts), config.max_evaluation_steps
    count = count if steps is None else min(count, size * steps)
    return FixedPrompts(collector, count, config.num_preview_samples, model.as_stored, own.pass_threshold)


def _reference_sync(
    config: GRPOConfig, context: Context, reference: Reference
) -> Callable[[int, TrainState], None]:
    """Return what moves the reference towards the policy; the loop calls it every `ref_model_sync_steps` updates."""
    share = config.ref_model_mixup_alpha
    context.ahead(reference.compile, share)  # now rather than between two updates
    return lambda _, state: reference.move(state.params, share)


def _try_loss(config: GRPOConfig, context: Context, loss: PolicyLoss) -> None:
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

    context.try_loss(measure, tokens, tokens)


GRPOTrainer = python_trainer("grpo", GRPOConfig, __name__)
