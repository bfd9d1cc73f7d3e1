"""One GRPO stage, top to bottom."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np

from rlhf_core import ADVANTAGE, POLICY_LOSS, artifacts, optimizers
from rlhf_core.fit import fit
from rlhf_core.rollouts import FixedPrompts, RolloutCollector
from rlhf_core.state import create_state, fixed_parameters
from rlhf_core.training.attention import choose_attention
from rlhf_core.training.open import (
    open_model,
    open_prompts,
    open_rewards,
    open_sampler,
    require_vocabulary,
    warm_up,
)
from rlhf_core.training.python import python_trainer
from rlhf_grpo.config import GRPOConfig, watch
from rlhf_grpo.config_warnings import config_warnings
from rlhf_grpo.minibatches import group_layout, longest_groups
from rlhf_grpo.objective import Terms, objective, reader
from rlhf_grpo.policies import PolicyReader, Reference
from rlhf_grpo.updates import GRPOUpdates

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlhf_core import Stage, TrainState
    from rlhf_core.data import Prompts
    from rlhf_core.models import Model
    from rlhf_core.rollouts import Reward


def run(config: GRPOConfig, stage: Stage) -> None:
    """Improve `config.model` on the prompts of `config.train_data` and save the artifact `model`."""
    registry, mesh, temperature = stage.registry, stage.devices(), config.sampling.temperature
    model = open_model(config, stage, head="lm")
    prompts = open_prompts(
        config, stage, model.tokenizer, "train_data", max_prompt_length=config.max_prompt_length
    )
    require_vocabulary(prompts, model.definition.vocab_size)
    rewards = open_rewards(config.rewards, stage, weights=config.reward_weights)
    advantage = registry.get(ADVANTAGE, config.advantage.name, **config.advantage.options)
    loss = registry.get(POLICY_LOSS, config.loss.name, **config.loss.options)

    fixed = fixed_parameters(model.params, config.frozen_parameters)
    reference = Reference(model.params, fixed, mesh) if config.keeps_reference else None
    collector = _collector(config, stage, model, prompts, rewards)
    sizes = np.array([len(ids) for ids in prompts.ids])
    layout = group_layout(config, sizes, model.definition.hidden_size, mesh)
    model = choose_attention(model, config, stage, longest_groups(config, sizes), layout)
    held_out = _held_out(config, stage, model, rewards)
    policies = PolicyReader(
        config, reader(model.definition, temperature=temperature), reference, model.params, mesh
    )
    aggregation = POLICY_LOSS.attribute(loss, "aggregation")
    updates = GRPOUpdates(stage, config, collector, advantage, policies, layout, aggregation)
    if held_out is not None:
        warm_up(held_out.collector.sampler, model, held_out.collector.prompts.ids[: held_out.count])
    _warn(config, stage, model, updates.total, int(sizes.max()))

    tx, schedule = optimizers.make_optimizer(config, registry, updates.total)
    shown = held_out or FixedPrompts(collector, len(prompts), config.num_preview_samples, model.as_stored)
    fitted = fit(
        stage,
        config,
        create_state(model, tx, seed=stage.seed, frozen=config.frozen_parameters),
        objective(
            model.definition,
            loss,
            Terms.of(config),
            temperature=temperature,
            correction=config.sampler_correction,
        ),
        updates,
        schedule=schedule,
        evaluate=None if held_out is None else held_out.evaluate,
        preview=shown.preview,
        after_update=_reference_sync(config, reference) if config.sync_ref_model and reference else None,
        after_update_steps=config.ref_model_sync_steps,
        stop_when=watch(config.limits),
    )
    artifacts.save_model(stage, "model", "language_model", model.with_params(fitted.state.params))


def _collector(
    config: GRPOConfig, stage: Stage, model: Model, prompts: Prompts, rewards: list[Reward]
) -> RolloutCollector:
    """Open the sampler, which starts to compile, and the rewards, which load their weights meanwhile."""
    sampler = open_sampler(
        stage,
        model,
        prompts,
        config.sampling,
        num_generations=config.num_generations,
        prompts_per_call=config.prompts_per_rollout,
        sampler=config.sampler,
    )
    warm_up(sampler, model, prompts.ids)
    return RolloutCollector(
        stage,
        prompts,
        model.tokenizer,
        sampler,
        rewards,
        config.num_generations,
        max_rounds=config.dynamic_sampling.max_rounds if config.dynamic_sampling else 1,
        stop_ids=config.sampling.stop_token_ids,
    )


def _held_out(config: GRPOConfig, stage: Stage, model: Model, rewards: list[Reward]) -> FixedPrompts | None:
    """Open the prompts of `eval_data`, with a sampler of their own; None without."""
    longest, options = config.max_prompt_length, config.evaluation
    prompts = open_prompts(
        config, stage, model.tokenizer, "eval_data", max_prompt_length=longest, needed=False
    )
    if prompts is None:
        return None
    require_vocabulary(prompts, model.definition.vocab_size)
    size = config.eval_batch_size or max(config.total_batch_size // options.num_generations, 1)
    steps = config.max_evaluation_steps
    count = min(len(prompts), size * steps if steps is not None else len(prompts))
    sampler = open_sampler(
        stage,
        model,
        prompts,
        config.evaluation_sampling,
        num_generations=options.num_generations,
        prompts_per_call=min(size, count),
        sampler=config.sampler,
    )
    stop_ids = config.evaluation_sampling.stop_token_ids
    collector = RolloutCollector(
        stage, prompts, model.tokenizer, sampler, rewards, options.num_generations, stop_ids=stop_ids
    )
    return FixedPrompts(collector, count, config.num_preview_samples, model.as_stored, options.pass_threshold)


def _warn(config: GRPOConfig, stage: Stage, model: Model, updates: int, longest_prompt: int) -> None:
    context = model.hf_config.get("max_position_embeddings")
    lines = config_warnings(config, updates=updates, context=context, longest_prompt=longest_prompt)
    for line in lines if stage.is_main else ():
        warnings.warn(f"stage '{stage.name}'.{line}", stacklevel=3)


def _reference_sync(config: GRPOConfig, reference: Reference) -> Callable[[int, TrainState], None]:
    """Return what moves the reference towards the policy; the loop calls it every `ref_model_sync_steps` updates."""
    share = config.ref_model_mixup_alpha
    reference.compile(reference.params, share)  # now rather than between two updates
    return lambda _, state: reference.move(state.params, share)


GRPOTrainer = python_trainer("grpo", GRPOConfig, __name__)
