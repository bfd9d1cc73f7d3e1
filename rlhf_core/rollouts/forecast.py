"""Forecast a stage that samples, from its data and the shapes of its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core import data
from rlhf_core.config.warnings import batch_warnings, config_warnings
from rlhf_core.contracts import Forecast
from rlhf_core.mesh import rows_per_device
from rlhf_core.rewards.checks import forecast_rewards
from rlhf_core.rewards.reward import open_rewards
from rlhf_core.rollouts.episodes import forecast_episodes
from rlhf_core.rollouts.layout import require_whole_groups
from rlhf_core.rollouts.warnings import system_prompt_warnings
from rlhf_core.sampling.placement import cache_bytes, most_slots, shares_prompts
from rlhf_core.sampling.stop_strings import stop_table
from rlhf_core.tokenizer import special_ids
from rlhf_core.training.forecast import training_memory
from rlhf_core.training.memory import frozen_bytes, memory_forecast, scoring_bytes
from rlhf_core.training.open import (
    default_warnings,
    open_episode_rows,
    open_prompts,
    open_records,
    require_model,
    require_stop_token,
)

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.environments import EnvironmentOptions
    from rlhf_core.rewards.reward import Reward, WeightedReward
    from rlhf_core.sampling import SamplingOptions
    from rlhf_core.stage import Stage

ROW_PER_TURN = (
    'environment.history="encoded_again": every turn is a training row with all that was said before it, which takes '
    "longer, and what a loss averages over a sequence it averages over a turn"
)


def forecast_rollouts(
    config: TrainerConfig,
    stage: Stage,
    *,
    rewards: Sequence[WeightedReward] | None,
    max_prompt_length: int,
    num_generations: int,
    sampling: SamplingOptions,
    evaluation_sampling: SamplingOptions | None = None,
    updates_per_rollout: int = 1,
    minibatches: int = 1,
    max_rounds: int = 1,
    reward_weights: Sequence[float] | None = None,
    copies: Sequence[str] = (),
    warn: Callable[[int, Any, int], Sequence[str]] | None = None,
    environment: EnvironmentOptions | None = None,
    frozen_models: Mapping[str, Any] = {},
) -> Forecast:
    """Forecast prompts, completions, updates, tokens and memory, what rewards will do, and the config's warnings.

    `config.total_batch_size` counts completions per update; a rollout has `minibatches` times as many and serves
    updates_per_rollout. rewards: None where completions are not scored. copies: names of copies of the trained
    parameters, such as "reference". warn: (updates, the model's positions or None, tokens of the longest prompt) →
    warnings of the trainer's own. environment: of the stage's episodes, one of which is begun, and takes a made-up
    turn, unless its options say otherwise. frozen_models: {name: directory, hub name or table} of models that are read
    beside the one that is trained, such as a teacher.
    """
    require_whole_groups(config, stage, num_generations)
    require_model(config, stage, head="lm")
    functions = (
        []
        if rewards is None
        else open_rewards(rewards, stage, weights=reward_weights, environment=environment)
    )
    tokenizer = stage.inputs.get("tokenizer")
    if tokenizer is not None:
        require_stop_token(special_ids(tokenizer, config.chat_template).eos, sampling, stage)
    for options in (sampling, evaluation_sampling):
        if tokenizer is not None and options is not None and options.stop_strings:
            stop_table(options.stop_strings, tokenizer, len(tokenizer))
    length = sampling.max_completion_length
    count, longest, report, of_rewards = _prompts(
        config, stage, functions, max_prompt_length, environment, length
    )
    length = length if environment is None else environment.length(length)
    per_rollout = config.total_batch_size * minibatches // num_generations
    rollouts = data.count_updates(count, per_rollout, config.num_train_epochs, None)
    total = config.max_training_steps or rollouts * updates_per_rollout
    sampled = -(-total // updates_per_rollout) * per_rollout * num_generations
    lines = [
        report,
        f"a rollout is {per_rollout:,} prompts × {num_generations} completions = {per_rollout * num_generations:,}"
        + (f", drawn up to {max_rounds} times (dynamic_sampling)" if max_rounds > 1 else ""),
        f"{'at most ' if max_rounds > 1 and config.max_training_steps is None else ''}"
        f"{total:,} updates of {config.total_batch_size:,} completions; a rollout serves {updates_per_rollout}; "
        f"{sampled // num_generations / count:.2f} epochs",
        f"{sampled:,} completions, at most {sampled * length:,} sampled tokens"
        + ("" if environment is None else ", the environment's included"),
    ]
    warnings: list[str] = []
    positions = None
    group = longest + num_generations * length
    update_tokens = config.total_batch_size // num_generations * group
    memory = training_memory(config, stage, "lm", total, update_tokens, group)
    if memory is not None:
        definition, hf_config, parts = memory
        positions = hf_config.get("max_position_embeddings")
        for name in copies:
            parts[name] = parts["gradients"]  # as large as what is trained
        parts |= frozen_bytes(frozen_models, config, stage, parts["parameters"])
        prompts = rows_per_device(stage.planned_mesh, per_rollout)
        slots = min(prompts * num_generations, most_slots(None))
        own = (
            length if shares_prompts(definition) and slots == prompts * num_generations else longest + length
        )
        cache = cache_bytes(definition, slots, own) + cache_bytes(definition, prompts, longest)
        parts["rollout cache"] = cache
        if stage.planned_mesh is None:
            # Decoding joins projections, so that each token reads the weights in fewer pieces.
            parts["sampler"] = parts["parameters"]
            parts["reward models"] = _reward_models(rewards or (), stage, parts["parameters"])
        of_memory = memory_forecast(parts, config.dtype, stage.planned_mesh)
        lines += of_memory.lines
        warnings += of_memory.warnings
    warnings += of_rewards.warnings
    warnings += [] if warn is None else warn(total, positions, longest)
    warnings += system_prompt_warnings(config, functions, stage)
    warnings += default_warnings(config, stage)
    warnings += batch_warnings(
        config, count, prompts_per_rollout=per_rollout, num_generations=num_generations
    )
    warnings += config_warnings(config, total)
    return Forecast((*lines, *of_rewards.lines), tuple(warnings))


def _reward_models(rewards: Sequence[WeightedReward], stage: Stage, policy: int) -> int:
    """Sum the bytes of the models that rewards read; one that does not exist yet counts as the policy."""
    models = [reward.options.get("model") for reward in rewards]
    sizes = [
        scoring_bytes(model, stage.inputs.get("tokenizer"), stage.registry)
        for model in models
        if isinstance(model, str)
    ]
    return sum(policy if size is None else size for size in sizes)


def _prompts(
    config: TrainerConfig,
    stage: Stage,
    rewards: Sequence[Reward],
    max_prompt_length: int,
    environment: EnvironmentOptions | None,
    max_completion_length: int,
) -> tuple[int, int, str, Forecast]:
    """Return the number of prompts, tokens of the longest, a line about them, and the rewards' forecast.

    Without the model's tokenizer rows are counted, not tokenised.
    """
    tokenizer = stage.inputs.get("tokenizer")
    if environment is not None:
        rows = open_episode_rows(config, stage, "train_data", max_prompt_length=max_prompt_length)
        open_episode_rows(config, stage, "eval_data", max_prompt_length=max_prompt_length, needed=False)
        assert rows is not None
        of_rewards = forecast_rewards(rewards, rows, stage)
        lines = forecast_episodes(
            environment, config, stage, rows, tokenizer, max_completion_length=max_completion_length
        )
        again = environment.history == "encoded_again"
        cautions = (*of_rewards.warnings, *((ROW_PER_TURN,) if again else ()))
        return len(rows), max_prompt_length, lines[0], Forecast((*lines[1:], *of_rewards.lines), cautions)
    if tokenizer is None:
        records = open_records(config, stage, "train_data")
        assert records is not None
        report = f"{len(records):,} prompts before length limits"
        return len(records), max_prompt_length, report, forecast_rewards(rewards, records, stage)
    held_out = open_prompts(
        config, stage, tokenizer, "eval_data", max_prompt_length=max_prompt_length, needed=False
    )
    prompts = open_prompts(config, stage, tokenizer, "train_data", max_prompt_length=max_prompt_length)
    report = str(prompts.report)
    if held_out is not None:
        forecast_rewards(rewards, held_out, stage)
        if not held_out.report.all_as_given:
            report += f"; eval_data: {held_out.report}"
    of_rewards = forecast_rewards(rewards, prompts, stage)
    return len(prompts), max(map(len, prompts.ids)), report, of_rewards
