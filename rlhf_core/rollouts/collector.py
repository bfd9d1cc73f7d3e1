"""Collect rollouts: sample completions of the next prompts and have the rewards score them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.contracts import LARGEST_REWARD, RewardInputs, all_equal, total_reward
from rlhf_core.data.examples import Examples
from rlhf_core.data.prompts import AnyPrompts, EpisodeRows, PromptStream
from rlhf_core.environments import CallParser, ConversationEncoder, Episode, Episodes
from rlhf_core.errors import InputError, RunError, SequenceError, warn
from rlhf_core.rewards.reward import OF_EPISODES, Reward, as_settled, logged_metrics, score
from rlhf_core.rollouts.environment import run_episodes
from rlhf_core.rollouts.rollout import ENVIRONMENT_REWARDS, Conversations, Rollout, Timing
from rlhf_core.rollouts.rollout_rows import tree_sizes
from rlhf_core.rollouts.sampling_plan import not_applicable
from rlhf_core.sampling import Rollouts
from rlhf_core.tokenizer.encoding import continuations

if TYPE_CHECKING:
    from rlhf_core.config import Component
    from rlhf_core.contracts import SamplerFunction
    from rlhf_core.environments import EnvironmentOptions, EpisodeSettings
    from rlhf_core.rollouts.sampling_plan import SamplingTestOptions
    from rlhf_core.sampling import SamplingOptions
    from rlhf_core.stage import Stage

UNSCORED = 0.1
"""Share of completions without a value above which a reward is warned of."""


@dataclass(frozen=True)
class RolloutOptions:
    """How a trainer samples.

    max_prompt_length: tokens. num_generations: completions per prompt. sampling: how they are drawn.
    prompts_per_rollout: how many prompts a rollout has, and its sampler usually gets together. updates_per_rollout: how
        many updates it serves.
    max_rounds: above 1, groups whose rewards are all equal are replaced by the groups of the next prompts, in at most
        that many rounds (dynamic sampling; DAPO, Yu et al. 2025, section 3.2). Surplus groups are dropped; where the
        rounds give too few, equal groups, first sampled first, fill the rollout up. Metrics cover everything that was
        sampled, since those of the kept groups alone would say nothing about the policy; so does the sampling test.
    sampler: the component that draws; None: the core's. environment: of the stage's episodes, if any.
    policy: the name of the model that samples, where the state holds several.
    ahead: how many rollouts are sampled ahead of the one that is trained on. journal: how long the rollouts stay on
        disk: "keep" all, or "until_checkpoint", as long as a checkpoint may need them.
    replay_routes: whether trees carry the experts that the sampler sent tokens to, see `RolloutCollector.routes`.
    test: how a trainer that computes what the sampling test needs has its sampler tested.
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
    ahead: int = 0
    journal: Literal["keep", "until_checkpoint"] = "keep"
    replay_routes: bool = False
    test: SamplingTestOptions | None = None

    @property
    def tests_draws(self) -> bool:
        """Whether a sampler elsewhere is tested by what it draws at each publication: with rollouts ahead, the policy
        that sampled a rollout is gone when its tokens are read.
        """
        return bool(self.ahead and self.test) and not_applicable(self.sampling) is None


class Drawn(NamedTuple):
    """Completions before they are scored; of an environment, its episodes. seconds: that sampling took.

    receipt: metrics of how a sampler on other devices proved that it held the policy.
    """

    samples: Rollouts
    run: Episodes | None
    seconds: float
    receipt: Mapping[str, float]


SCORING = threading.RLock()
"""Held by a thread that calls rewards: rollouts that are sampled ahead are scored in threads of their own."""


@dataclass(frozen=True)
class RolloutCollector:
    """Samples completions of prompts with the policy as it is, and scores them, unless there are no rewards.

    sampler: None in a stage that is only checked. episodes: runs the episodes of the stage's environment; None:
    prompts have completions. absent: the ids that the sampler must not choose, see `Definition.absent`. routes: shape
    [layers, k] and dtype of the experts of a token, where trees carry them.
    """

    stage: Stage
    prompts: AnyPrompts
    tokenizer: Any
    sampler: SamplerFunction
    rewards: Sequence[Reward]
    options: RolloutOptions
    episodes: EpisodeSettings | None = None
    absent: tuple[tuple[int, int], ...] = ()
    routes: jax.ShapeDtypeStruct | None = None

    def policy(self, params: Any) -> Any:
        """Pick the policy's parameters from a state's."""
        return params if self.options.policy is None else params[self.options.policy]

    def tree_sizes(self) -> tuple[NDArray[np.int64], int, int]:
        """Return the most tokens of each prompt, how many completions share one, and the most tokens of these."""
        return tree_sizes(self.prompts.sizes, self.options)

    def hand_over(self, params: Any, version: int) -> Any:
        """Return what the sampler takes as the policy: its parameters, or what it has published them as.

        version: the updates applied to it.
        """
        publish = getattr(self.sampler, "publish", None)
        return params if publish is None else publish(params, version)

    def collect(
        self,
        policy: Any,
        key: jax.Array,
        number: int,
        next_prompts: Callable[[], NDArray[np.int64]],
        *,
        version: int = 0,
        drawn: Callable[[], Drawn] | None = None,
        may_score: Callable[[], object] = lambda: None,
    ) -> Rollout:
        """Collect rollout `number`, a function of the policy, the key and the prompts.

        policy: as `hand_over` returned it. key: the rollout's own. next_prompts: returns the rows of the prompts of the
        next round, int64 [P]. version: the updates applied to the policy. drawn: returns the completions of the first
        round, sampled before; None: they are sampled now. may_score: called before the rewards are; may wait.
        """
        failed = {reward.label: 0 for reward in self.rewards if reward.on_error == "skip"}
        parts: list[Rollout] = []
        wanted = kept = 0
        while len(parts) < self.options.max_rounds and (not parts or kept < wanted):
            chosen = next_prompts()
            wanted = len(chosen)
            # A completion's random numbers go by its number in the rollout, counted through the rounds.
            n = wanted * self.options.num_generations
            first = len(parts) * n
            ids = np.arange(first, first + n)
            made = drawn() if drawn and not parts else self.draw(policy, chosen, key, ids)
            may_score()
            with SCORING:
                before = {reward.label: reward.failures for reward in self.rewards}
                parts.append(self.score(made, chosen))
                for reward in self.rewards:
                    if reward.label in failed:
                        failed[reward.label] += reward.failures - before[reward.label]
            kept += int((~_without_difference(parts[-1])).sum())
        whole = Rollout.join(parts)
        metrics = self.metrics(whole)
        versions = np.full(len(whole.total), version, np.int32)
        whole = replace(whole, samples=whole.samples._replace(version=versions))
        metrics |= {f"rewards/{label}/failed": float(count) for label, count in failed.items()}
        if self.options.max_rounds > 1:
            metrics |= self._dynamic_sampling_metrics(whole, len(parts), wanted, kept)
            whole = self._with_difference(whole, wanted)
        return replace(whole, number=number, rounds=len(parts), metrics=metrics, draws=self._draws(policy))

    def _dynamic_sampling_metrics(
        self, whole: Rollout, rounds: int, wanted: int, kept: int
    ) -> dict[str, float]:
        """Count what dynamic sampling drops; warn where groups without a difference fill a rollout up.

        wanted: groups of a rollout. kept: those of all rounds whose rewards differ.
        """
        filled_up = max(wanted - kept, 0)
        if filled_up:
            warn(
                f"{self.options.max_rounds} rounds of {wanted} prompts gave {kept} groups whose rewards "
                "differ; groups without a learning signal fill the rollout. The prompts are too easy "
                "or too hard for the policy, or the reward is too coarse"
            )
        return {
            "dynamic_sampling/rounds": float(rounds),
            "dynamic_sampling/dropped": float(_without_difference(whole).sum() - filled_up),
            "dynamic_sampling/surplus": float(max(kept - wanted, 0)),
            "dynamic_sampling/filled_up": float(filled_up),
        }

    def _with_difference(self, whole: Rollout, wanted: int) -> Rollout:
        """Take the first `wanted` groups whose rewards differ, then equal ones; a sampling test gets the others too."""
        equal = _without_difference(whole)
        order = np.argsort(equal, kind="stable")
        dropped = None
        if self.options.test is not None and len(order) > wanted:
            dropped = whole.take(np.sort(order[wanted:]))
        return replace(whole.take(np.sort(order[:wanted])), dropped=dropped)

    def _draws(self, policy: Any) -> NDArray[np.float32]:
        """Return what engines drew before they sampled with a policy, [0, 4] where none is asked to."""
        draws = getattr(self.sampler, "draws", None)
        if draws is None or not self.options.tests_draws:
            return np.zeros((0, 4), np.float32)
        drawn: NDArray[np.float32] = draws(policy)
        return drawn

    def sample(
        self,
        policy: Any,
        chosen: NDArray[np.int64],
        key: jax.Array,
        ids: NDArray[np.int64],
        *,
        required: bool = True,
    ) -> Rollout:
        """Sample and score completions of the `chosen` prompts, int64 [P]; rewards with a state keep it.

        ids: int64 [N], the number that each completion's random numbers are derived from. required: whether to raise
        RunError where no reward applies to any completion.
        """
        drawn = self.draw(policy, chosen, key, ids)
        with SCORING, as_settled(self.rewards):
            return self.score(drawn, chosen, required=required)

    def draw(self, policy: Any, chosen: NDArray[np.int64], key: jax.Array, ids: NDArray[np.int64]) -> Drawn:
        """Sample completions of the `chosen` prompts, or run episodes that begin with these rows; as in `sample`."""
        began = time.perf_counter()
        run: Episodes | None = None
        if self.episodes is not None:
            run = run_episodes(self.episodes, self.sampler, policy, self.prompts, chosen.tolist(), key, ids)
            samples = run.samples()
        else:
            assert not isinstance(self.prompts, EpisodeRows)
            try:
                samples = self.sampler(policy, [self.prompts.ids[i] for i in chosen], key, ids)
            except SequenceError as error:
                raise RunError(f"{self.prompts.where(int(chosen[error.sequence]))}: {error}") from error
            if self.routes is not None and samples.routes.shape[2:] != self.routes.shape:
                raise InputError(
                    f"stage '{self.stage.name}'.replay_routes: the sampler does not return the experts of tokens; "
                    "leave out replay_routes, or sample with sampler = 'jax'"
                )
        if len(samples.lengths) != len(ids):
            raise RunError(
                f"stage '{self.stage.name}': the sampler returned {len(samples.lengths)} completions for {len(ids)}: "
                f"{len(chosen)} prompts with num_generations = {self.options.num_generations}"
            )
        self._require_tokens(samples)
        receipt = getattr(self.sampler, "receipt", None)
        # Samples are NumPy arrays: nothing is still being computed.
        seconds = time.perf_counter() - began
        return Drawn(samples, run, seconds, {} if receipt is None else receipt(policy))

    def score(self, drawn: Drawn, chosen: NDArray[np.int64], *, required: bool = True) -> Rollout:
        """Have the rewards score what was drawn; as in `sample`. The caller holds SCORING."""
        samples, run, seconds, receipt = drawn
        began = time.perf_counter()
        before = list[NDArray[np.int32]]()
        if run is None:
            assert not isinstance(self.prompts, EpisodeRows)
            before = [np.asarray(self.prompts.ids[i], np.int32) for i in chosen]
            inputs = reward_inputs(
                self.prompts, chosen.tolist(), samples, self.tokenizer, self.options.sampling.stop_token_ids
            )
        else:
            failures = [episode.failure for episode in run.episodes if episode.failure is not None]
            if failures and self.stage.is_main:
                warn(
                    f"{len(failures)} of {len(run.episodes)} episodes failed and are dropped; the first: {failures[0]}"
                )
            inputs = episode_inputs(self.prompts, chosen.tolist(), run.episodes)
        rewards = np.zeros((len(inputs.completions), 0))
        if self.rewards:
            rewards = score(self.rewards, inputs, needed=required)
        total = weighted_total(self.rewards, rewards)
        metrics = {**receipt, **logged_metrics(self.rewards)}
        timing = Timing(seconds, time.perf_counter() - began, int(np.sum(samples.mask)))
        made = Rollout(
            chosen, samples, rewards, total, inputs, metrics=metrics, timing=timing, prompt_ids=before
        )
        if run is None or self.episodes is None:
            return made
        failed = [episode.failure is not None for episode in run.episodes]
        rewards[failed], total[failed] = np.nan, np.nan
        group = len(run.episodes) // len(chosen)
        said = Conversations.of(run, group, one_row_per_turn=self.episodes.one_row_per_turn)
        return replace(made, metrics={**run.measure(), **metrics}, conversations=said)

    def _require_tokens(self, samples: Rollouts) -> None:
        """Raise RunError where a sampler chose ids without a token, which have no log-probability."""
        tokens = samples.tokens[samples.mask]
        odd = [int(i) for start, stop in self.absent for i in tokens[(tokens >= start) & (tokens < stop)]]
        if odd:
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


def _without_difference(rollout: Rollout) -> NDArray[np.bool_]:
    """bool [P]: the scored rewards of a group are all equal, or none is scored, so that it has no advantage."""
    return all_equal(rollout.total.reshape(len(rollout.prompts), -1))


def completion(samples: Rollouts, i: int) -> NDArray[np.int32]:
    """Return the tokens of completion i, stop token included."""
    return np.asarray(samples.tokens[i, : samples.lengths[i]], np.int32)


def reward_inputs(
    prompts: Examples | PromptStream,
    chosen: Sequence[int],
    samples: Rollouts,
    tokenizer: Any,
    stop_ids: Sequence[int] = (),
) -> RewardInputs:
    """Make the inputs of reward functions: texts that continue their prompts, or message lists for message prompts, in
    which a thought that the template gives a channel of its own is apart, see `CallParser.parse`.

    stop_ids: tokens that end completions besides those of the tokenizer, `sampling.stop_token_ids`.
    """
    group = len(samples.lengths) // len(chosen)
    tokens = [completion(samples, i) for i in range(len(samples.lengths))]
    ids = [each.tolist() for each in tokens]
    rows = [i for i in chosen for _ in range(group)]
    raw = [prompts.raw[i] for i in rows]
    before = [prompts.ids[i] if isinstance(prompts.raw[i], str) else None for i in rows]
    completions: list[Any] = continuations(tokenizer, before, tokens, stop_ids)
    conversations = [i for i, prompt in enumerate(raw) if not isinstance(prompt, str)]
    if conversations:
        parser = CallParser(ConversationEncoder(tokenizer, stop_ids=stop_ids))
        for i in conversations:
            completions[i] = [parser.message(tokens[i])]
    columns = _repeated_columns(prompts, chosen, group)
    return RewardInputs(raw, completions, ids, columns, [prompts.where(i) for i in rows])


def episode_inputs(prompts: AnyPrompts, chosen: Sequence[int], episodes: Sequence[Episode]) -> RewardInputs:
    """Make the inputs of reward functions from episodes: the messages that each began with, and those that followed.

    `completion_ids` has all tokens after the prompt. The column `environment_rewards` has what the environment gave.
    """
    group = len(episodes) // len(chosen)
    columns = _repeated_columns(prompts, chosen, group)
    columns[ENVIRONMENT_REWARDS] = [None if np.isnan(e.reward) else e.reward for e in episodes]
    return RewardInputs(
        [episode.messages[: episode.first] for episode in episodes],
        [episode.messages[episode.first :] for episode in episodes],
        [episode.tokens.tolist() for episode in episodes],
        columns,
        [episode.place for episode in episodes],
    )


def _repeated_columns(prompts: AnyPrompts, chosen: Sequence[int], group: int) -> dict[str, list[Any]]:
    """Return the columns of prompts, each value once for every completion of its prompt."""
    return {
        name: [values[i] for i in chosen for _ in range(group)] for name, values in prompts.columns.items()
    }


def weighted_total(rewards: Sequence[Reward], each: np.ndarray) -> np.ndarray:
    """Add up rewards by function, float64 [N, functions], by their weights, float64 [N]; NaN without functions."""
    if not rewards:
        return np.full(len(each), np.nan)
    total = total_reward(each, np.array([reward.weight for reward in rewards]))
    beyond = np.abs(total) > LARGEST_REWARD
    if beyond.any():
        raise RunError(
            f"the weighted rewards of completion {int(beyond.argmax())} add up to {total[beyond][0]:g}; float32 holds "
            f"numbers up to {LARGEST_REWARD:.3g}: use smaller weights"
        )
    return total


def rollout_metrics(
    rewards: Sequence[Reward], each: np.ndarray, total: np.ndarray, samples: Rollouts, group: int
) -> dict[str, float]:
    """Measure a rollout, by the contract's names.

    Of completions that no reward scores it is the lengths alone. Within groups, `reward_std` and `frac_reward_zero_std`
    are over groups with at least two scored completions: NaN where there is none, left out where `group` is 1. Lengths
    are in tokens that the policy wrote. Terminated lengths are left out where no completion ended.
    """
    grouped = total.reshape(-1, group)
    compared = [values[~np.isnan(values)] for values in grouped]
    compared = [values for values in compared if len(values) > 1]
    lengths = np.asarray(samples.mask).sum(1)
    finished = np.asarray(samples.finished)
    scored = bool(rewards) or not np.isnan(total).all()
    out = {"reward": float(np.nanmean(total))} if scored else {}
    if scored and group > 1:
        out["reward_std"] = _mean([np.std(values, ddof=1) for values in compared])
        out["frac_reward_zero_std"] = _mean([all_equal(values) for values in compared])
    out["completions/mean_length"] = float(lengths.mean())
    out["completions/min_length"] = float(lengths.min())
    out["completions/max_length"] = float(lengths.max())
    ended = lengths[finished]
    if len(ended):
        out["completions/mean_terminated_length"] = float(ended.mean())
        out["completions/min_terminated_length"] = float(ended.min())
        out["completions/max_terminated_length"] = float(ended.max())
    out["completions/clipped_ratio"] = float(np.mean(~finished))
    for f, reward in enumerate(rewards):
        own = each[:, f][~np.isnan(each[:, f])]
        out[f"rewards/{reward.label}/mean"] = float(own.mean()) if len(own) else float("nan")
        out[f"rewards/{reward.label}/std"] = float(own.std(ddof=1)) if len(own) > 1 else float("nan")
        out[f"rewards/{reward.label}/unscored"] = float(np.isnan(each[:, f]).mean())
    return out


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def warn_of_unscored(stage: Stage, rewards: Sequence[Reward], rollout: Rollout) -> None:
    """Warn, once per reward, where it left more than UNSCORED of the completions without a value.

    A reward that applies to none of a prompt's completions may be meant for other prompts: these count where no reward
    applies. Failed episodes have a separate warning.
    """
    shape = len(rollout.prompts), rollout.group
    said = rollout.conversations
    held = np.array([True] * len(rollout.total) if said is None else [why is None for why in said.failures])
    alone = np.isnan(rollout.total).reshape(shape)
    for f, reward in enumerate(rewards):
        missing = np.isnan(rollout.rewards[:, f]).reshape(shape)
        count = int((missing & (alone | ~missing.all(1, keepdims=True)) & held.reshape(shape)).sum())
        if "unscored" in reward.told or count <= UNSCORED * len(held):
            continue
        reward.told.add("unscored")
        if stage.is_main:
            warn(
                f"stage '{stage.name}': reward '{reward.label}' left {count} of {len(held)} completions unscored "
                "(None): they are left out of its mean and, if no other reward scored them, of their groups. "
                f"They are null in samples/*.jsonl; the metric is rewards/{reward.label}/unscored"
            )
