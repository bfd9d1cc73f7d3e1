"""One rollout: completions of a set of prompts, their rewards, and the advantages that follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core import AdvantageInputs
from rlhf_core.data import Prompts
from rlhf_core.errors import InputError, RunError, raised
from rlhf_core.packing.rows import Tree
from rlhf_core.rollouts import completion
from rlhf_core.sampling import Rollouts

HERE = str(Path(__file__).parent)
READ = "read_"
"""In front of the names of `Rollout.read` in a checkpoint."""


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
    read: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """float32 [N, C] each, what the policies said of the tokens when the rollout was drawn: `ref_logps`, `old_logps`,
    `entropies`, where they are needed."""

    def arrays(self) -> dict[str, np.ndarray]:
        """For a checkpoint."""
        return {
            "prompts": self.prompts,
            "rewards": self.rewards,
            "advantages": self.advantages,
            **{f"samples_{name}": getattr(self.samples, name) for name in Rollouts._fields},
            **{f"{READ}{name}": values for name, values in self.read.items()},
        }

    @classmethod
    def from_arrays(cls, number: int, arrays: Mapping[str, Any]) -> Rollout:
        samples = Rollouts(**{name: np.asarray(arrays[f"samples_{name}"]) for name in Rollouts._fields})
        kept = {name: np.asarray(arrays[name]) for name in ("prompts", "rewards", "advantages")}
        read = {key.removeprefix(READ): np.asarray(arrays[key]) for key in arrays if key.startswith(READ)}
        return cls(number, samples=samples, read=read, **kept)


def advantage_inputs(
    each: np.ndarray, total: np.ndarray, weights: Sequence[float], lengths: np.ndarray, group: int
) -> AdvantageInputs:
    return AdvantageInputs(
        rewards=total.reshape(-1, group),
        rewards_by_function=each.reshape(-1, group, each.shape[-1]),
        weights=np.asarray(weights, np.float64),
        lengths=np.asarray(lengths).reshape(-1, group),
    )


def advantages_of(
    advantage: Callable[[AdvantageInputs], Any], inputs: AdvantageInputs, *, name: str
) -> NDArray[np.float32]:
    """float32 [N], by the component called `name`.

    Raises RunError where it raises, or returns anything but a finite number a completion, [prompts, samples].
    """
    what, shape = f"advantage '{name}'", inputs.rewards.shape
    try:
        out = np.asarray(advantage(inputs), np.float32)
    except (InputError, RunError):
        raise
    except Exception as error:
        raise RunError(f"{what} {raised(error, HERE)}") from error
    if out.shape != shape:
        raise RunError(
            f"{what} returned an array of shape {list(out.shape)}; wanted is a number a completion, {list(shape)}: "
            "prompts, and samples of each"
        )
    if not np.isfinite(out).all():
        prompt, sample = np.argwhere(~np.isfinite(out))[0]
        raise RunError(
            f"{what} returned {out[prompt, sample]} for sample {sample} of prompt {prompt}, whose rewards are "
            f"{np.asarray(inputs.rewards)[prompt].tolist()}; advantages are finite, 0 where there is nothing to tell"
        )
    return out.reshape(-1)


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
