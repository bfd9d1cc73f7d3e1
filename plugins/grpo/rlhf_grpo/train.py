"""One GRPO stage, top to bottom."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING

from rlhf_core import ADVANTAGE, POLICY_LOSS, create_state
from rlhf_core.artifacts import save_model
from rlhf_core.fit import fit
from rlhf_core.objective import trained_logps
from rlhf_core.optimizers import make_optimizer
from rlhf_core.rollouts import FixedPrompts, choose_rollout_rows, open_collector
from rlhf_core.training import Reference, open_model, open_rewards, python_trainer
from rlhf_grpo.config import GRPOConfig, watch
from rlhf_grpo.config_warnings import config_warnings
from rlhf_grpo.objective import Terms, objective
from rlhf_grpo.policies import PolicyReader
from rlhf_grpo.updates import GRPOUpdates

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlhf_core import Stage, TrainState
    from rlhf_core.models import Model
    from rlhf_core.rollouts import Reward


def run(config: GRPOConfig, stage: Stage) -> None:
    """Improve `config.model` on the prompts of `config.train_data` and save the artifact `model`."""
    registry, mesh, temperature = stage.registry, stage.devices(), config.sampling.temperature
    model = open_model(config, stage, head="lm")
    rewards = open_rewards(
        config.rewards, stage, weights=config.reward_weights, environment=config.environment
    )
    advantage = registry.get(ADVANTAGE, config.advantage.name, **config.advantage.options)
    loss = registry.get(POLICY_LOSS, config.loss.name, **config.loss.options)

    reference = Reference(model.params, config.frozen_parameters, mesh) if config.keeps_reference else None
    collector = open_collector(
        config,
        stage,
        model,
        rewards,
        max_prompt_length=config.max_prompt_length,
        num_generations=config.num_generations,
        sampling=config.sampling,
        prompts_per_call=config.prompts_per_rollout,
        sampler=config.sampler,
        max_rounds=config.dynamic_sampling.max_rounds if config.dynamic_sampling else 1,
        environment=config.environment,
    )
    assert collector is not None
    # Before the rows are chosen, which may change the model's attention: equal samplers then share programs.
    held_out = _held_out(config, stage, model, rewards)
    model, layout = choose_rollout_rows(model, config, stage, collector)
    logps = partial(trained_logps, model.definition, temperature=temperature, entropy=True)
    policies = PolicyReader(config, logps, reference, layout, mesh)
    policies.compile(model.params)
    aggregation = POLICY_LOSS.attribute(loss, "aggregation")
    updates = GRPOUpdates(stage, config, collector, advantage, policies, layout, aggregation)
    if held_out is not None:
        held_out.warm_up(model)
    _warn(config, stage, model, updates)

    tx, schedule = make_optimizer(config, registry, updates.total)
    previewed = held_out or FixedPrompts(
        collector, len(collector.prompts), config.num_preview_samples, model.as_stored
    )
    fitted = fit(
        stage,
        config,
        create_state(model, tx, seed=stage.seed, frozen=config.frozen_parameters),
        partial(
            objective,
            model.definition,
            loss,
            Terms.of(config),
            temperature=temperature,
            correction=config.sampler_correction,
        ),
        updates,
        schedule=schedule,
        evaluate=None if held_out is None else held_out.evaluate,
        preview=previewed.preview,
        after_update=_reference_sync(config, reference) if config.sync_ref_model and reference else None,
        after_update_steps=config.ref_model_sync_steps,
        stop_when=watch(config.limits),
    )
    save_model(stage, "model", "language_model", model.with_params(fitted.state.params))


def _held_out(config: GRPOConfig, stage: Stage, model: Model, rewards: list[Reward]) -> FixedPrompts | None:
    """Open the prompts of `eval_data`, with a sampler of their own; None without."""
    options = config.evaluation
    size = config.eval_batch_size or max(config.total_batch_size // options.num_generations, 1)
    collector = open_collector(
        config,
        stage,
        model,
        rewards,
        "eval_data",
        max_prompt_length=config.max_prompt_length,
        num_generations=options.num_generations,
        sampling=config.evaluation_sampling,
        prompts_per_call=size,
        sampler=config.sampler,
        environment=config.environment,
    )
    if collector is None:
        return None
    count, steps = len(collector.prompts), config.max_evaluation_steps
    count = count if steps is None else min(count, size * steps)
    return FixedPrompts(collector, count, config.num_preview_samples, model.as_stored, options.pass_threshold)


def _warn(config: GRPOConfig, stage: Stage, model: Model, updates: GRPOUpdates) -> None:
    context = model.hf_config.get("max_position_embeddings")
    longest = int(updates.prompts.sizes.max())
    lines = config_warnings(config, updates=updates.total, context=context, longest_prompt=longest)
    for line in lines if stage.is_main else ():
        warnings.warn(f"stage '{stage.name}'.{line}", stacklevel=3)


def _reference_sync(config: GRPOConfig, reference: Reference) -> Callable[[int, TrainState], None]:
    """Return what moves the reference towards the policy; the loop calls it every `ref_model_sync_steps` updates."""
    share = config.ref_model_mixup_alpha
    reference.compile(share)  # now rather than between two updates
    return lambda _, state: reference.move(state.params, share)


GRPOTrainer = python_trainer("grpo", GRPOConfig, __name__)
