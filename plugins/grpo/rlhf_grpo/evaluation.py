"""Fixed prompts, answered with the same random keys whenever they are: what differs is the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.rollouts import rollout_metrics
from rlhf_core.sampling import Rollouts
from rlhf_grpo.rollout import Draw, answer, write_samples

if TYPE_CHECKING:
    from rlhf_core import Stage, TrainState
    from rlhf_core.data import Prompts
    from rlhf_core.rollouts import Reward

KEY_NUMBER = 2**31 - 1
"""Folded into the state's key for fixed prompts; rollouts count from 0."""


@dataclass(frozen=True)
class FixedPrompts:
    """The first `count` prompts of a data set, `shown` of them, evenly spread, to be read.

    Of these DIR/samples/evaluation-NNNNNN.jsonl has the completions with every reward after update NNNNNN. group:
    completions a prompt. kept: the updates whose file this process has written.
    """

    stage: Stage
    sampler: Any
    prompts: Prompts
    tokenizer: Any
    rewards: Sequence[Reward]
    group: int
    count: int
    shown: int
    pass_threshold: float | None = None
    stop_ids: Sequence[int] = ()
    kept: set[int] = field(default_factory=set)
    stored: Callable[[Any], Any] = lambda params: params
    """Makes of the state's parameters what is read, such as `Model.as_stored`."""

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Metrics over completions of all prompts, by the contract's names."""
        drawn = self._answer(state, np.arange(self.count))
        if self.shown:
            self._keep(int(state.step), drawn.take(self._spread()))
        total = drawn.total
        metrics = rollout_metrics(self.rewards, drawn.each, total, drawn.samples, self.group)
        scored = total[~np.isnan(total)]
        metrics["reward_std_all"] = float(scored.std(ddof=1)) if len(scored) > 1 else float("nan")
        if self.pass_threshold is not None:
            metrics |= pass_at_k((total >= self.pass_threshold).reshape(self.count, -1))
        return metrics

    def preview(self, step: int, state: TrainState) -> None:
        """Keep what is to be read of `state`, after `step` updates, unless an evaluation has done so."""
        if self.shown and step not in self.kept:
            chosen = self._spread()
            self.stage.say(f"answering {len(chosen)} prompts for samples/evaluation-{step:06d}.jsonl")
            self._keep(step, self._answer(state, chosen, needed=False))

    def _spread(self) -> NDArray[np.int64]:
        return np.linspace(0, self.count - 1, min(self.shown, self.count)).astype(np.int64)

    def _answer(self, state: TrainState, chosen: NDArray[np.int64], *, needed: bool = True) -> Draw:
        key = jax.random.fold_in(state.key, KEY_NUMBER)
        # A completion's key goes by its number among those of all prompts, whichever of them are answered.
        numbers = (chosen[:, None] * self.group + np.arange(self.group)).reshape(-1)

        params = self.stored(state.params)

        def sample(ids: Sequence[np.ndarray], _: int) -> Rollouts:
            drawn: Rollouts = self.sampler(params, ids, key, numbers)
            return drawn

        return answer(
            sample,
            self.prompts,
            self.tokenizer,
            self.rewards,
            chosen,
            needed=needed,
            stop_ids=self.stop_ids,
        )

    def _keep(self, step: int, drawn: Draw) -> None:
        self.kept.add(step)
        if self.stage.is_main:
            path = self.stage.dir / "samples" / f"evaluation-{step:06d}.jsonl"
            write_samples(path, drawn, self.rewards)


def pass_at_k(passed: NDArray[np.bool_]) -> dict[str, float]:
    """The chance that one of k completions passes, {"pass@1": …} for k = 1, 2, 4, … and n.

    passed: bool [prompts, n]. Unbiased: with c of n passed, 1 − C(n − c, k) / C(n, k) (Chen et al. 2021).
    """
    n = passed.shape[1]
    counts = passed.sum(1).tolist()
    ks = sorted({1 << i for i in range(n.bit_length()) if 1 << i <= n} | {n})
    return {f"pass@{k}": float(np.mean([1 - comb(n - c, k) / comb(n, k) for c in counts])) for k in ks}
