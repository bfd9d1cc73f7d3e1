"""Which prompts each rollout takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data import batch_rows, count_updates

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig


class PromptOrder:
    """Shuffled epochs over the prompts, or a stream of them, cut into rounds of `prompts_per_rollout`, which rollouts
    reserve.

    A rollout reserves as many rounds as it may take, of the lowest numbers, and gives back those that it did not need
    when it is trained on. So its prompts are a function of its number, and of the rollouts trained on before it was
    sampled, however long anything takes.

    epoch_rounds: rounds in the config's epochs. extra_rounds: rounds after the first, summed over the rollouts trained
    on so far. rounds: of the newest of these. following, returned: the rounds that are still to be reserved: all from
    the number `following` on, and those that were given back.
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
        """count: prompts of the dataset; 0: a stream, which has an order of its own. seed: used where the config has no
        shuffle_seed_train.
        """
        self.count, self.prompts_per_rollout = count, prompts_per_rollout
        self.updates_per_rollout = updates_per_rollout
        self.shuffle = config.shuffle_train_dataset
        self.seed = config.shuffle_seed_train if config.shuffle_seed_train is not None else seed
        self.epoch_rounds = count_updates(count, prompts_per_rollout, config.num_train_epochs, None)
        self.updates = config.max_training_steps
        self.extra_rounds, self.rounds = 0, 1
        self.following, self.returned = 0, list[int]()

    def reserve(self, rounds: int) -> list[int]:
        """Reserve the next rounds, and return their numbers."""
        taken, self.returned = self.returned[:rounds], self.returned[rounds:]
        first = self.following
        self.following += rounds - len(taken)
        return [*taken, *range(first, self.following)]

    def settle(self, taken: Sequence[int], rounds: int) -> None:
        """Count the rounds of a rollout that is trained on now, and give back the others of those it had reserved."""
        self.returned = sorted([*self.returned, *taken[rounds:]])
        self.extra_rounds = self.extra_rounds + rounds - 1
        self.rounds = rounds

    def prompts(self, number: int) -> NDArray[np.int64]:
        """Return the rows of round `number`, int64 [P]."""
        size = self.prompts_per_rollout
        if not self.count:
            return np.arange(number * size, (number + 1) * size)
        rounds = batch_rows(self.count, size, seed=self.seed, shuffle=self.shuffle, start=number)
        return np.asarray(next(rounds), np.int64)

    @property
    def exhausted(self) -> bool:
        """Whether all prompts of all epochs are reserved."""
        return min([self.following, *self.returned[:1]]) >= self.epoch_rounds

    def epochs(self, step: int) -> float:
        """Return how many passes over the prompts the first `step` updates make, of the newest rollout or later.

        Of a stream, whose length is not known, it is the share of the run.
        """
        if not self.count:
            return step / (self.updates or 1)
        number, within = divmod(step - 1, self.updates_per_rollout)
        before = number + self.extra_rounds - (self.rounds - 1)  # rounds of the rollouts before this one
        rounds = before + self.rounds * (within + 1) / self.updates_per_rollout
        return rounds * self.prompts_per_rollout / self.count
