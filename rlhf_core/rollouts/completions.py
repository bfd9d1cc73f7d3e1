"""What was sampled, as reward functions read it, and what they say of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.contracts import RewardInputs
from rlhf_core.data import Prompts
from rlhf_core.data.conversations import is_blank
from rlhf_core.rewards.calls import score
from rlhf_core.rewards.reward import Reward
from rlhf_core.sampling import Rollouts
from rlhf_core.tokenizer.encoding import Turns, continuations

Floats = NDArray[np.float64]


def completion(samples: Rollouts, i: int) -> NDArray[np.int32]:
    """The tokens of completion i, stop token included."""
    return np.asarray(samples.tokens[i, : samples.lengths[i]], np.int32)


def reward_inputs(
    prompts: Prompts,
    chosen: Sequence[int],
    samples: Rollouts,
    tokenizer: Any,
    stop_ids: Sequence[int] = (),
) -> RewardInputs:
    """What reward functions are called with; texts, which continue their prompts, or message lists where the prompt is
    one. stop_ids: tokens that ended completions besides those that the tokenizer knows, `sampling.stop_token_ids`.
    """
    group = len(samples.lengths) // len(chosen)
    own = [completion(samples, i) for i in range(len(samples.lengths))]
    ids = [each.tolist() for each in own]
    asked = [i for i in chosen for _ in range(group)]
    raw = [prompts.raw[i] for i in asked]
    before = [prompts.ids[i] if isinstance(prompts.raw[i], str) else None for i in asked]
    texts = continuations(tokenizer, before, own, stop_ids)
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(raw, texts, strict=True)
    ]
    columns = {
        name: [values[i] for i in chosen for _ in range(group)] for name, values in prompts.columns.items()
    }
    return RewardInputs(raw, completions, ids, columns, [prompts.where(i) for i in asked])


def empty_warning(completions: Sequence[Turns]) -> str | None:
    """What to say of completions, texts or message lists, of which more than half are empty; None of any others."""
    empty = sum(map(is_blank, completions))
    if empty * 2 <= len(completions):
        return None
    return (
        f"{empty:,} of {len(completions):,} completions are empty: the model ends them at once, as chat models do "
        'after plain texts; write prompts as messages, [{"role": "user", "content": …}], so that its chat template is '
        "used"
    )


def measure(
    rewards: Sequence[Reward], inputs: RewardInputs, *, needed: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Rewards by function, float64 [N, functions], and their weighted sum, float64 [N]; needed: see `score`."""
    each = score(rewards, inputs, needed=needed)
    return each, total_reward(each, np.array([reward.weight for reward in rewards]))


def total_reward(by_function: Floats, weights: Floats) -> Floats:
    """The weighted sum over the functions that apply, [..., functions] → [...]; NaN where none does."""
    scored = ~np.isnan(by_function)
    total = np.where(scored, by_function * weights, 0.0).sum(-1)
    return np.where(scored.any(-1), total, np.nan)


def rollout_metrics(
    rewards: Sequence[Reward], each: np.ndarray, total: np.ndarray, samples: Rollouts, group: int
) -> dict[str, float]:
    """Measure a rollout, by the contract's names.

    Within groups, `reward_std` and `frac_reward_zero_std` are over groups with at least two scored completions: NaN
    where there is none, left out where `group` is 1. Terminated lengths are left out where no completion ended.
    """
    grouped = total.reshape(-1, group)
    compared = [values[~np.isnan(values)] for values in grouped]
    compared = [values for values in compared if len(values) > 1]
    lengths, finished = np.asarray(samples.lengths), np.asarray(samples.finished)
    out = {"reward": float(np.nanmean(total))}
    if group > 1:
        out["reward_std"] = _mean([np.std(values, ddof=1) for values in compared])
        out["frac_reward_zero_std"] = _mean([np.ptp(values) == 0 for values in compared])
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
    return out


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
