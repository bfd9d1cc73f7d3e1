"""The order in which rollouts take their prompts, round after round, and how far through the epochs that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data import batch_rows, count_updates

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig


class PromptOrder:
    """Shuffled epochs over the prompts, of which every round of a rollout takes the next `prompts_per_rollout`.

    epoch_rounds: rounds in the config's epochs. extra_rounds: rounds after the first, summed over all rollouts so far;
    later rollouts go on after them. rounds: of the newest rollout.
    """

    def __init__(
        self,
        config: TrainerConfig,
        count: int,
        *,
        prompts_per_rollout: int,
        updates_per_rollout: int,
        seed: int,
    ) -> None:
        """count: prompts of the dataset. seed: used where the config has no shuffle_seed_train."""
        self.count, self.prompts_per_rollout = count, prompts_per_rollout
        self.updates_per_rollout = updates_per_rollout
        self.shuffle = config.shuffle_train_dataset
        self.seed = config.shuffle_seed_train if config.shuffle_seed_train is not None else seed
        self.epoch_rounds = count_updates(count, prompts_per_rollout, config.num_train_epochs, None)
        self.extra_rounds, self.rounds = 0, 1

    def next_prompts(self, number: int) -> Callable[[], NDArray[np.int64]]:
        """Return a function that gives the prompts of rollout `number`, int64 [P], another round with each call."""
        order = batch_rows(
            self.count,
            self.prompts_per_rollout,
            seed=self.seed,
            shuffle=self.shuffle,
            start=number + self.extra_rounds,
        )
        return lambda: np.asarray(next(order), np.int64)

    def add_rounds(self, rounds: int) -> None:
        """Count the rounds of the newest rollout."""
        self.extra_rounds, self.rounds = self.extra_rounds + rounds - 1, rounds

    def ends_with(self, number: int) -> bool:
        """Return whether rollout `number` takes the last prompts of all epochs."""
        return number + 1 + self.extra_rounds >= self.epoch_rounds

    def epochs(self, step: int) -> float:
        """Return how many passes over the prompts the first `step` updates make, of the newest rollout or later."""
        number, within = divmod(step - 1, self.updates_per_rollout)
        before = number + self.extra_rounds - (self.rounds - 1)  # rounds of the rollouts before this one
        rounds = before + self.rounds * (within + 1) / self.updates_per_rollout
        return rounds * self.prompts_per_rollout / self.count
