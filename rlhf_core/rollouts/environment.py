"""Open a stage's environment, and run its episodes with a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.contracts import ENVIRONMENT, Forecast
from rlhf_core.environments import (
    CallParser,
    ConversationEncoder,
    EnvironmentCalls,
    Episode,
    Episodes,
    EpisodeSettings,
    try_episode,
)
from rlhf_core.errors import InputError, RunError, SequenceError
from rlhf_core.sampling import converse_by_turns
from rlhf_core.stage.text_settings import text_options
from rlhf_core.training.starting_model import error_context

if TYPE_CHECKING:
    from rlhf_core.data.prompts import AnyPrompts, EpisodeRows, PromptStream
    from rlhf_core.environments import EnvironmentOptions
    from rlhf_core.rollouts.collector import RolloutOptions
    from rlhf_core.training import Context

ROW_PER_TURN = (
    'environment.history="encoded_again": every turn is a training row with everything before it; this is slower, '
    "and losses that average over a sequence average over a turn"
)


def run_episodes(
    settings: EpisodeSettings,
    sampler: Any,
    params: Any,
    prompts: AnyPrompts,
    chosen: Sequence[int],
    key: jax.Array,
    ids: NDArray[np.int64],
) -> Episodes:
    """Run an episode for each of `ids`, int64 [N]; those of a group begin with the same row of `chosen`, [P].

    Raises RunError where all episodes fail, or one does and `on_error` is "stop".
    """
    group = len(ids) // len(chosen)
    seeds = [_seed(key, int(ids[i * group])) for i in range(len(chosen))]
    begun = [
        Episode(prompts.row(row), seed, prompts.where(row))
        for row, seed in zip(chosen, seeds, strict=True)
        for _ in range(group)
    ]
    episodes = Episodes(settings, begun, group)
    arguments = params, episodes.prompts, key, np.asarray(ids)[episodes.running], episodes
    if episodes.running:
        try:
            if hasattr(sampler, "converse"):
                sampler.converse(*arguments)
            else:
                converse_by_turns(sampler, *arguments, conversation_length=settings.length)
        except SequenceError as error:
            failed = episodes.episodes[episodes.running[error.sequence]]
            raise RunError(f"{failed.place}: {error}") from error
    episodes.end()
    return episodes


def open_environment(
    context: Context,
    options: RolloutOptions,
    environment: EnvironmentOptions,
    tokenizer: Any,
    stop_ids: Sequence[int] = (),
) -> EpisodeSettings | None:
    """Open the environment of a stage; None in a check that has no tokenizer yet.

    stop_ids: tokens that end a completion. Raises InputError for an unknown environment or option, for one without
    `reset` and `step`, and for a chat template that it cannot be used with, naming what to do.
    """
    if tokenizer is None:
        return None
    with error_context(context.stage, "environment"):
        calls = EnvironmentCalls(
            environment,
            lambda: context.registry.get(ENVIRONMENT, environment.name, **environment.options),
            f"stage '{context.name}'.environment",
        )
        encoder = ConversationEncoder(tokenizer, text_options(context.config, context.stage), stop_ids)
        # Messages of other roles are checked when they come.
        roles = ("tool",) if calls.tools else ("user",)
        again = environment.history == "encoded_again"
        problem = encoder.problem(tools=calls.tools, roles=roles, encoded_again=again)
        if problem:
            raise InputError(problem)
        parser = CallParser(encoder, calls.tools)
    turn = options.sampling.max_completion_length
    return EpisodeSettings(calls, encoder, parser, options.max_prompt_length, environment.length(turn), turn)


def forecast_episode(
    context: Context,
    environment: EnvironmentOptions,
    settings: EpisodeSettings | None,
    rows: EpisodeRows | PromptStream,
) -> Forecast:
    """Try the first row's episode, unless `check` is false, calls are async, or there is no tokenizer yet.

    Raises InputError for what would end every episode.
    """
    warnings = (ROW_PER_TURN,) if environment.history == "encoded_again" else ()
    if settings is None or settings.calls.asynchronous or not environment.check:
        return Forecast(warnings=warnings)
    with error_context(context.stage, "environment"):
        line = try_episode(
            settings.calls, settings.encoder, rows.row(0), rows.where(0), rows.max_prompt_length
        )
    return Forecast((line,), warnings)


def _seed(key: jax.Array, number: int) -> int:
    """Derive the seed of the episodes of a group from the key of the rollout and the number of the group's first."""
    words = np.asarray(jax.random.key_data(key)).reshape(-1).tolist()
    return int(np.random.SeedSequence([*words, number]).generate_state(1)[0])
