"""Updates from rollouts, each of which serves one update or several."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.config.warnings import batch_warnings
from rlhf_core.fit.batches import EncodedRows, Update
from rlhf_core.metrics import Max, Metric, Min, Sum
from rlhf_core.packing.rows import Packed
from rlhf_core.rewards.reward import restore, snapshots
from rlhf_core.rollouts.collector import RolloutCollector
from rlhf_core.rollouts.prompt_order import PromptOrder
from rlhf_core.rollouts.rollout import Rollout, Timing
from rlhf_core.rollouts.shown import completion_lines
from rlhf_core.rollouts.warnings import RolloutWarnings
from rlhf_core.training.open import warn

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.stage import Stage
    from rlhf_core.state import TrainState


class RolloutUpdates(ABC):
    """The `UpdateSource` of a trainer that samples: update n belongs to rollout n div updates_per_rollout.

    A subclass has `shapes`, `complete` and `minibatches`; their number divides updates_per_rollout, so that the updates
    of a rollout go through its minibatches once or several times. The rollout is part of every checkpoint that lies
    within it, with all that `complete` computed from the policy of its start: a run that is resumed goes on with it.
    """

    def __init__(
        self,
        stage: Stage,
        config: TrainerConfig,
        collector: RolloutCollector,
        *,
        prompts_per_rollout: int,
        updates_per_rollout: int = 1,
        completions_to_print: int = 0,
    ) -> None:
        """completions_to_print: how many of a logged rollout are printed."""
        self.stage, self.collector, self.prompts = stage, collector, collector.prompts
        count, group = len(collector.prompts), collector.num_generations
        lines = batch_warnings(config, count, prompts_per_rollout=prompts_per_rollout, num_generations=group)
        warn(stage, lines)
        self.data: EncodedRows = collector.prompts
        self.updates_per_rollout = updates_per_rollout
        self.order = PromptOrder(
            config,
            len(collector.prompts),
            prompts_per_rollout=prompts_per_rollout,
            updates_per_rollout=updates_per_rollout,
            seed=stage.seed,
        )
        self.fixed_total, self.log_steps = config.max_training_steps is not None, config.log_steps
        self.total = config.max_training_steps or self.order.epoch_rounds * updates_per_rollout
        self.rollout: Rollout | None = None
        self.packed: Sequence[Sequence[Packed]] = []
        self.timing = Timing()  # of a rollout that no update has reported yet
        self.warnings = RolloutWarnings(stage)
        self.completions_to_print = completions_to_print

    @abstractmethod
    def shapes(self) -> Sequence[Packed]:
        """Return an empty micro-batch of every shape that `minibatches` will return."""

    @abstractmethod
    def complete(self, rollout: Rollout, state: TrainState) -> Rollout:
        """Return the rollout with its advantages and token values, computed with the policy that sampled it."""

    @abstractmethod
    def minibatches(self, rollout: Rollout) -> Sequence[Sequence[Packed]]:
        """Return the micro-batches of each minibatch, a function of the completed rollout alone.

        Minibatch i of n has the i-th n-th of the prompts; `Packed.example` counts its trees.
        """

    def needs_state(self, step: int) -> bool:
        return self._needs_rollout(step)

    def _needs_rollout(self, step: int) -> bool:
        return self.rollout is None or self.rollout.number != step // self.updates_per_rollout

    def update(self, step: int, state: TrainState) -> Update:
        if self._needs_rollout(step):
            self._begin_rollout(step, state)
        assert self.rollout is not None
        minibatch, groups = step % len(self.packed), len(self.rollout.prompts) // len(self.packed)
        batches = self.packed[minibatch]
        within = self.rollout.tree_groups(minibatch * groups, (minibatch + 1) * groups)
        rows = self.rollout.prompts[np.asarray(within, np.int64)]
        tokens = sum(int(np.count_nonzero(batch.rows.visible_until)) for batch in batches)
        metrics = _update_metrics(self.rollout.metrics, first=step % self.updates_per_rollout == 0)
        timing, self.timing = self.timing.metrics(), Timing()
        if not self.collector.rewards:
            del timing["time/reward"]
        return Update(batches, tokens, lambda i: self.prompts.where(int(rows[i])), metrics, timing)

    def _begin_rollout(self, step: int, state: TrainState) -> None:
        """Collect and complete the rollout that update `step` begins."""
        number = step // self.updates_per_rollout
        if self.rollout is None:  # the sampler compiles
            count = self.order.prompts_per_rollout * self.collector.num_generations
            self.stage.say(f"drawing the first rollout, {count:,} completions")
        rollout = self.collector.collect(state, number, self.order.next_prompts(number))
        self.timing = rollout.timing
        self.order.add_rounds(rollout.rounds)
        self._end_with_epochs(number)
        self.warnings.check(number, rollout)
        self.rollout = self.complete(rollout, state)
        self.packed = self.minibatches(self.rollout)
        logged = (step + self.updates_per_rollout) // self.log_steps > step // self.log_steps
        if self.stage.is_main and (number == 0 or logged):
            self.rollout.write(
                self.stage.dir / "samples" / f"update-{step:06d}.jsonl", self.collector.rewards
            )
            for lines in completion_lines(self.rollout, self.collector.rewards, self.completions_to_print):
                self.stage.say(f"update {step + 1:,}, {lines}")

    def _end_with_epochs(self, number: int) -> None:
        """Make rollout `number` the last one where it takes the last prompts of all epochs."""
        if not self.fixed_total and self.order.ends_with(number):
            self.total = min(self.total, (number + 1) * self.updates_per_rollout)

    def _warn_of_other_answers(self, step: int) -> None:
        """Warn that episodes begin again, where the environment may answer them in another way."""
        source = self.collector.episodes
        if step and source is not None and not source.calls.deterministic and self.stage.is_main:
            warnings.warn(
                f"stage '{self.stage.name}'.environment: '{source.calls.name}' is not deterministic: episodes "
                "that were held after the checkpoint begin again and may go another way",
                stacklevel=2,
            )

    def epochs(self, step: int) -> float:
        return self.order.epochs(step)

    def snapshot(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        host = {"extra_rounds": self.order.extra_rounds, "rewards": snapshots(self.collector.rewards)}
        if self.rollout is None or self._needs_rollout(step):
            return host, {}
        host |= {"rollout": self.rollout.number, "metrics": self.rollout.metrics, "rounds": self.order.rounds}
        return host, self.rollout.arrays()

    def restore(self, step: int, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        self.order.extra_rounds, self.order.rounds = host["extra_rounds"], host.get("rounds", 1)
        if step:
            self._end_with_epochs((step - 1) // self.updates_per_rollout)
        restore(self.collector.rewards, host["rewards"])
        if "rollout" not in host:
            self._warn_of_other_answers(step)
            return
        self.rollout = Rollout.from_arrays(
            arrays, number=host["rollout"], rounds=host["rounds"], metrics=dict(host["metrics"])
        )
        self.packed = self.minibatches(self.rollout)


def _update_metrics(metrics: Mapping[str, float], *, first: bool) -> dict[str, float | Metric]:
    """Turn a rollout's metrics into those of an update that uses it: counts add up, extremes stay extremes.

    first: whether it is the first update of the rollout, the only one that counts what is counted.
    """
    out: dict[str, float | Metric] = dict(metrics)
    for name, value in metrics.items():
        if name.endswith("/failed"):
            out[name] = Sum(value if first else 0.0)
        elif name.startswith(("completions/min_", "completions/max_")):
            del out[name]
            if np.isfinite(value):
                out[name] = Min(value) if "/min_" in name else Max(value)
    return out
