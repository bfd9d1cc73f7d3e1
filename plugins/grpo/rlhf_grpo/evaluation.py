"""Held-out prompts: mean rewards and pass@k of the policy as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_grpo.rollout import measure, reward_inputs

if TYPE_CHECKING:
    from rlhf_core import TrainState
    from rlhf_core.data import Prompts
    from rlhf_grpo.rewards import Reward

KEY_NUMBER = 2**31 - 1
"""Folded into the state's key for evaluations; rollouts count from 0."""


def evaluator(
    sampler: Any,
    prompts: Prompts,
    tokenizer: Any,
    rewards: Sequence[Reward],
    *,
    count: int,
    pass_threshold: float | None,
) -> Callable[[TrainState], dict[str, float]]:
    """A function of the state: metrics over completions of the first `count` prompts, by the contract's names."""
    chosen = list(range(count))
    ids = [prompts.ids[i] for i in chosen]

    def evaluate(state: TrainState) -> dict[str, float]:
        # The same keys every time: a difference between two evaluations is the policy's.
        samples = sampler(state.params, ids, jax.random.fold_in(state.key, KEY_NUMBER))
        each, total = measure(rewards, reward_inputs(prompts, chosen, samples, tokenizer))
        scored = total[~np.isnan(total)]
        metrics = {
            "reward": float(scored.mean()),
            "reward_std": float(scored.std(ddof=1)) if len(scored) > 1 else 0.0,
            "completions/mean_length": float(np.mean(samples.lengths)),
            "completions/clipped_ratio": float(np.mean(~samples.finished)),
        }
        for f, reward in enumerate(rewards):
            own = each[:, f][~np.isnan(each[:, f])]
            metrics[f"rewards/{reward.label}/mean"] = float(own.mean()) if len(own) else float("nan")
        if pass_threshold is not None:
            metrics |= pass_at_k((total >= pass_threshold).reshape(count, -1))
        return metrics

    return evaluate


def pass_at_k(passed: NDArray[np.bool_]) -> dict[str, float]:
    """The chance that one of k completions passes, {"pass@1": …} for k = 1, 2, 4, … and n.

    passed: bool [prompts, n]. Unbiased: with c of n passed, 1 − C(n − c, k) / C(n, k) (Chen et al. 2021).
    """
    n = passed.shape[1]
    counts = passed.sum(1).tolist()
    ks = sorted({1 << i for i in range(n.bit_length()) if 1 << i <= n} | {n})
    return {f"pass@{k}": float(np.mean([1 - comb(n - c, k) / comb(n, k) for c in counts])) for k in ks}
