"""Open a stage's environment, and run its episodes with a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.contracts import ENVIRONMENT
from rlhf_core.environments import (
    CallParser,
    ConversationEncoder,
    EnvironmentCalls,
    EnvironmentOptions,
    Episode,
    Episodes,
    EpisodeSettings,
    try_episode,
)
from rlhf_core.errors import InputError, NonFiniteError, RunError
from rlhf_core.sampling import converse_by_turns
from rlhf_core.stage.text_settings import text_options
from rlhf_core.training.starting_model import error_context

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.data import EpisodeRows, Prompts
    from rlhf_core.stage import Stage


def run_episodes(
    settings: EpisodeSettings,
    sampler: Any,
    params: Any,
    prompts: Prompts | EpisodeRows,
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
        except NonFiniteError as error:
            failed = episodes.episodes[episodes.running[error.sequence]]
            raise RunError(f"{failed.place}: {error}") from error
    episodes.end()
    return episodes


def open_environment(
    options: EnvironmentOptions | None,
    config: TrainerConfig,
    stage: Stage,
    tokenizer: Any,
    *,
    stop_ids: Sequence[int],
    max_prompt_length: int,
    max_completion_length: int,
) -> EpisodeSettings | None:
    """Open the environment of a stage; None where it has none.

    stop_ids: tokens that end a completion. Raises InputError for an unknown environment or option, for one without
    `reset` and `step`, and for a chat template that it cannot be used with, naming what to do.
    """
    if options is None:
        return None
    where = f"stage '{stage.name}'.environment"
    with error_context(stage, "environment"):
        calls = EnvironmentCalls(
            options, lambda: stage.registry.get(ENVIRONMENT, options.name, **options.options), where
        )
        encoder = ConversationEncoder(tokenizer, text_options(config, stage), stop_ids)
        # Messages of other roles are checked when they come.
        roles = ("tool",) if calls.tools else ("user",)
        again = options.history == "encoded_again"
        if problem := encoder.problem(tools=calls.tools, roles=roles, encoded_again=again):
            raise InputError(problem)
        parser = CallParser(encoder, calls.tools)
    length = options.length(max_completion_length)
    return EpisodeSettings(calls, encoder, parser, max_prompt_length, length, max_completion_length)


def forecast_episodes(
    options: EnvironmentOptions,
    config: TrainerConfig,
    stage: Stage,
    rows: EpisodeRows,
    tokenizer: Any | None,
    *,
    max_completion_length: int,
) -> list[str]:
    """Describe the episodes that rows begin, first the rows; try one, unless `check` is false or calls are async.

    tokenizer: the model's; None: prompts are not encoded. Raises InputError for what would end every episode.
    """
    length = options.length(max_completion_length)
    name = Path(options.name).name
    lines = [
        f"{len(rows):,} rows, which begin episodes of '{name}' with prompts of at most "
        f"{rows.max_prompt_length:,} tokens",
        f"an episode has at most {options.max_turns} turns of {max_completion_length:,} tokens, and "
        f"{length:,} tokens with the environment's",
    ]
    if tokenizer is None:
        return lines
    source = open_environment(
        options,
        config,
        stage,
        tokenizer,
        stop_ids=(),
        max_prompt_length=rows.max_prompt_length,
        max_completion_length=max_completion_length,
    )
    assert source is not None
    if options.check and not source.calls.asynchronous:
        with error_context(stage, "environment"):
            lines.append(
                try_episode(source.calls, source.encoder, rows.row(0), rows.where(0), rows.max_prompt_length)
            )
    return lines


def _seed(key: jax.Array, number: int) -> int:
    """Derive the seed of the episodes of a group from the key of the rollout and the number of the group's first."""
    words = np.asarray(jax.random.key_data(key)).reshape(-1).tolist()
    return int(np.random.SeedSequence([*words, number]).generate_state(1)[0])
