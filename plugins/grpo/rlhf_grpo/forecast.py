"""What a GRPO stage would do, told before it is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlhf_core import POLICY_LOSS, PolicyInputs, data
from rlhf_core.config.warnings import config_warnings as shared_warnings
from rlhf_core.contracts import Forecast
from rlhf_core.mesh import rows_per_device
from rlhf_core.rollouts import forecast_rewards
from rlhf_core.sampling import slots_per_device
from rlhf_core.sampling.stop_strings import stop_table
from rlhf_core.training.forecast import training_memory
from rlhf_core.training.memory import cache_bytes, memory_forecast, scoring_bytes
from rlhf_core.training.open import open_prompts, open_records, open_rewards, require_model, try_loss
from rlhf_grpo.config_warnings import config_warnings
from rlhf_grpo.objective import Terms, combine

if TYPE_CHECKING:
    from rlhf_core import Stage
    from rlhf_core.rollouts import Reward
    from rlhf_grpo.config import GRPOConfig


def forecast(config: GRPOConfig, stage: Stage) -> Forecast:
    """What `run` would do, from the data and the model's config alone."""
    require_model(config, stage, head="lm")
    _try_loss(config, stage)
    count, longest, report, of_rewards = _prompts(
        config, stage, open_rewards(config.rewards, stage, weights=config.reward_weights)
    )
    rollouts = data.count_updates(count, config.prompts_per_rollout, config.num_train_epochs, None)
    total = config.max_training_steps or rollouts * config.updates_per_rollout
    completions = config.prompts_per_rollout * config.num_generations
    drawn = -(-total // config.updates_per_rollout) * completions
    more = config.dynamic_sampling
    lines = [
        report,
        f"a rollout is {config.prompts_per_rollout:,} prompts × {config.num_generations} "
        f"completions = {completions:,}"
        + (f", drawn up to {more.max_rounds} times (dynamic_sampling)" if more else ""),
        f"{'at most ' if more and config.max_training_steps is None else ''}"
        f"{total:,} updates of {config.total_batch_size:,} completions; a rollout serves {config.updates_per_rollout}; "
        f"{drawn // config.num_generations / count:.2f} epochs",
        f"{drawn:,} completions, at most {drawn * config.sampling.max_completion_length:,} sampled tokens",
    ]
    warnings: list[str] = []
    context = None
    length = config.sampling.max_completion_length
    group = longest + config.num_generations * length
    update_tokens = config.total_batch_size // config.num_generations * group
    memory = training_memory(config, stage, "lm", total, update_tokens, group)
    if memory is not None:
        definition, hf_config, parts = memory
        context = hf_config.get("max_position_embeddings")
        if config.keeps_reference:
            parts["reference"] = parts["gradients"]  # a copy of what is trained
        asked = rows_per_device(stage.planned_mesh, config.prompts_per_rollout)
        slots = slots_per_device(None, asked * config.num_generations)
        cache = cache_bytes(definition, slots, longest + length) + cache_bytes(definition, asked, longest)
        parts["rollout cache"] = cache
        if stage.planned_mesh is None:
            # Decoding joins projections, so that each token reads the weights in fewer pieces.
            parts["sampler"] = parts["parameters"]
            parts["reward models"] = _reward_models(config, stage, parts["parameters"])
        of_memory = memory_forecast(parts, config.dtype, stage.planned_mesh)
        lines += of_memory.lines
        warnings += of_memory.warnings
    warnings += of_rewards.warnings
    warnings += config_warnings(
        config,
        updates=total,
        context=context,
        longest_prompt=longest,
    )
    warnings += shared_warnings(config, total)
    return Forecast((*lines, *of_rewards.lines), tuple(warnings))


def _reward_models(config: GRPOConfig, stage: Stage, policy: int) -> int:
    """Bytes of the models that rewards read with `model = …`; one that is still to be made counts like the policy."""
    models = [reward.options.get("model") for reward in config.rewards]
    sizes = [
        scoring_bytes(model, stage.inputs.get("tokenizer"), stage.registry)
        for model in models
        if isinstance(model, str)
    ]
    return sum(policy if size is None else size for size in sizes)


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
        )
        return combine(loss, inputs, Terms.of(config), sequences=4)

    try_loss(stage, measure, tokens, tokens)


def _prompts(config: GRPOConfig, stage: Stage, rewards: Sequence[Reward]) -> tuple[int, int, str, Forecast]:
    """(how many, tokens of the longest, a line, of rewards): as used where the tokenizer is at hand, else all rows."""
    tokenizer = stage.inputs.get("tokenizer")
    for options in (config.sampling, config.evaluation_sampling):
        if tokenizer is not None and options.stop_strings:
            stop_table(options.stop_strings, tokenizer, len(tokenizer))
    if tokenizer is None:
        records = open_records(config, stage, "train_data")
        assert records is not None
        report = f"{len(records):,} prompts before length limits"
        return len(records), config.max_prompt_length, report, forecast_rewards(rewards, records, stage)
    longest = config.max_prompt_length
    held_out = open_prompts(config, stage, tokenizer, "eval_data", max_prompt_length=longest, needed=False)
    prompts = open_prompts(config, stage, tokenizer, "train_data", max_prompt_length=longest)
    for each in (held_out, prompts):
        if each is not None:
            of_rewards = forecast_rewards(rewards, each, stage)
    return len(prompts), max(map(len, prompts.ids)), str(prompts.report), of_rewards
