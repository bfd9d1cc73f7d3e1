"""Which prompts a rollout draws, round after round of dynamic sampling, and how far through the epochs that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data import batch_rows, count_updates, visited_rows

if TYPE_CHECKING:
    from rlhf_grpo.config import GRPOConfig


class PromptOrder:
    """Shuffled epochs over the prompts, from which every round of a rollout takes the next `prompts_per_rollout`.

    draws: rounds that the epochs of the config have. extra_rounds: rounds after the first, of all rollouts so far: the
    prompts go on after them. rounds: of the newest rollout.
    """

    def __init__(self, config: GRPOConfig, count: int, *, seed: int) -> None:
        """count: prompts of the data set. seed: where the config has no shuffle_seed_train."""
        self.config, self.count = config, count
        self.seed = config.shuffle_seed_train if config.shuffle_seed_train is not None else seed
        self.draws = count_updates(count, config.prompts_per_rollout, config.num_train_epochs, None)
        self.extra_rounds, self.rounds = 0, 1

    def batches(self, number: int) -> Callable[[int], NDArray[np.int64]]:
        """Return a function: round → int64 [P], the prompts of that round of rollout `number`."""
        config = self.config
        order = batch_rows(
            self.count,
            config.prompts_per_rollout,
            seed=self.seed,
            shuffle=config.shuffle_train_dataset,
            start=number + self.extra_rounds,
        )
        return lambda _: np.asarray(next(order), np.int64)

    def took(self, rounds: int) -> None:
        """Count the rounds of the rollout that was just drawn."""
        self.extra_rounds, self.rounds = self.extra_rounds + rounds - 1, rounds

    def is_drawn_after(self, number: int) -> bool:
        """Whether the prompts of all epochs have been drawn after rollout `number`."""
        return number + 1 + self.extra_rounds >= self.draws

    def pace(self, done: int) -> float:
        """Divide the updates done by the epochs whose prompts they drew."""
        config = self.config
        number, within = divmod(done - 1, config.updates_per_rollout)
        before = number + self.extra_rounds - (self.rounds - 1)  # rounds of the rollouts before this one
        draws = before + self.rounds * (within + 1) / config.updates_per_rollout
        return done / (draws * config.prompts_per_rollout / self.count)

    def drawn(self, step: int, extra_rounds: int) -> NDArray[np.int64]:
        """Return the prompts that the first `step` updates drew, with so many extra rounds."""
        config = self.config
        rounds = -(-step // config.updates_per_rollout) + extra_rounds
        shuffle = config.shuffle_train_dataset
        return visited_rows(self.count, rounds * config.prompts_per_rollout, seed=self.seed, shuffle=shuffle)
