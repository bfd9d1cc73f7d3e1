"""Open the prompts of a stage that samples; where it is only checked, count what will be sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core import data
from rlhf_core.errors import counted
from rlhf_core.mesh import rows_per_device
from rlhf_core.rewards.checks import forecast_rewards
from rlhf_core.rollouts.environment import forecast_episodes
from rlhf_core.sampling.placement import cache_bytes, most_slots, shares_prompts
from rlhf_core.sampling.stop_strings import stop_table
from rlhf_core.tokenizer import special_ids
from rlhf_core.training.context import Context, Expected, require_stop_token
from rlhf_core.training.memory import scoring_bytes

if TYPE_CHECKING:
    from rlhf_core.contracts import Forecast
    from rlhf_core.data import EpisodeRows, Prompts
    from rlhf_core.models import Definition
    from rlhf_core.rewards.reward import Reward
    from rlhf_core.rollouts.collector import RolloutOptions

ROW_PER_TURN = (
    'environment.history="encoded_again": every turn is a training row with everything before it; this is slower, '
    "and losses that average over a sequence average over a turn"
)


def open_rollout_prompts(
    context: Context, rewards: Sequence[Reward], options: RolloutOptions, field: str
) -> Prompts | EpisodeRows | None:
    """Open the prompts of `train_data`, or of `eval_data`, which may not be given: None.

    In a stage that is only checked, also add to `context.expected` what its rollouts will be. rewards: are then called
    with made-up completions, and the environment's first episode is begun, unless their options say otherwise.
    """
    config, stage, needed = context.config, context.stage, field == "train_data"
    length, environment, tokenizer = options.max_prompt_length, options.environment, context.tokenizer
    if context.shapes and tokenizer is not None:
        _check_stops(context, options)
    if environment is not None:
        rows = context.episode_rows(field, length)
        if context.shapes and needed:
            assert rows is not None
            of_rewards = _told(context, forecast_rewards(rewards, rows, stage, field))
            turn = options.sampling.max_completion_length
            lines = forecast_episodes(environment, config, stage, rows, tokenizer, max_completion_length=turn)
            context.warn(*((ROW_PER_TURN,) if environment.history == "encoded_again" else ()))
            later = [*lines[1:], *of_rewards.lines]
            _expect(context, options, (len(rows), length), lines[0], later)
        return rows
    if tokenizer is None:
        records = context.records(field)
        if records is not None and needed:
            of_rewards = _told(context, forecast_rewards(rewards, records, stage, field))
            report = f"{counted(len(records), 'prompts')} before length limits"
            _expect(context, options, (len(records), length), report, of_rewards.lines)
        return None
    prompts = context.prompts(field, length)
    if context.shapes and prompts is not None:
        of_rewards = forecast_rewards(rewards, prompts, stage, field)
        if needed:
            longest = max(map(len, prompts.ids))
            _told(context, of_rewards)
            _expect(context, options, (len(prompts), longest), str(prompts.report), of_rewards.lines)
    return prompts


def _check_stops(context: Context, options: RolloutOptions) -> None:
    """Raise InputError where no token could end a completion, or a text that ends one cannot be recognised."""
    tokenizer, sampling = context.tokenizer, options.sampling
    ends = special_ids(tokenizer, context.config.chat_template).eos
    require_stop_token(ends, sampling, context.name)
    if sampling.stop_strings:
        stop_table(sampling.stop_strings, tokenizer, len(tokenizer))


def _told(context: Context, forecast: Forecast) -> Forecast:
    context.warn(*forecast.warnings)
    return forecast


def _expect(
    context: Context, options: RolloutOptions, prompts: tuple[int, int], report: str, later: Sequence[str]
) -> None:
    """Count completions, updates and tokens. prompts: how many, and the tokens of the longest."""
    config, rounds, group = context.config, options.max_rounds, options.num_generations
    (count, longest), environment = prompts, options.environment
    length = options.sampling.max_completion_length
    length = length if environment is None else environment.length(length)
    per_rollout, serves = options.prompts_per_rollout, options.updates_per_rollout
    rollouts = data.count_updates(count, per_rollout, config.num_train_epochs, None)
    total = config.max_training_steps or rollouts * serves
    sampled = -(-total // serves) * per_rollout * group
    lines = [
        report,
        f"a rollout is {counted(per_rollout, 'prompts')} × {counted(group, 'completions')} = {per_rollout * group:,}"
        + (f", drawn up to {rounds} times (dynamic_sampling)" if rounds > 1 else ""),
        f"{'at most ' if rounds > 1 and config.max_training_steps is None else ''}"
        f"{counted(total, 'updates')} of {counted(config.total_batch_size, 'completions')}; a rollout serves {serves}; "
        f"{sampled // group / count:.2f} epochs",
        f"{counted(sampled, 'completions')}, at most {sampled * length:,} sampled tokens"
        + ("" if environment is None else ", the environment's included"),
    ]

    def held(definition: Definition, parameters: int) -> Mapping[str, int]:
        slots = min(rows_per_device(context.mesh, per_rollout) * group, most_slots(None))
        prompts = rows_per_device(context.mesh, per_rollout)
        whole = shares_prompts(definition) and slots == prompts * group
        own = length if whole else longest + length
        cache = cache_bytes(definition, slots, own) + cache_bytes(definition, prompts, longest)
        if context.planned is not None:
            return {"rollout cache": cache}
        # Decoding joins projections, so that each token reads the weights in fewer pieces.
        models = _reward_models(context, parameters)
        return {"rollout cache": cache, "sampler": parameters, "reward models": models}

    row = longest + group * length
    per_update = config.total_batch_size // group * row
    context.expect(Expected(lines, total, per_update, row, later, held, options))


def _reward_models(context: Context, policy: int) -> int:
    """Sum the bytes of the models that rewards read; one that does not exist yet counts as the policy."""
    rewards: Any = getattr(context.config, "rewards", ())
    models = [reward.options.get("model") for reward in rewards]
    sizes = [
        scoring_bytes(model, context.tokenizer, context.registry)
        for model in models
        if isinstance(model, str)
    ]
    return sum(policy if size is None else size for size in sizes)
