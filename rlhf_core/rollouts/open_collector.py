"""Open what a stage samples from: prompts, a sampler, an environment."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from rlhf_core import artifacts
from rlhf_core.contracts import Forecast, SamplerInputs
from rlhf_core.data import Examples, require_vocabulary
from rlhf_core.data.prompts import (
    AnyPrompts,
    EpisodeRows,
    PromptStream,
    UntokenizedPrompts,
    encode_prompts,
    episode_rows,
)
from rlhf_core.errors import InputError
from rlhf_core.models.experts import route_shape
from rlhf_core.rewards.checks import forecast_rewards, set_up
from rlhf_core.rollouts.collector import RolloutCollector, RolloutOptions
from rlhf_core.rollouts.description import PlannedRollouts, sampler_maker
from rlhf_core.rollouts.environment import forecast_episode, open_environment
from rlhf_core.sampling.stop_strings import stop_table
from rlhf_core.tokenizer import special_ids
from rlhf_core.training.memory import sampling_memory
from rlhf_core.training.rows import encoding, open_stream, say_report, warn_of_idle_workers
from rlhf_core.training.starting_model import error_context, require_stop_token

if TYPE_CHECKING:
    import jax
    import numpy as np

    from rlhf_core.config import TrainerConfig
    from rlhf_core.environments import EpisodeSettings
    from rlhf_core.models import Model
    from rlhf_core.rewards.reward import Reward
    from rlhf_core.training import Context


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
    stage = context.stage
    trains = field == "train_data"
    _require_whole_groups(context, options)
    context.check(_check_stops, context, options)
    prompts = open_prompts(context, options, field)
    if prompts is None:
        return None
    routes = None
    if options.replay_routes and model.definition is not None:
        routes = route_shape(model.definition)
    ends = (*model.stop_ids, *options.sampling.stop_token_ids)
    environment = options.environment
    episodes: EpisodeSettings | None = None
    if environment is not None:
        episodes = open_environment(context, options, environment, model.tokenizer, ends)
    planned = PlannedRollouts(options, prompts, routes)
    if trains and environment is not None:
        context.check(forecast_episode, context, environment, episodes, prompts)
    if planned.can_be_tried:
        context.check(forecast_rewards, rewards, prompts, stage, field)
    if trains:
        context.trains_on(planned)
    assert not isinstance(prompts, UntokenizedPrompts)
    _know_vocabulary(context, prompts, model, field)

    def make() -> Any:
        count, how = options.prompts_per_rollout, options
        if not trains:
            count = min(count, len(prompts))
            how = replace(options, test=None)
        room = sampling_memory(context, model, rewards, others)
        return open_sampler(context, model, prompts, how, count, room, episodes)

    # A stage that is replayed has its completions, and their rewards.
    replays = stage.replay is not None
    sampler: Any = None if replays else context.on_mesh(make)
    _say_room(context, sampler, episodes, field)
    if trains:
        context.warn(*_position_warnings(model, prompts, options, stage.name), first=True)
        context.warn(*system_prompt_warnings(context, rewards))
        context.ahead(warm_up, sampler, model, prompts.sizes)
        context.check(_check_sampler, context, model, options, prompts, episodes)
    if not replays:
        context.compute(set_up, rewards, prompts, stage, field)
    if options.replay_routes:
        _check_replay(context, episodes, routes)
    return RolloutCollector(
        stage, prompts, model.tokenizer, sampler, rewards, options, episodes, model.definition.absent, routes
    )


def _require_whole_groups(context: Context, options: RolloutOptions) -> None:
    """Raise InputError where an update of `total_batch_size` completions would split a group."""
    size, group = context.config.total_batch_size, options.num_generations
    if size % group:
        raise InputError(
            f"stage '{context.name}'.total_batch_size={size} (completions of an update) is not a "
            f"multiple of num_generations={group}: a group would be split"
        )


def open_prompts(
    context: Context, options: RolloutOptions, field: str
) -> AnyPrompts | UntokenizedPrompts | None:
    """Tokenise the prompts of `train_data`, or of `eval_data`, which may not be given: None.

    With an environment they are the rows that its episodes begin with; in a check that has no tokenizer yet,
    `UntokenizedPrompts`. Raises InputError for rows that are not prompts.
    """
    length = options.max_prompt_length
    stream = field == "train_data" and context.is_stream(field)
    if options.environment is not None:
        return _open_episode_rows(context, length, field, stream=stream)
    if context.tokenizer is None and stream:
        return UntokenizedPrompts(None)
    encode: partial[Any] = partial(encode_prompts, max_prompt_length=length, **encoding(context))
    if stream:
        source = open_stream(context, encode, "prompts")
        if not source.sample.report.all_as_given:
            context.not_as_given(field, source.report)
        return PromptStream(source, length)
    records = context.records(field)
    if records is None:
        return None
    if context.tokenizer is None:
        return UntokenizedPrompts(records)
    with error_context(context.stage, field):
        prompts: Examples = encode(records, context.tokenizer)
    say_report(context, prompts.report, field)
    warn_of_idle_workers(context, field)
    return prompts


def _open_episode_rows(
    context: Context, length: int, field: str, *, stream: bool
) -> EpisodeRows | PromptStream | None:
    if stream:
        template = context.text_options()
        encode = partial(episode_rows, max_prompt_length=length, chat_template=template)
        return PromptStream(open_stream(context, encode, "rows", episodes=True), length)
    records = context.records(field, episodes=True)
    return None if records is None else EpisodeRows(records, length)


def _say_room(context: Context, sampler: Any, episodes: EpisodeSettings | None, field: str) -> None:
    """Say how much the sampler draws together, where the devices' memory limits it."""
    room = getattr(sampler, "room", None)
    if room is None or room.bytes is None:
        return
    held = f"{field}: {room.prompts:,} episodes run together, {room.bytes / 1e9:.1f} GB per device"
    context.say(room.line(context.mesh.size, field) if episodes is None else held)


def _check_replay(
    context: Context, episodes: EpisodeSettings | None, routes: jax.ShapeDtypeStruct | None
) -> None:
    """Raise InputError for an environment, whose experts cannot be replayed; warn of a model without experts."""
    if episodes is not None:
        raise InputError(
            f"stage '{context.name}'.replay_routes: not with an environment, whose turns it cannot replay"
        )
    if routes is None:
        context.warn("replay_routes has no effect: the model has no experts")


def _know_vocabulary(context: Context, prompts: AnyPrompts, model: Model, field: str) -> None:
    """Raise InputError for tokens that the model has no embedding for; later ones of a stream are compared as read."""
    if isinstance(prompts, PromptStream):
        prompts.vocabulary = model.definition.vocab_size
    elif isinstance(prompts, Examples):
        with error_context(context.stage, field):
            require_vocabulary(prompts.ids, prompts.where, model.definition.vocab_size)


def _check_sampler(
    context: Context,
    model: Model,
    options: RolloutOptions,
    prompts: AnyPrompts,
    episodes: EpisodeSettings | None,
) -> Forecast:
    """Have a sampler on other devices say what it is, and what is wrong with it."""
    made = sampler_maker(context, options)
    if not hasattr(made, "check"):
        return Forecast()
    length = options.sampling.max_completion_length if episodes is None else episodes.length
    with error_context(context.stage, "sampler"):
        answer: Forecast = made.check(model, options, int(prompts.sizes.max()) + length)
    return answer


def _check_stops(context: Context, options: RolloutOptions) -> None:
    """Raise InputError where no token could end a completion, or a text that ends one cannot be recognised."""
    tokenizer, sampling = context.tokenizer, options.sampling
    if tokenizer is None:
        return
    require_stop_token(special_ids(tokenizer, context.config.chat_template).eos, sampling, context.name)
    if sampling.stop_strings:
        stop_table(sampling.stop_strings, tokenizer, len(tokenizer))


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
    make = sampler_maker(context, options)
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
        draws=options.tests_draws,
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


def _position_warnings(model: Model, prompts: AnyPrompts, options: RolloutOptions, stage: str) -> list[str]:
    """Warn where prompts with their completions or episodes are longer than the model's positions.

    Raises InputError where not even the shortest prompt leaves a position for a completion.
    """
    positions = model.max_positions
    prompt = int(prompts.sizes.max())
    shortest = int(prompts.sizes.min())
    known = isinstance(prompts, Examples)  # of a stream and of episodes, sizes are limits
    if known and isinstance(positions, int) and shortest >= positions:
        raise InputError(
            f"stage '{stage}'.train_data: the shortest prompt has {shortest} tokens, and the model's context is "
            f"{positions} (max_position_embeddings), so that no completion could end within it: give shorter prompts, "
            "or a model with a longer context"
        )
    length, field, what = options.sampling.max_completion_length, "sampling.max_completion_length", ""
    if options.environment is not None:
        length = options.environment.length(length)
        field = "environment.max_tokens"
        what = f" and episodes of up to {length}"
    if not isinstance(positions, int) or prompt + length <= positions:
        return []
    value = "" if what else f"={length}"
    return [
        f"{field}{value}: with prompts of up to {prompt} tokens{what} that is {prompt + length}, more than the "
        f"model's context of {positions} (max_position_embeddings)"
    ]


def system_prompt_warnings(context: Context, rewards: Sequence[Reward]) -> list[str]:
    """Describe the reward models that read conversations with another system prompt than the policy, one line each."""
    config, lines = context.config, []
    for reward in rewards:
        model = getattr(reward.function, "model", None)
        if not isinstance(model, str | Path):
            continue
        if str(model) in context.unmade:
            theirs = context.unmade[str(model)].system_prompt
        elif Path(model).is_dir():
            theirs = _system_prompt_of(Path(model), config)
        else:
            continue
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
