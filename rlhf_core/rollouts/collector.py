"""Collect rollouts: sample completions of the next prompts and have the rewards score them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.config import Component
from rlhf_core.contracts import SAMPLER, SamplerInputs, all_equal
from rlhf_core.data import EpisodeRows, Prompts, require_vocabulary
from rlhf_core.errors import NonFiniteError, RunError
from rlhf_core.models.model import warn_of_constraints
from rlhf_core.rewards.checks import set_up
from rlhf_core.rewards.reward import OF_EPISODES, logged_metrics
from rlhf_core.rollouts.check import open_rollout_prompts
from rlhf_core.rollouts.completions import episode_inputs, measure, reward_inputs, rollout_metrics
from rlhf_core.rollouts.conversations import Conversations
from rlhf_core.rollouts.environment import open_environment, run_episodes
from rlhf_core.rollouts.layout import require_whole_groups, tree_sizes
from rlhf_core.rollouts.rollout import Rollout, Timing
from rlhf_core.rollouts.warnings import system_prompt_warnings, warn_of_unscored
from rlhf_core.training.context import require_stop_token
from rlhf_core.training.memory import sampling_memory
from rlhf_core.training.starting_model import error_context

if TYPE_CHECKING:
    from rlhf_core.contracts import Rollouts, SamplerFunction
    from rlhf_core.environments import EnvironmentOptions, EpisodeSettings
    from rlhf_core.models import Model
    from rlhf_core.rewards.reward import Reward
    from rlhf_core.sampling import SamplingOptions
    from rlhf_core.stage import Stage
    from rlhf_core.state import TrainState
    from rlhf_core.training.context import Context


@dataclass(frozen=True)
class RolloutOptions:
    """How a trainer samples.

    max_prompt_length: tokens. num_generations: completions per prompt. sampling: how they are drawn.
    prompts_per_rollout: how many prompts a rollout has, and its sampler usually gets together. updates_per_rollout: how
        many updates it serves.
    max_rounds: above 1, groups whose rewards are all equal are replaced by the groups of the next prompts, in at most
        that many rounds (dynamic sampling; DAPO, Yu et al. 2025, section 3.2). Surplus groups are dropped; where the
        rounds give too few, equal groups, first sampled first, fill the rollout up. Metrics cover everything that was
        sampled, since those of the kept groups alone would say nothing about the policy.
    sampler: the component that draws; None: the core's. environment: of the stage's episodes, if any.
    policy: the name of the model that samples, where the state holds several.
    """

    max_prompt_length: int
    num_generations: int
    sampling: SamplingOptions
    prompts_per_rollout: int
    updates_per_rollout: int = 1
    max_rounds: int = 1
    sampler: Component | None = None
    environment: EnvironmentOptions | None = None
    policy: str | None = None


@dataclass(frozen=True)
class RolloutCollector:
    """Samples completions of prompts with the policy as it is, and scores them, unless there are no rewards.

    sampler: None in a stage that is only checked. episodes: runs the episodes of the stage's environment; None:
    prompts have completions. absent: the ids that the sampler must not choose, see `Definition.absent`.
    """

    stage: Stage
    prompts: Prompts | EpisodeRows
    tokenizer: Any
    sampler: SamplerFunction
    rewards: Sequence[Reward]
    options: RolloutOptions
    episodes: EpisodeSettings | None = None
    absent: tuple[tuple[int, int], ...] = ()

    def policy(self, params: Any) -> Any:
        """Pick the policy's parameters from a state's."""
        return params if self.options.policy is None else params[self.options.policy]

    def tree_sizes(self) -> tuple[NDArray[np.int64], int, int]:
        """Return the most tokens of each prompt, how many completions share one, and the most tokens of these."""
        return tree_sizes(self.prompts.sizes, self.options)

    def collect(
        self, state: TrainState, number: int, next_prompts: Callable[[], NDArray[np.int64]]
    ) -> Rollout:
        """Collect rollout `number`, a function of the state's parameters and key, the number and the prompts.

        next_prompts: returns the rows of the prompts of the next round, int64 [P].
        """
        key = jax.random.fold_in(state.key, number)
        failed = {reward.label: reward.failures for reward in self.rewards if reward.on_error == "skip"}
        parts: list[Rollout] = []
        wanted = kept = 0
        while len(parts) < self.options.max_rounds and (not parts or kept < wanted):
            chosen = next_prompts()
            wanted = len(chosen)
            # A completion's random numbers go by its number in the rollout, counted through the rounds.
            n, first = (
                wanted * self.options.num_generations,
                len(parts) * wanted * self.options.num_generations,
            )
            parts.append(self.sample(self.policy(state.params), chosen, key, np.arange(first, first + n)))
            kept += int((~_without_difference(parts[-1])).sum())
        whole = Rollout.join(parts)
        metrics = self.metrics(whole)
        for reward in self.rewards:
            if reward.label in failed:
                metrics[f"rewards/{reward.label}/failed"] = float(reward.failures - failed[reward.label])
        if self.options.max_rounds > 1:
            equal, filled_up = _without_difference(whole), max(wanted - kept, 0)
            metrics |= {
                "dynamic_sampling/rounds": float(len(parts)),
                "dynamic_sampling/dropped": float(equal.sum() - filled_up),
                "dynamic_sampling/surplus": float(max(kept - wanted, 0)),
                "dynamic_sampling/filled_up": float(filled_up),
            }
            if filled_up:
                warnings.warn(
                    f"{self.options.max_rounds} rounds of {wanted} prompts gave {kept} groups whose rewards "
                    "differ; groups without a learning signal fill the rollout. The prompts are too easy "
                    "or too hard for "
                    "the policy, or the reward is too coarse",
                    stacklevel=2,
                )
            order = np.argsort(equal, kind="stable")[:wanted]
            whole = whole.take(np.sort(order))
        version = np.full(len(whole.total), int(state.step), np.int32)
        samples = whole.samples._replace(version=version)
        return replace(whole, samples=samples, number=number, rounds=len(parts), metrics=metrics)

    def sample(
        self,
        params: Any,
        chosen: NDArray[np.int64],
        key: jax.Array,
        ids: NDArray[np.int64],
        *,
        required: bool = True,
    ) -> Rollout:
        """Sample and score completions of the `chosen` prompts, int64 [P].

        ids: int64 [N], the number that each completion's random numbers are derived from. required: whether to raise
        RunError where no reward applies to any completion.
        """
        if self.episodes is not None:
            return self._run_episodes(self.episodes, params, chosen, key, ids, required=required)
        assert isinstance(self.prompts, Prompts)
        began = time.perf_counter()
        try:
            samples = self.sampler(params, [self.prompts.ids[i] for i in chosen], key, ids)
        except NonFiniteError as error:
            raise RunError(f"{self.prompts.where(int(chosen[error.sequence]))}: {error}") from error
        self._require_tokens(samples)
        sampled = time.perf_counter()  # samples are NumPy arrays: nothing is still being computed
        inputs = reward_inputs(
            self.prompts, chosen.tolist(), samples, self.tokenizer, self.options.sampling.stop_token_ids
        )
        rewards, total = measure(self.rewards, inputs, needed=required)
        timing = Timing(sampled - began, time.perf_counter() - sampled, int(np.sum(samples.lengths)))
        logged = logged_metrics(self.rewards)
        return Rollout(chosen, samples, rewards, total, inputs, metrics=logged, timing=timing)

    def _run_episodes(
        self,
        source: EpisodeSettings,
        params: Any,
        chosen: NDArray[np.int64],
        key: jax.Array,
        ids: NDArray[np.int64],
        *,
        required: bool,
    ) -> Rollout:
        """Run and score episodes that begin with the `chosen` rows; the rest as in `sample`."""
        began = time.perf_counter()
        group = len(ids) // len(chosen)
        run = run_episodes(source, self.sampler, params, self.prompts, chosen.tolist(), key, ids)
        ended, samples = time.perf_counter(), run.samples()
        self._require_tokens(samples)
        failures = [episode.failure for episode in run.episodes if episode.failure is not None]
        if failures and self.stage.is_main:
            warnings.warn(
                f"{len(failures)} of {len(ids)} episodes failed and are dropped; the first: {failures[0]}",
                stacklevel=2,
            )
        inputs = episode_inputs(self.prompts, chosen.tolist(), run.episodes)
        rewards, total = measure(self.rewards, inputs, needed=required)
        failed = [episode.failure is not None for episode in run.episodes]
        rewards[failed], total[failed] = np.nan, np.nan
        timing = Timing(ended - began, time.perf_counter() - ended, int(np.sum(samples.mask)))
        said = Conversations.of(run, group, one_row_per_turn=source.one_row_per_turn)
        metrics = {**run.measure(), **logged_metrics(self.rewards)}
        return Rollout(
            chosen, samples, rewards, total, inputs, metrics=metrics, timing=timing, conversations=said
        )

    def _require_tokens(self, samples: Rollouts) -> None:
        """Raise RunError where a sampler chose ids without a token, which have no log-probability."""
        tokens = samples.tokens[samples.mask]
        if odd := [
            int(i) for start, stop in self.absent for i in tokens[(tokens >= start) & (tokens < stop)]
        ]:
            raise RunError(
                f"stage '{self.stage.name}'.sampler: {len(odd)} of {len(tokens)} sampled ids are not tokens of "
                f"the tokenizer, the first is {odd[0]}: a sampler must never sample an id of `definition.absent`"
            )

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """Measure a rollout, by the names of the metrics page; warn where rewards left much of it unscored."""
        warn_of_unscored(self.stage, self.rewards, rollout)
        measured = rollout_metrics(
            self.rewards, rollout.rewards, rollout.total, rollout.samples, rollout.group
        )
        if self.episodes is not None and np.isnan(measured.get(f"rewards/{OF_EPISODES}/mean", 0.0)):
            measured = {k: v for k, v in measured.items() if not k.startswith(f"rewards/{OF_EPISODES}/")}
        return {**measured, **rollout.metrics}


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

    rewards: begin with the environment's own. others: models that are in memory beside the policy's and the rewards',
    such as a teacher. Returns None for `eval_data` that is not given.
    Raises InputError for rows that are no prompts, tokens that the model has no embedding for, missing columns, a
    model without a stop token, and a chat template that the environment cannot be used with; and where an update of
    `total_batch_size` completions would split a group.
    """
    config, stage, length = context.config, context.stage, options.max_prompt_length
    require_whole_groups(config, stage, options.num_generations)
    prompts = open_rollout_prompts(context, rewards, options, field)
    if prompts is None:
        return None
    if isinstance(prompts, Prompts):
        with error_context(stage, field):
            require_vocabulary(prompts.ids, prompts.where, model.definition.vocab_size)
    episodes = open_environment(
        options.environment,
        config,
        stage,
        model.tokenizer,
        stop_ids=(*model.stop_ids, *options.sampling.stop_token_ids),
        max_prompt_length=length,
        max_completion_length=options.sampling.max_completion_length,
    )
    function: Any = None
    if context.has_devices:
        train = field == "train_data"
        count = options.prompts_per_rollout if train else min(options.prompts_per_rollout, len(prompts))
        room_left = sampling_memory(context, model, rewards, others)
        function = open_sampler(context, model, prompts, options, count, room_left, episodes)
    room = getattr(function, "room", None)
    if room is not None and room.bytes is not None:
        held = f"{field}: {room.prompts:,} episodes run together, {room.bytes / 1e9:.1f} GB per device"
        context.say(room.line(context.mesh.size, field) if episodes is None else held)
    if field == "train_data":
        context.warn(*system_prompt_warnings(config, rewards, stage))
        context.ahead(warm_up, function, model, prompts.sizes)
    if not context.shapes:
        set_up(rewards, prompts, stage, field)
    absent = model.definition.absent
    return RolloutCollector(stage, prompts, model.tokenizer, function, rewards, options, episodes, absent)


def _without_difference(rollout: Rollout) -> NDArray[np.bool_]:
    """bool [P]: the scored rewards of a group are all equal, or none is scored, so that it has no advantage."""
    return all_equal(rollout.total.reshape(len(rollout.prompts), -1))


def open_sampler(
    context: Context,
    model: Model,
    prompts: Prompts | EpisodeRows,
    options: RolloutOptions,
    prompts_per_call: int,
    memory: int | None,
    episodes: EpisodeSettings | None = None,
) -> Any:
    """Make the sampler. One without `converse` gets whole conversations of episodes as prompts.

    memory: bytes per device that it may use. Raises InputError for a model without a stop token.
    """
    require_stop_token(model.stop_ids, options.sampling, context.name)
    warn_of_constraints(model.source)
    component = Component(name="jax") if options.sampler is None else options.sampler
    make = context.registry.get(SAMPLER, component.name, **component.options)
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
