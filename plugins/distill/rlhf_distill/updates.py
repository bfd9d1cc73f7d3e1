"""What distillation makes of the student's own completions, alone or with those of the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.fit import Update, UpdateSource
from rlhf_core.packing import Layout, Packed, pack
from rlhf_core.rollouts import Rollout, RolloutUpdates

if TYPE_CHECKING:
    from rlhf_core import TrainState


class DistillSteps:
    """Cuts what the student sampled into updates of `size` completions."""

    token_names = sequence_names = ()

    def __init__(self, prompts: Any, layout: Layout, size: int) -> None:
        self.prompts, self.layout, self.size = prompts, layout, size

    def prepare(self, rollout: Rollout, state: TrainState) -> Rollout:
        return rollout

    def minibatches(self, rollout: Rollout) -> list[list[Packed]]:
        starts = range(0, len(rollout.prompts), self.size)
        return [pack(rollout.trees(self.prompts, at, at + self.size), self.layout) for at in starts]


class WithGiven:
    """An `UpdateSource` whose updates have the examples of two: `count` sampled ones, and those of `given`."""

    def __init__(self, sampled: RolloutUpdates, given: UpdateSource, count: int) -> None:
        self.sampled, self.given, self.count = sampled, given, count
        self.data = _BothRows(sampled.prompts, given.data, len(sampled.prompts))

    @property
    def total(self) -> int:
        return self.sampled.total

    def shapes(self) -> list[Packed]:
        return [*self.sampled.shapes(), *self.given.shapes()]

    def needs_state(self, step: int) -> bool:
        return self.sampled.needs_state(step)

    def update(self, step: int, state: TrainState) -> Update:
        sampled, given, count = self.sampled.update(step, state), self.given.update(step, state), self.count
        numbered = [
            batch._replace(example=np.where(batch.example < 0, -1, batch.example + count))
            for batch in given.batches
        ]
        return sampled._replace(
            batches=[*sampled.batches, *numbered],
            tokens=sampled.tokens + given.tokens,
            where=lambda i: sampled.where(i) if i < count else given.where(i - count),
        )

    def epochs(self, step: int) -> float:
        return self.sampled.epochs(step)

    def snapshot(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        host, arrays = self.sampled.snapshot(step)
        return {"sampled": host, "given": self.given.snapshot(step)[0]}, arrays

    def restore(self, step: int, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        self.sampled.restore(step, host["sampled"], arrays)
        self.given.restore(step, host["given"], {})


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
