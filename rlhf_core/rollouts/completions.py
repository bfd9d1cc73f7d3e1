"""Turn samples into the inputs of reward functions, and measure what the functions return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.contracts import LARGEST_REWARD, RewardInputs, all_equal, total_reward
from rlhf_core.data import EpisodeRows, Prompts
from rlhf_core.data.columns import is_blank
from rlhf_core.environments import Episode
from rlhf_core.errors import RunError
from rlhf_core.rewards.reward import Reward, score
from rlhf_core.rollouts.rollout import ENVIRONMENT_REWARDS
from rlhf_core.sampling import Rollouts
from rlhf_core.tokenizer.encoding import Turns, continuations


def completion(samples: Rollouts, i: int) -> NDArray[np.int32]:
    """Return the tokens of completion i, stop token included."""
    return np.asarray(samples.tokens[i, : samples.lengths[i]], np.int32)


def reward_inputs(
    prompts: Prompts,
    chosen: Sequence[int],
    samples: Rollouts,
    tokenizer: Any,
    stop_ids: Sequence[int] = (),
) -> RewardInputs:
    """Make the inputs of reward functions: texts that continue their prompts, or message lists for message prompts.

    stop_ids: tokens that end completions besides those of the tokenizer, `sampling.stop_token_ids`.
    """
    group = len(samples.lengths) // len(chosen)
    tokens = [completion(samples, i) for i in range(len(samples.lengths))]
    ids = [each.tolist() for each in tokens]
    rows = [i for i in chosen for _ in range(group)]
    raw = [prompts.raw[i] for i in rows]
    before = [prompts.ids[i] if isinstance(prompts.raw[i], str) else None for i in rows]
    texts = continuations(tokenizer, before, tokens, stop_ids)
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(raw, texts, strict=True)
    ]
    columns = {
        name: [values[i] for i in chosen for _ in range(group)] for name, values in prompts.columns.items()
    }
    return RewardInputs(raw, completions, ids, columns, [prompts.where(i) for i in rows])


def episode_inputs(
    prompts: Prompts | EpisodeRows, chosen: Sequence[int], episodes: Sequence[Episode]
) -> RewardInputs:
    """Make the inputs of reward functions from episodes: the messages that each began with, and those that followed.

    `completion_ids` has all tokens after the prompt. The column `environment_rewards` has what the environment gave.
    """
    group = len(episodes) // len(chosen)
    columns = {
        name: [values[i] for i in chosen for _ in range(group)] for name, values in prompts.columns.items()
    }
    columns[ENVIRONMENT_REWARDS] = [None if np.isnan(e.reward) else e.reward for e in episodes]
    return RewardInputs(
        [episode.messages[: episode.first] for episode in episodes],
        [episode.messages[episode.first :] for episode in episodes],
        [episode.tokens.tolist() for episode in episodes],
        columns,
        [episode.place for episode in episodes],
    )


def empty_warning(completions: Sequence[Turns]) -> str | None:
    """Return a warning if more than half of the completions, texts or message lists, are empty, else None."""
    empty = sum(map(is_blank, completions))
    if empty * 2 <= len(completions):
        return None
    return (
        f"{empty:,} of {len(completions):,} completions are empty: the model stops immediately, as chat models do "
        'after plain text; write prompts as messages, [{"role": "user", "content": …}], so that its chat template is '
        "used"
    )


def measure(
    rewards: Sequence[Reward], inputs: RewardInputs, *, needed: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Return rewards by function, float64 [N, functions], and their weighted sum, float64 [N]; needed: see `score`.

    Without functions there is nothing to score: [N, 0], and NaN.
    """
    if not rewards:
        count = len(inputs.completions)
        return np.zeros((count, 0)), np.full(count, np.nan)
    each = score(rewards, inputs, needed=needed)
    total = total_reward(each, np.array([reward.weight for reward in rewards]))
    if (beyond := np.abs(total) > LARGEST_REWARD).any():
        raise RunError(
            f"the weighted rewards of completion {int(beyond.argmax())} add up to {total[beyond][0]:g}; float32 holds "
            f"numbers up to {LARGEST_REWARD:.3g}: use smaller weights"
        )
    return each, total


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
    lengths, finished = np.asarray(samples.mask).sum(1), np.asarray(samples.finished)
    scored = bool(rewards) or not np.isnan(total).all()
    out = {"reward": float(np.nanmean(total))} if scored else {}
    if scored and group > 1:
        out["reward_std"] = _mean([np.std(values, ddof=1) for values in compared])
        out["frac_reward_zero_std"] = _mean([all_equal(values) for values in compared])
    out["completions/mean_length"] = float(lengths.mean())
    out["completions/min_length"] = float(lengths.min())
    out["completions/max_length"] = float(lengths.max())
    if len(ended := lengths[finished]):
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
