"""Updates from the student's own completions, alone or beside those of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.fit import DatasetUpdates, Update, empty_batches
from rlhf_core.packing import Layout, Packed, pack
from rlhf_core.rollouts import Rollout, RolloutCollector, RolloutUpdates

if TYPE_CHECKING:
    from rlhf_core import Stage, TrainState
    from rlhf_distill.config import DistillConfig


class DistillUpdates(RolloutUpdates):
    """Every update trains on completions that the student samples, and on given ones where there are any."""

    def __init__(
        self,
        stage: Stage,
        config: DistillConfig,
        collector: RolloutCollector,
        layout: Layout,
    ) -> None:
        super().__init__(
            stage,
            config,
            collector,
            prompts_per_rollout=config.sampled_per_update * config.steps_per_generation,
            updates_per_rollout=config.steps_per_generation,
        )
        self.config, self.layout = config, layout
        self.given: DatasetUpdates | None = None

    def add_given(self, given: DatasetUpdates) -> None:
        """Add the examples of `given` to every update."""
        self.given, self.data = given, _BothRows(self.prompts, given.data, len(self.prompts))

    def shapes(self) -> list[Packed]:
        return [*empty_batches(self.layout), *(self.given.shapes() if self.given else ())]

    def complete(self, rollout: Rollout, state: TrainState) -> Rollout:
        return rollout

    def minibatches(self, rollout: Rollout) -> list[list[Packed]]:
        size = self.config.sampled_per_update
        starts = range(0, len(rollout.prompts), size)
        return [pack(rollout.trees(self.prompts, at, at + size), self.layout) for at in starts]

    def update(self, step: int, state: TrainState) -> Update:
        sampled = super().update(step, state)
        if self.given is None:
            return sampled
        given, count = self.given.update(step), self.config.sampled_per_update
        numbered = [
            batch._replace(example=np.where(batch.example < 0, -1, batch.example + count))
            for batch in given.batches
        ]
        return sampled._replace(
            batches=[*sampled.batches, *numbered],
            tokens=sampled.tokens + given.tokens,
            where=lambda i: sampled.where(i) if i < count else given.where(i - count),
        )


@dataclass(frozen=True)
class _BothRows:
    """The rows of prompts, followed by those of given completions."""

    prompts: Any
    given: Any
    count: int
    """Of prompts."""

    def __len__(self) -> int:
        return self.count + len(self.given)

    def where(self, i: int) -> str:
        return str(self.prompts.where(i) if i < self.count else self.given.where(i - self.count))
