"""Rollouts that a sampler outside of the trainer's devices writes while the trainer learns, in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import numpy as np

from rlhf_core.rewards.reward import snapshots
from rlhf_core.rollouts.journal import JournalEntry
from rlhf_core.runtime.signals import stop_if_asked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from rlhf_core.rollouts.collector import RolloutCollector
    from rlhf_core.rollouts.journal import Journal

T = TypeVar("T")
POLL_SECONDS = 0.2
"""Between two looks at whether the run was asked to stop, while it waits."""


class Order(NamedTuple):
    """A rollout to be sampled. taken: the rounds reserved for it. version: of the policy that it is meant for."""

    number: int
    taken: Sequence[int]
    version: int


class Flight:
    """A rollout that is being sampled.

    With rewards that hold weights on the trainer's devices, a thread only samples the first round, and the rest waits
    for `land`: two threads that run programs on the same devices could wait for each other. Else the thread does all,
    journals the rollout, and rewards score one rollout after another.
    """

    def __init__(
        self,
        collector: RolloutCollector,
        journal: Journal,
        order: Order,
        policy: Any,
        key: jax.Array,
        rounds: Sequence[NDArray[np.int64]],
        before: Flight | None,
    ) -> None:
        """policy: as `RolloutCollector.hand_over` returned it. rounds: the prompts of each round. before: the flight
        whose rewards come first; where that fails, this one does.
        """
        self.order, self._journal, self._collector = order, journal, collector
        batches = iter(rounds)

        def collect(drawn: Callable[[], Any] | None, may_score: Callable[[], object]) -> JournalEntry:
            rollout = collector.collect(
                policy,
                key,
                order.number,
                lambda: next(batches),
                version=order.version,
                drawn=drawn,
                may_score=may_score,
            )
            entry = JournalEntry(rollout, order.taken, snapshots(collector.rewards))
            journal.write(entry, collector.rewards)
            return entry

        self._collect = collect
        self._first: Future[Any] | None = None
        self._whole: Future[JournalEntry] | None = None
        if any(reward.collective for reward in collector.rewards):
            ids = np.arange(len(rounds[0]) * collector.options.num_generations)
            self._first = in_thread(lambda: collector.draw(policy, rounds[0], key, ids))
        else:
            turn = None if before is None else before._whole
            self._whole = in_thread(lambda: collect(None, lambda: turn is None or turn.result()))

    def land(self) -> JournalEntry:
        """Wait for the whole rollout. Raises what sampling or scoring raised, and Stopped after a signal."""
        if self._whole is not None:
            return result_of(self._whole)
        assert self._first is not None
        drawn = result_of(self._first)
        return self._collect(lambda: drawn, lambda: None)


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Run a function in a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def result_of(future: Future[T]) -> T:
    """Wait for a result, unless the run is asked to stop."""
    while True:
        try:
            return future.result(POLL_SECONDS)
        except TimeoutError:
            if future.done():  # it raised this itself
                raise
            stop_if_asked("while a rollout was sampled; it is sampled again")
