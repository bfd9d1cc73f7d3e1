"""Open what a stage samples from: prompts, a sampler, an environment; in a check, count what will be sampled."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core import artifacts, data
from rlhf_core.config import Component
from rlhf_core.contracts import SAMPLER, SamplerInputs
from rlhf_core.data import Prompts, PromptStream, require_vocabulary
from rlhf_core.data.prompts import AnyPrompts
from rlhf_core.errors import InputError, counted
from rlhf_core.mesh import rows_per_device
from rlhf_core.models.experts import route_shape
from rlhf_core.rewards.checks import forecast_rewards, set_up
from rlhf_core.rollouts.collector import RolloutCollector, RolloutOptions
from rlhf_core.rollouts.environment import forecast_episodes, open_environment
from rlhf_core.rollouts.journal import most_bytes
from rlhf_core.runtime.peak_memory import format_bytes
from rlhf_core.sampling.placement import cache_bytes, most_slots, shares_prompts
from rlhf_core.sampling.stop_strings import stop_table
from rlhf_core.tokenizer import special_ids
from rlhf_core.training.context import Context
from rlhf_core.training.expected import Expected
from rlhf_core.training.memory import sampling_memory, scoring_bytes
from rlhf_core.training.starting_model import error_context, require_stop_token

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.contracts import Forecast
    from rlhf_core.environments import EpisodeSettings
    from rlhf_core.models import Definition, Model
    from rlhf_core.rewards.reward import Reward
    from rlhf_core.stage import Stage

ROW_PER_TURN = (
    'environment.history="encoded_again": every turn is a training row with everything before it; this is slower, '
    "and losses that average over a sequence average over a turn"
)


def open_collector(
    context: Context,
    model: Model,
    rewards: Sequence[Reward],
    options: RolloutOptions,
    field: str = "train_data",
    *,
    others: Sequence[Model] = (),
) -> RolloutCollector | None:
    """Open the prompts of a field and a sampler, which starts to compile, while the rewards load their weights.

    rewards: begin with the environment's. others: other models in memory, besides the policy and the rewards,
    such as a teacher. Returns None for `eval_data` that is not given; a stage that is replayed has no sampler.
    Raises InputError for rows that are no prompts, tokens that the model has no embedding for, missing columns, a
    model without a stop token, and a chat template that the environment cannot be used with; and where an update of
    `total_batch_size` completions would split a group.
    """
    config, stage = context.config, context.stage
    if config.total_batch_size % options.num_generations:
        raise InputError(
            f"stage '{stage.name}'.total_batch_size={config.total_batch_size} (completions of an update) is not a "
            f"multiple of num_generations={options.num_generations}: a group would be split"
        )
    known = model.definition is not None  # not of a model that an earlier stage will make
    routes = route_shape(model.definition) if options.replay_routes and known else None
    route_bytes = 0 if routes is None else math.prod(routes.shape) * routes.dtype.itemsize
    prompts = _open_prompts(context, rewards, options, field, route_bytes)
    if prompts is None:
        return None
    if isinstance(prompts, PromptStream):
        prompts.vocabulary = model.definition.vocab_size
    elif isinstance(prompts, Prompts):
        with error_context(stage, field):
            require_vocabulary(prompts.ids, prompts.where, model.definition.vocab_size)
    ends = (*model.stop_ids, *options.sampling.stop_token_ids)
    episodes = open_environment(context, options, model.tokenizer, ends)
    function: Any = None
    replays = stage.replay is not None
    if context.has_devices and not replays:
        train = field == "train_data"
        count = options.prompts_per_rollout if train else min(options.prompts_per_rollout, len(prompts))
        room_left = sampling_memory(context, model, rewards, others)
        function = open_sampler(context, model, prompts, options, count, room_left, episodes)
    room = getattr(function, "room", None)
    if room is not None and room.bytes is not None:
        held = f"{field}: {room.prompts:,} episodes run together, {room.bytes / 1e9:.1f} GB per device"
        context.say(room.line(context.mesh.size, field) if episodes is None else held)
    if field == "train_data":
        context.warn(*_position_warnings(model, prompts, options, stage.name), first=True)
        context.warn(*system_prompt_warnings(config, rewards, stage))
        context.ahead(warm_up, function, model, prompts.sizes)
    if context.shapes and field == "train_data":
        _check_sampler(context, model, options, int(prompts.sizes.max()), episodes)
    if not context.shapes and not replays:
        set_up(rewards, prompts, stage, field)
    if options.replay_routes and episodes is not None:
        raise InputError(
            f"stage '{stage.name}'.replay_routes: not with an environment, whose turns it cannot replay"
        )
    if options.replay_routes and routes is None:
        context.warn("replay_routes has no effect: the model has no experts")
    return RolloutCollector(
        stage, prompts, model.tokenizer, function, rewards, options, episodes, model.definition.absent, routes
    )


def open_sampler(
    context: Context,
    model: Model,
    prompts: AnyPrompts,
    options: RolloutOptions,
    prompts_per_call: int,
    memory: int | None,
    episodes: EpisodeSettings | None = None,
) -> Any:
    """Make the sampler. One without `converse` gets whole conversations of episodes as prompts.

    memory: bytes per device that it may use. Raises InputError for a model without a stop token.
    """
    require_stop_token(model.stop_ids, options.sampling, context.name)
    make = _sampler_maker(context, options)
    length = None if episodes is None else episodes.length
    inputs = SamplerInputs(
        definition=model.definition,
        tokenizer=model.tokenizer,
        options=options.sampling,
        mesh=context.mesh,
        stop_ids=model.stop_ids,
        num_generations=options.num_generations,
        prompts_per_call=prompts_per_call,
        max_prompt_length=int(prompts.sizes.max()),
        memory=memory,
        conversation_length=length,
        routes=options.replay_routes,
        model=model,
        directory=context.stage.dir,
    )
    made = make(inputs)
    if length is None or hasattr(made, "converse"):
        return made
    return make(
        replace(
            inputs,
            num_generations=1,
            prompts_per_call=prompts_per_call * options.num_generations,
            max_prompt_length=inputs.max_prompt_length + length,
            conversation_length=None,
        )
    )


def warm_up(sampler: Any, model: Model, sizes: NDArray[np.int64]) -> None:
    """Compile the sampler's programs for prompts of these lengths, if the sampler can compile early."""
    if hasattr(sampler, "warm_up"):
        sampler.warm_up(model.params, sizes)


def _open_prompts(
    context: Context, rewards: Sequence[Reward], options: RolloutOptions, field: str, route_bytes: int
) -> AnyPrompts | None:
    """Open the prompts of `train_data`, or of `eval_data`, which may not be given: None.

    In a stage that is only checked, also add to `context.expected` what its rollouts will be. rewards: are then called
    with made-up completions, and the environment's first episode is begun, unless their options say otherwise.
    route_bytes: of the experts of a completion's token, where they are kept.
    """
    stage, needed = context.stage, field == "train_data"
    length, environment, tokenizer = options.max_prompt_length, options.environment, context.tokenizer
    if context.shapes and tokenizer is not None:
        _check_stops(context, options)
    if environment is not None:
        rows = context.episode_rows(field, length)
        if context.shapes and needed:
            assert rows is not None
            of_rewards = _told(context, forecast_rewards(rewards, rows, stage, field))
            lines = forecast_episodes(context, options, rows)
            context.warn(*((ROW_PER_TURN,) if environment.history == "encoded_again" else ()))
            later = [*lines[1:], *of_rewards.lines]
            _expect(context, options, (_count(rows), length), lines[0], later, route_bytes)
        return rows
    if tokenizer is None and needed and context.is_stream(field):
        _expect(context, options, (0, length), "a stream of prompts", (), route_bytes)
    if tokenizer is None:
        records = context.records(field)
        if records is not None and needed:
            of_rewards = _told(context, forecast_rewards(rewards, records, stage, field))
            report = f"{counted(len(records), 'prompts')} before length limits"
            _expect(context, options, (len(records), length), report, of_rewards.lines, route_bytes)
        return None
    prompts = context.prompts(field, length)
    if context.shapes and prompts is not None:
        of_rewards = forecast_rewards(rewards, prompts, stage, field)
        if needed:
            longest = max(map(len, prompts.ids))
            _told(context, of_rewards)
            sizes, report = (_count(prompts), longest), str(prompts.report)
            _expect(context, options, sizes, report, of_rewards.lines, route_bytes)
    return prompts


def _count(prompts: AnyPrompts) -> int:
    """Count the prompts; 0: not known."""
    return 0 if isinstance(prompts, PromptStream) else len(prompts)


def _check_sampler(
    context: Context, model: Model, options: RolloutOptions, prompt: int, episodes: EpisodeSettings | None
) -> None:
    """Have a sampler on other devices say what is wrong with it, in a stage that is only checked."""
    made = _sampler_maker(context, options)
    if not hasattr(made, "check"):
        return
    with error_context(context.stage, "sampler"):
        length = options.sampling.max_completion_length if episodes is None else episodes.length
        forecast = _told(context, made.check(model, options, prompt + length))
    if context.expected:
        expected = context.expected[-1]
        expected.later = [*expected.later, *forecast.lines]


def _sampler_maker(context: Context, options: RolloutOptions) -> Any:
    component = Component(name="jax") if options.sampler is None else options.sampler
    return context.registry.get(SAMPLER, component.name, **component.options)


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
    context: Context,
    options: RolloutOptions,
    prompts: tuple[int, int],
    report: str,
    later: Sequence[str],
    route_bytes: int,
) -> None:
    """Count completions, updates and tokens.

    prompts: how many, 0 if that is not known, and the tokens of the longest. route_bytes: of a completion's token.
    """
    config, rounds, group = context.config, options.max_rounds, options.num_generations
    (count, longest), environment = prompts, options.environment
    length = options.sampling.max_completion_length
    length = length if environment is None else environment.length(length)
    per_rollout, serves = options.prompts_per_rollout, options.updates_per_rollout
    rollouts = data.count_updates(count, per_rollout, config.num_train_epochs, None)
    total = rollouts * serves if config.max_training_steps is None else config.max_training_steps
    sampled = -(-total // serves) * per_rollout * group
    journal = most_bytes(
        rollouts=-(-total // serves),
        completions=sampled,
        tokens=sampled * length + sampled // group * longest,
    )
    journal += sampled * length * route_bytes
    lines = [
        report,
        f"a rollout is {counted(per_rollout, 'prompts')} × {counted(group, 'completions')} = {per_rollout * group:,}"
        + (f", drawn up to {rounds} times (dynamic_sampling)" if rounds > 1 else ""),
        f"{'at most ' if rounds > 1 and config.max_training_steps is None else ''}"
        f"{counted(total, 'updates')} of {counted(config.total_batch_size, 'completions')}; "
        f"{counted(serves, 'updates')} per rollout; "
        + (f"{sampled // group / count:.2f} epochs" if count else "the length of the data is not known"),
        f"{counted(sampled, 'completions')}, at most {sampled * length:,} sampled tokens"
        + ("" if environment is None else ", the environment's included"),
        f"the journal takes at most {format_bytes(journal)}, and what the prompts' columns take"
        + (", less with checkpoints" if options.journal == "until_checkpoint" else ""),
    ]
    if options.ahead:
        lines.append(
            f"rollouts are sampled {options.ahead} ahead: a policy {options.ahead * serves} to "
            f"{(options.ahead + 1) * serves - 1} updates old writes what is trained on"
        )

    def held(definition: Definition, parameters: int) -> Mapping[str, int]:
        if getattr(_sampler_maker(context, options), "outside", False):
            return {} if context.planned else {"reward models": _reward_models(context, parameters)}
        slots = min(rows_per_device(context.mesh, per_rollout) * group, most_slots(None))
        prompts = rows_per_device(context.mesh, per_rollout)
        whole = shares_prompts(definition) and slots == prompts * group
        own = length if whole else longest + length
        cache = cache_bytes(definition, slots, own) + cache_bytes(definition, prompts, longest)
        replay = {"routes": slots * length * route_bytes} if route_bytes else {}
        if context.planned is not None:
            return {"rollout cache": cache, **replay}
        # Decoding joins projections, so that each token reads the weights in fewer pieces.
        models = _reward_models(context, parameters)
        return {"rollout cache": cache, **replay, "sampler": parameters, "reward models": models}

    row = longest + group * length
    per_update = config.total_batch_size // group * row
    context.expect(Expected(lines, total, per_update, row, later, held, options))


def _reward_models(context: Context, policy: int) -> int:
    """Sum the bytes of the models that rewards read; one that does not exist yet counts as the policy."""
    rewards: Any = getattr(context.config, "rewards", ())
    models = [reward.options.get("model") for reward in rewards if "url" not in reward.options]
    sizes = [
        scoring_bytes(model, context.tokenizer, context.registry)
        for model in models
        if isinstance(model, str)
    ]
    return sum(policy if size is None else size for size in sizes)


def _position_warnings(model: Model, prompts: AnyPrompts, options: RolloutOptions, stage: str) -> list[str]:
    """Warn where prompts with their completions or episodes are longer than the model's positions.

    Raises InputError where not even the shortest prompt leaves a position for a completion.
    """
    positions, prompt, shortest = model.max_positions, int(prompts.sizes.max()), int(prompts.sizes.min())
    known = isinstance(prompts, Prompts)  # of a stream and of episodes, sizes are limits
    if known and isinstance(positions, int) and shortest >= positions:
        raise InputError(
            f"stage '{stage}'.train_data: the shortest prompt has {shortest} tokens, and the model's context is "
            f"{positions} (max_position_embeddings), so that no completion could end within it: give shorter prompts, "
            "or a model with a longer context"
        )
    length, field, what = options.sampling.max_completion_length, "sampling.max_completion_length", ""
    if options.environment is not None:
        length, field = options.environment.length(length), "environment.max_tokens"
        what = f" and episodes of up to {length}"
    if not isinstance(positions, int) or prompt + length <= positions:
        return []
    value = "" if what else f"={length}"
    return [
        f"{field}{value}: with prompts of up to {prompt} tokens{what} that is {prompt + length}, more than the "
        f"model's context of {positions} (max_position_embeddings)"
    ]


def system_prompt_warnings(config: TrainerConfig, rewards: Sequence[Reward], stage: Stage) -> list[str]:
    """Describe the reward models that read conversations with another system prompt than the policy, one line each."""
    lines = []
    for reward in rewards:
        model = getattr(reward.function, "model", None)
        if not isinstance(model, str | Path):
            continue
        planned = stage.inputs.get("system_prompts", {})  # of stages that are only checked
        if str(model) not in planned and not Path(model).is_dir():
            continue
        theirs = planned[str(model)] if str(model) in planned else _system_prompt_of(Path(model), config)
        if theirs != config.system_prompt:
            lines.append(
                f"rewards.{reward.label}: the reward model reads conversations with {_named(theirs)}, the policy with "
                f"{_named(config.system_prompt)}, unless they begin with a system message of their own: it "
                "scores something other than what the policy sees. Give both stages the same system_prompt"
            )
    return lines


def _system_prompt_of(directory: Path, config: TrainerConfig) -> str | None:
    """Return the system prompt in a reward model's contract, or the policy's where an exported template has it."""
    if (directory / artifacts.MANIFEST).is_file():
        prompt: str | None = artifacts.read_contract(directory).get("system_prompt")
        return prompt
    template = directory / "chat_template.jinja"
    exported = template.is_file() and json.dumps(config.system_prompt) in template.read_text(encoding="utf-8")
    return config.system_prompt if exported else None


def _named(system_prompt: str | None) -> str:
    if system_prompt is None:
        return "no system_prompt"
    return f"the system_prompt {textwrap.shorten(system_prompt, 60, placeholder=' …')!r}"
