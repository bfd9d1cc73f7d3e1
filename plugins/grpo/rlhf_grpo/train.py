"""One GRPO stage, top to bottom."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core import ADVANTAGE, POLICY_LOSS, artifacts, optimizers
from rlhf_core.errors import RunError
from rlhf_core.fit import fit
from rlhf_core.rollouts import check_columns, set_up
from rlhf_core.stage.alone import Result, door_inputs, run_alone
from rlhf_core.state import create_state, fixed_parameters
from rlhf_core.training.attention import with_attention
from rlhf_core.training.open import (
    open_model,
    open_prompts,
    open_rewards,
    open_sampler,
    require_known,
    warm_up,
)
from rlhf_grpo.config import GRPOConfig, watch
from rlhf_grpo.config_warnings import advise
from rlhf_grpo.evaluation import FixedPrompts
from rlhf_grpo.feed import RolloutFeed
from rlhf_grpo.minibatches import group_layout, longest_groups
from rlhf_grpo.objective import Terms, objective, reader
from rlhf_grpo.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlhf_core import Stage, TrainState
    from rlhf_core.models import Model
    from rlhf_core.rollouts import Reward


def run(config: GRPOConfig, stage: Stage) -> None:
    """Improve `config.model` on the prompts of `config.train_data` and save the artifact `model`."""
    registry, temperature = stage.registry, config.sampling.temperature
    model = open_model(config, stage, head="lm")
    longest = config.max_prompt_length
    prompts = open_prompts(config, stage, model.tokenizer, "train_data", max_prompt_length=longest)
    require_known(prompts, model.definition.vocab_size)
    rewards = open_rewards(config.rewards, stage, weights=config.reward_weights)
    set_up(rewards, prompts, stage)
    loss = registry.get(POLICY_LOSS, config.loss.name, **config.loss.options)
    terms = Terms.of(config)
    fixed = fixed_parameters(model.params, config.frozen_parameters)
    reference = Reference(model.params, fixed, stage.devices()) if config.keeps_reference else None
    sampler = open_sampler(
        stage,
        model,
        prompts,
        config.sampling,
        num_generations=config.num_generations,
        prompts_per_call=config.prompts_per_rollout,
        sampler=config.sampler,
    )
    sizes = np.array([len(ids) for ids in prompts.ids])
    warm_up(sampler, model, prompts.ids)
    layout = group_layout(config, sizes, model.definition.hidden_size, stage.devices())
    model = with_attention(model, config, stage, longest_groups(config, sizes), layout)
    held_out = _held_out(config, stage, model, rewards)
    asked = held_out or FixedPrompts(
        stage,
        sampler,
        prompts,
        model.tokenizer,
        rewards,
        config.num_generations,
        count=len(prompts),
        shown=config.num_preview_samples,
        stop_ids=config.sampling.stop_token_ids,
        stored=model.as_stored,
    )
    feed = RolloutFeed(
        stage,
        config,
        prompts,
        model.tokenizer,
        sampler,
        rewards,
        registry.get(ADVANTAGE, config.advantage.name, **config.advantage.options),
        reader(model.definition, temperature=temperature),
        layout,
        reference,
        POLICY_LOSS.attribute(loss, "aggregation"),
        asked.preview,
    )
    feed.compile(model.params)
    if held_out is not None:
        warm_up(held_out.sampler, model, held_out.prompts.ids[: held_out.count])
    if stage.is_main:
        context = model.hf_config.get("max_position_embeddings")
        for line in advise(
            config,
            updates=feed.total,
            context=context,
            longest_prompt=int(sizes.max()),
        ):
            warnings.warn(f"stage '{stage.name}'.{line}", stacklevel=2)
    tx, schedule = optimizers.make_optimizer(config, registry, feed.total)
    fitted = fit(
        stage,
        config,
        create_state(model, tx, seed=stage.seed, frozen=config.frozen_parameters),
        objective(
            model.definition, loss, terms, temperature=temperature, correction=config.sampler_correction
        ),
        feed,
        schedule=schedule,
        evaluate=None if held_out is None else held_out.evaluate,
        after_update=_reference_sync(config, reference) if config.sync_ref_model and reference else None,
        after_update_steps=config.ref_model_sync_steps,
        stop_when=watch(config.limits),
    )
    if held_out is None:
        _last_preview(asked, fitted.state, stage)
    artifacts.save_model(stage, "model", "language_model", model.with_params(fitted.state.params))


def _held_out(config: GRPOConfig, stage: Stage, model: Model, rewards: list[Reward]) -> FixedPrompts | None:
    """The prompts of `eval_data`; None without."""
    longest = config.max_prompt_length
    prompts = open_prompts(
        config, stage, model.tokenizer, "eval_data", max_prompt_length=longest, needed=False
    )
    if prompts is None:
        return None
    require_known(prompts, model.definition.vocab_size)
    check_columns(rewards, prompts, stage)
    own = config.evaluation
    size = config.eval_batch_size or max(config.total_batch_size // own.num_generations, 1)
    steps = config.max_evaluation_steps
    count = min(len(prompts), size * steps if steps is not None else len(prompts))
    return FixedPrompts(
        stage,
        open_sampler(
            stage,
            model,
            prompts,
            config.evaluation_sampling,
            num_generations=own.num_generations,
            prompts_per_call=min(size, count),
            sampler=config.sampler,
        ),
        prompts,
        model.tokenizer,
        rewards,
        own.num_generations,
        count=count,
        shown=config.num_preview_samples,
        stored=model.as_stored,
        pass_threshold=own.pass_threshold,
        stop_ids=config.evaluation_sampling.stop_token_ids,
    )


def _last_preview(asked: FixedPrompts, state: TrainState, stage: Stage) -> None:
    """A reward that fails now must not cost the trained model."""
    try:
        asked.preview(int(state.step), state)
    except RunError as error:
        warnings.warn(
            f"stage '{stage.name}': completions after training were not kept: {error}", stacklevel=2
        )


def _reference_sync(config: GRPOConfig, reference: Reference) -> Callable[[int, TrainState], None]:
    """Move the reference towards the policy whenever the loop calls, every `ref_model_sync_steps` updates."""
    share = config.ref_model_mixup_alpha
    reference.compile(reference.params, share)  # now rather than between two updates
    return lambda _, state: reference.move(state.params, share)


class GRPOTrainer:
    """The Python door: `GRPOTrainer(config, model=…, rewards=[…], train_dataset=rows).train()`."""

    def __init__(self, config: GRPOConfig | None = None, **inputs: Any) -> None:
        """inputs: `model`, `rewards` (callables, registered names, reward model directories), `train_dataset`,
        `eval_dataset`, `tokenizer`, `callbacks`; `args`, `arguments`, `processing_class` and `reward_funcs` too.
        """
        self.config, self.inputs = door_inputs(GRPOConfig, config, inputs)

    def train(self) -> Result:
        """Train; returns the artifact and the last metrics."""
        return run_alone("grpo", self.config, **self.inputs)
