"""One rollout: completions of a set of prompts, their rewards, and the advantages that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core import AdvantageInputs, RewardInputs
from rlhf_core.data import Prompts
from rlhf_core.encoding import continuations
from rlhf_core.rows import Tree
from rlhf_core.sampling import Rollouts
from rlhf_grpo.advantages import total_reward
from rlhf_grpo.rewards import Reward, score


@dataclass
class Rollout:
    """Completions of prompts, group after group, and what is known of them."""

    number: int
    prompts: NDArray[np.int64]
    """int64 [P]: rows of the prompt dataset."""
    samples: Rollouts
    """N = P × num_generations completions."""
    rewards: NDArray[np.float64]
    """float64 [N, functions]; NaN where a function does not apply."""
    advantages: NDArray[np.float32]
    """float32 [N]."""

    def arrays(self) -> dict[str, np.ndarray]:
        """For a checkpoint."""
        return {
            "prompts": self.prompts,
            "rewards": self.rewards,
            "advantages": self.advantages,
            **{f"samples_{name}": getattr(self.samples, name) for name in Rollouts._fields},
        }

    @classmethod
    def from_arrays(cls, number: int, arrays: Any) -> Rollout:
        samples = Rollouts(**{name: np.asarray(arrays[f"samples_{name}"]) for name in Rollouts._fields})
        kept = {name: np.asarray(arrays[name]) for name in ("prompts", "rewards", "advantages")}
        return cls(number, samples=samples, **kept)


def completion(samples: Rollouts, i: int) -> NDArray[np.int32]:
    """The tokens of completion i, stop token included."""
    return np.asarray(samples.tokens[i, : samples.lengths[i]], np.int32)


def reward_inputs(prompts: Prompts, chosen: Sequence[int], samples: Rollouts, tokenizer: Any) -> RewardInputs:
    """What reward functions are called with; texts, which continue their prompts, or message lists where the prompt is
    one.
    """
    group = len(samples.lengths) // len(chosen)
    own = [completion(samples, i) for i in range(len(samples.lengths))]
    ids = [each.tolist() for each in own]
    asked = [i for i in chosen for _ in range(group)]
    raw = [prompts.raw[i] for i in asked]
    before = [prompts.ids[i] if isinstance(prompts.raw[i], str) else None for i in asked]
    texts = continuations(tokenizer, before, own)
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(raw, texts, strict=True)
    ]
    columns = {
        name: [values[i] for i in chosen for _ in range(group)] for name, values in prompts.columns.items()
    }
    return RewardInputs(raw, completions, ids, columns)


def measure(
    rewards: Sequence[Reward], inputs: RewardInputs, *, needed: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Rewards by function, float64 [N, functions], and their weighted sum, float64 [N]; needed: see `score`."""
    each = score(rewards, inputs, needed=needed)
    return each, total_reward(each, np.array([reward.weight for reward in rewards]))


def advantage_inputs(
    each: np.ndarray, total: np.ndarray, weights: Sequence[float], lengths: np.ndarray, group: int
) -> AdvantageInputs:
    return AdvantageInputs(
        rewards=total.reshape(-1, group),
        rewards_by_function=each.reshape(-1, group, each.shape[-1]),
        weights=np.asarray(weights, np.float64),
        lengths=np.asarray(lengths).reshape(-1, group),
    )


def rollout_metrics(
    rewards: Sequence[Reward], each: np.ndarray, total: np.ndarray, samples: Rollouts, group: int
) -> dict[str, float]:
    """The metrics of a rollout, by the contract's names."""
    grouped = total.reshape(-1, group)
    scored = ~np.isnan(grouped)
    spread = [float(np.std(g[s], ddof=1)) for g, s in zip(grouped, scored, strict=True) if s.sum() > 1]
    flat = [bool(np.ptp(g[s]) == 0) for g, s in zip(grouped, scored, strict=True) if s.any()]
    out = {
        "reward": float(np.nanmean(total)),
        "reward_std": float(np.mean(spread)) if spread else 0.0,
        "frac_reward_zero_std": float(np.mean(flat)),
        "completions/mean_length": float(np.mean(samples.lengths)),
        "completions/clipped_ratio": float(np.mean(~np.asarray(samples.finished))),
    }
    for f, reward in enumerate(rewards):
        own = each[:, f][~np.isnan(each[:, f])]
        out[f"rewards/{reward.label}/mean"] = float(own.mean()) if len(own) else float("nan")
        out[f"rewards/{reward.label}/std"] = float(own.std(ddof=1)) if len(own) > 1 else float("nan")
    return out


def group_trees(
    prompts: Prompts, rollout: Rollout, start: int, stop: int, *, mask_truncated: bool
) -> list[Tree]:
    """Groups start to stop of a rollout as trees: the prompt once, its completions as branches.

    A branch carries the sampler's log-probabilities, its advantage, and `index`, its number in the rollout.
    """
    samples = rollout.samples
    group = len(samples.lengths) // len(rollout.prompts)
    trees = []
    for g in range(start, stop):
        members = range(g * group, (g + 1) * group)
        branches = tuple(completion(samples, i) for i in members)
        off = [mask_truncated and not samples.finished[i] for i in members]
        trees.append(
            Tree(
                prefix=np.asarray(prompts.ids[rollout.prompts[g]], np.int32),
                branches=branches,
                weights=tuple(
                    np.full(len(branch), 0.0 if masked else 1.0, np.float32)
                    for branch, masked in zip(branches, off, strict=True)
                ),
                token_values={
                    "sampling_logps": tuple(
                        np.asarray(samples.logps[i, : samples.lengths[i]], np.float32) for i in members
                    )
                },
                sequence_values={
                    "advantages": rollout.advantages[members.start : members.stop],
                    "index": np.arange(members.start, members.stop, dtype=np.float32),
                },
            )
        )
    return trees
