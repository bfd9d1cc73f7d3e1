"""Completions of fixed prompts, always with the same random keys: what evaluates and shows a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import comb
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.errors import InputError, RunError, counted, warn
from rlhf_core.fit.actions import Action, Moment, When
from rlhf_core.fit.evaluation import EvaluationMetrics
from rlhf_core.rollouts.collector import RolloutCollector
from rlhf_core.rollouts.open_collector import warm_up
from rlhf_core.rollouts.rollout import Rollout, completion_lines

if TYPE_CHECKING:
    from rlhf_core.models import Model
    from rlhf_core.state import TrainState

KEY_NUMBER = 2**31 - 1
"""Folded into the state's key for fixed prompts; rollouts count from 0."""


@dataclass(frozen=True)
class FixedPrompts:
    """The first `count` prompts of the collector, `previewed` of which, evenly spread, are written to be read.

    After update NNNNNN, DIR/samples/NAME-NNNNNN.jsonl has their completions with every reward. An evaluation has each
    prompt's mean reward, None where nothing scored it. Only the policy differs from one evaluation to the next.

    stored: makes the parameters that are read from those of the state, such as `Model.as_stored`.
    pass_threshold: the reward from which on a completion has passed; None: pass@k is not reported.
    measure: further metrics of an evaluation's rollout, and values by prompt, from the state that wrote it.
    name: of the files, and of the event that tells loggers. seed: of the random keys; None: the state's key.
    prints: whether the completions are printed. logs: whether loggers are told.
    """

    collector: RolloutCollector
    count: int
    previewed: int
    stored: Callable[[Any], Any] = lambda params: params
    pass_threshold: float | None = None
    written: set[int] = field(default_factory=set)
    """Updates whose file this process has written."""
    measure: Callable[[Rollout, TrainState], tuple[Mapping[str, float], Mapping[str, Any]]] | None = None
    name: str = "evaluation"
    seed: int | None = None
    prints: bool = False
    logs: bool = True

    def warm_up(self, model: Model) -> None:
        """Start to compile the sampler for these prompts."""
        warm_up(self.collector.sampler, model, self.collector.prompts.sizes[: self.count])

    def evaluate(self, state: TrainState) -> EvaluationMetrics:
        """Return metrics over completions of all prompts, by the names of the metrics page, and values of each."""
        rollout = self._sample(state, np.arange(self.count))
        if self.previewed:
            self._write(int(state.step), rollout.take(self._spread()))
        metrics = self.collector.metrics(rollout)
        total = rollout.total
        scored = total[~np.isnan(total)]
        if self.collector.rewards:
            metrics["reward_std_all"] = float(scored.std(ddof=1)) if len(scored) > 1 else float("nan")
        values: dict[str, Any] = {}
        if self.collector.rewards:
            values["reward"] = mean_rewards(total.reshape(self.count, -1))
        if self.measure is not None:
            measured, others = self.measure(rollout, state)
            metrics |= measured
            values |= others
        if self.pass_threshold is not None:
            metrics |= pass_at_k((total >= self.pass_threshold).reshape(self.count, -1))
        return EvaluationMetrics.of(metrics, self.collector.prompts.where, values)

    def previews(
        self, *, every: int | None = None, end: bool = True, name: str = "", bytes: int = 0
    ) -> Action:
        """Make the action that completes the prompts before the first update, every so many, and after the last one.

        every: None: not in between. end: whether after the last update, where an evaluation may do so. name, bytes: of
        the action. An error after the first update, such as a reward's, becomes a warning.
        """
        return Action(When(every, start=True, end=end), self._show, "show", name=name, bytes=bytes)

    def _show(self, at: Moment) -> None:
        """Write completions of the state at this moment, unless an evaluation has done so."""
        if not self.previewed or at.step in self.written:
            return
        stage = self.collector.stage
        chosen = self._spread()
        if not self.prints:
            stage.say(
                f"answering {counted(len(chosen), 'prompts')} for samples/{self.name}-{at.step:06d}.jsonl"
            )
        try:
            self._write(at.step, self._sample(at.state, chosen, required=False))
        except (InputError, RunError) as error:
            if at.starts:
                raise
            warn(f"stage '{stage.name}': the previews after update {at.step} are skipped: {error}")

    def _spread(self) -> NDArray[np.int64]:
        return np.linspace(0, self.count - 1, min(self.previewed, self.count)).astype(np.int64)

    def _sample(self, state: TrainState, chosen: NDArray[np.int64], *, required: bool = True) -> Rollout:
        key = (
            state.key if self.seed is None else jax.device_put(jax.random.key(self.seed), state.key.sharding)
        )
        key = jax.random.fold_in(key, KEY_NUMBER)
        group = self.collector.options.num_generations
        # A completion's random numbers go by its number among those of all prompts, whichever are completed.
        ids = (chosen[:, None] * group + np.arange(group)).reshape(-1)
        params = self.stored(self.collector.policy(state.params))
        policy = self.collector.hand_over(params, int(state.step))
        return self.collector.sample(policy, chosen, key, ids, required=required)

    def _write(self, step: int, rollout: Rollout) -> None:
        self.written.add(step)
        stage, rewards = self.collector.stage, self.collector.rewards
        if stage.is_main:
            rollout.write(stage.dir / "samples" / f"{self.name}-{step:06d}.jsonl", rewards)
        if self.prints:
            for lines in completion_lines(rollout, rewards, len(rollout.total)):
                stage.say(f"after update {step:,}, {lines}")
        if self.logs:
            rows = rollout.rows(rewards)
            stage.hook.rlhf_samples(stage=stage, step=step, name=self.name, rows=rows)


def mean_rewards(total: NDArray[np.float64]) -> list[float]:
    """Average the rewards of each prompt's completions, NaN where none is scored. total: float64 [prompts, n]."""
    scored = ~np.isnan(total)
    sums = np.where(scored, total, 0).sum(1).tolist()
    counts = scored.sum(1).tolist()
    return [value / count if count else float("nan") for value, count in zip(sums, counts, strict=True)]


def pass_at_k(passed: NDArray[np.bool_]) -> dict[str, float]:
    """Estimate the chance that one of k completions passes, {"pass@1": …} for k = 1, 2, 4, … and n.

    passed: bool [prompts, n]. Unbiased: with c of n passed, 1 − C(n − c, k) / C(n, k) (Chen et al. 2021).
    """
    n = passed.shape[1]
    counts = passed.sum(1).tolist()
    ks = sorted({1 << i for i in range(n.bit_length()) if 1 << i <= n} | {n})
    return {f"pass@{k}": float(np.mean([1 - comb(n - c, k) / comb(n, k) for c in counts])) for k in ks}
