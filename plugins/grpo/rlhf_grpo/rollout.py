"""One rollout: completions of a set of prompts, their rewards, and the advantages that follow."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_core import AdvantageInputs, RewardInputs
from rlhf_core.artifacts import write_atomic
from rlhf_core.data import Prompts
from rlhf_core.errors import InputError, RunError, error_line
from rlhf_core.metrics import Max, Mean, Metric, Min, Sum
from rlhf_core.packing.rows import Tree
from rlhf_core.rollouts import completion, measure, reward_inputs, rollout_metrics
from rlhf_core.sampling import Rollouts
from rlhf_grpo.advantages import constant

if TYPE_CHECKING:
    from rlhf_core.data import Prompts
    from rlhf_core.rollouts import Reward


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
        raise RunError(f"{what} {error_line(error, HERE)}") from error
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


Sample = Callable[[Sequence[np.ndarray], int], Rollouts]
"""(prompts, round) → completions; the same prompts get others in another round."""


class Clock(NamedTuple):
    """What drawing took: seconds of the sampler and of the rewards, and the tokens that were sampled."""

    sampling: float = 0.0
    rewards: float = 0.0
    tokens: int = 0

    def metrics(self) -> dict[str, float | Metric]:
        """Report it for one update of those that use the rollout; nothing of it for the others."""
        out: dict[str, float | Metric] = {"time/rollout": self.sampling, "time/reward": self.rewards}
        if self.tokens:
            out["rollout/tokens_per_second"] = Mean(float(self.tokens), self.sampling)
        return out


class Draw(NamedTuple):
    """P prompts with their N = P × num_generations completions, group after group, scored."""

    prompts: NDArray[np.int64]
    """int64 [P]: rows of the prompt dataset."""
    samples: Rollouts
    inputs: RewardInputs
    """What the reward functions were given."""
    each: NDArray[np.float64]
    """float64 [N, functions]; NaN where a function does not apply."""
    total: NDArray[np.float64]
    """float64 [N], the weighted sum."""
    clock: Clock = Clock()
    """Of everything that was drawn, whatever of it is here."""

    def take(self, groups: NDArray[np.intp]) -> Draw:
        """These groups, in this order."""
        size = len(self.total) // len(self.prompts)
        rows = (groups[:, None] * size + np.arange(size)).reshape(-1)
        chosen = rows.tolist()
        inputs = RewardInputs(
            prompts=[self.inputs.prompts[i] for i in chosen],
            completions=[self.inputs.completions[i] for i in chosen],
            completion_ids=[self.inputs.completion_ids[i] for i in chosen],
            columns={name: [values[i] for i in chosen] for name, values in self.inputs.columns.items()},
        )
        samples = Rollouts(*(values[rows] for values in self.samples))
        return Draw(self.prompts[groups], samples, inputs, self.each[rows], self.total[rows], self.clock)


def draw(
    sample: Sample,
    prompts: Prompts,
    tokenizer: Any,
    rewards: Sequence[Reward],
    batches: Callable[[int], NDArray[np.int64]],
    *,
    max_rounds: int = 1,
    stop_ids: Sequence[int] = (),
) -> tuple[Draw, dict[str, float], int]:
    """One rollout, its metrics, and how many rounds it took.

    batches: round → int64 [P], the prompts of that round.

    With one round, everything that was drawn is the rollout. With more, groups whose rewards are all equal are left
    out and the next P prompts are drawn, until P groups are there (DAPO, Yu et al. 2025, section 3.2), what is
    more left out as well; where `max_rounds` do not give enough, equal groups, first drawn first, fill the rollout up.
    Metrics are of all that was drawn: those of the groups that are kept would say nothing of the policy.
    """
    drawn: list[Draw] = []
    failed = {reward.label: reward.failures for reward in rewards if reward.on_error == "skip"}
    wanted = kept = 0
    for number in range(max_rounds):
        chosen = batches(number)
        wanted = len(chosen)
        each_round = answer(sample, prompts, tokenizer, rewards, chosen, number, stop_ids=stop_ids)
        drawn.append(each_round)
        kept += int((~_equal(each_round)).sum())
        if kept >= wanted:
            break
    whole = drawn[0] if len(drawn) == 1 else _joined(drawn)
    group = len(whole.total) // len(whole.prompts)
    metrics = rollout_metrics(rewards, whole.each, whole.total, whole.samples, group)
    metrics |= {
        f"rewards/{reward.label}/failed": float(reward.failures - failed[reward.label])
        for reward in rewards
        if reward.label in failed
    }
    if max_rounds == 1:
        return whole, metrics, 1
    equal, filled_up = _equal(whole), max(wanted - kept, 0)
    metrics |= {
        "dynamic_sampling/rounds": float(len(drawn)),
        "dynamic_sampling/dropped": float(equal.sum() - filled_up),
        "dynamic_sampling/surplus": float(max(kept - wanted, 0)),
        "dynamic_sampling/filled_up": float(filled_up),
    }
    if kept < wanted:
        warnings.warn(
            f"{max_rounds} rounds of {wanted} prompts gave {kept} groups whose rewards differ; the rollout is filled "
            "up with groups that teach nothing. The prompts are too easy or too hard for the policy, or the reward is "
            "too coarse",
            stacklevel=2,
        )
    order = np.argsort(equal, kind="stable")[:wanted]
    return whole.take(np.sort(order)), metrics, len(drawn)


def merging(metrics: Mapping[str, float], *, once: bool) -> dict[str, float | Metric]:
    """Turn a rollout's metrics into those of an update that uses it: counts add up, extremes stay extremes.

    once: False where another update has counted what is counted already.
    """
    out: dict[str, float | Metric] = dict(metrics)
    for name, value in metrics.items():
        if name.endswith("/failed"):
            out[name] = Sum(value if once else 0.0)
        elif name.startswith(("completions/min_", "completions/max_")):
            del out[name]
            if np.isfinite(value):
                out[name] = Min(value) if "/min_" in name else Max(value)
    return out


def answer(
    sample: Sample,
    prompts: Prompts,
    tokenizer: Any,
    rewards: Sequence[Reward],
    chosen: NDArray[np.int64],
    number: int = 0,
    *,
    needed: bool = True,
    stop_ids: Sequence[int] = (),
) -> Draw:
    """Completions of the `chosen` prompts, int64 [P], scored. needed: see `score`. stop_ids: see `reward_inputs`."""
    ids = [prompts.ids[i] for i in chosen]
    began = time.perf_counter()
    samples = sample(ids, number)  # NumPy arrays: they are there when it returns
    drawn = time.perf_counter()
    inputs = reward_inputs(prompts, chosen.tolist(), samples, tokenizer, stop_ids)
    each, total = measure(rewards, inputs, needed=needed)
    clock = Clock(drawn - began, time.perf_counter() - drawn, int(np.sum(samples.lengths)))
    return Draw(chosen, samples, inputs, each, total, clock)


def _equal(draw: Draw) -> NDArray[np.bool_]:
    """bool [P]: the group's rewards are all equal, so that it has no advantage."""
    return constant(draw.total.reshape(len(draw.prompts), -1))[:, 0]


def _joined(draws: Sequence[Draw]) -> Draw:
    inputs = [draw.inputs for draw in draws]
    return Draw(
        np.concatenate([draw.prompts for draw in draws]),
        Rollouts(*(np.concatenate(values) for values in zip(*(d.samples for d in draws), strict=True))),
        RewardInputs(
            prompts=[x for each in inputs for x in each.prompts],
            completions=[x for each in inputs for x in each.completions],
            completion_ids=[x for each in inputs for x in each.completion_ids],
            columns={name: [x for each in inputs for x in each.columns[name]] for name in inputs[0].columns},
        ),
        np.concatenate([draw.each for draw in draws]),
        np.concatenate([draw.total for draw in draws]),
        Clock(*(sum(values) for values in zip(*(draw.clock for draw in draws), strict=True))),
    )


def write_samples(
    path: Path, drawn: Draw, rewards: Sequence[Reward], advantages: np.ndarray | None = None
) -> None:
    """A line a completion: `prompt`, `completion`, `reward`, the weighted sum, `rewards`, {label: value, null where one
    does not apply}, `advantage`, where there are any, `length`, tokens, and `finished`, false where it was cut.
    """
    lines = []
    for i, text in enumerate(drawn.inputs.completions):
        line = {
            "prompt": drawn.inputs.prompts[i],
            "completion": text,
            "reward": _number(drawn.total[i]),
            "rewards": {reward.label: _number(drawn.each[i, f]) for f, reward in enumerate(rewards)},
            **({} if advantages is None else {"advantage": float(advantages[i])}),
            "length": int(drawn.samples.lengths[i]),
            "finished": bool(drawn.samples.finished[i]),
        }
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    write_atomic(path, "".join(lines))


def _number(x: float) -> float | None:
    return None if np.isnan(x) else float(x)
