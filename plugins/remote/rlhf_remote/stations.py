"""The engines of a run: the policies that each holds, whether it answers, and the choice of the next one to ask."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlhf_remote.engines import Needs

T = TypeVar("T")
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0
"""Seconds before an engine that failed is tried again, doubled each time up to the second number."""


@dataclass(frozen=True)
class PublishedPolicy:
    """A policy that was published. name: of the adapter, which no other run has on the same engine."""

    name: str
    path: Path
    version: int


class Station:
    """One engine, which policies it holds, and whether it answers."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.url = engine, engine.url
        self.changed = threading.Condition()
        self.loaded: set[str] = set()
        self.adapters: set[str] = set()
        """Names that it was given and may still hold, also where it has failed since."""
        self.cleaned: set[str] = set()
        """How the names of runs begin whose adapters were looked for that a kill left."""
        self.shown: dict[str, tuple[float, float]] = {}
        """{policy: (the largest difference of its newest receipt, seconds that loading it took)}"""
        self.examined: Needs | None = None
        """What it was last found to meet; None since it failed. Another run of this process may need more."""
        self.active = self.chosen = self.failures = 0
        self.retry_at = 0.0

    def cost(self, policy: PublishedPolicy, *, exclusive: bool) -> int:
        """Order engines by how soon they can begin a request for a policy."""
        held = policy.name in self.loaded
        return self.chosen + (not held) + (1000 if exclusive and not held and self.active else 0)

    @contextmanager
    def holding(
        self, policy: PublishedPolicy, load: Callable[[], None], *, exclusive: bool, alone: bool
    ) -> Iterator[None]:
        """Keep a policy loaded inside the block, whose receipt `load` has checked.

        exclusive: the engine holds one policy at a time: wait until nothing runs with another one. alone: its receipt
        must not be computed together with other requests.
        """
        with self.changed:
            while (exclusive or alone) and self.active and policy.name not in self.loaded:
                self.changed.wait()
            if policy.name not in self.loaded:
                if exclusive:
                    self.loaded.clear()
                load()
                self.loaded.add(policy.name)
            self.active += 1
        try:
            yield
        finally:
            with self.changed:
                self.active -= 1
                self.changed.notify_all()

    def fail(self) -> None:
        """Leave the engine out for a while; requests that fail together count once."""
        with self.changed:
            self.loaded.clear()
            self.examined = None
            now = time.monotonic()
            if now >= self.retry_at:
                self.failures += 1
                self.retry_at = now + min(FIRST_WAIT * 2 ** (self.failures - 1), LONGEST_WAIT)


_CHOOSING = threading.Lock()


@contextmanager
def choose(
    stations: Sequence[Station], policy: PublishedPolicy, *, exclusive: bool
) -> Iterator[Station | None]:
    """Pick the engine that can begin soonest, and count it busy in the block; None if none is to be tried now."""
    with _CHOOSING:
        now = time.monotonic()
        up = [station for station in stations if station.retry_at <= now]
        station = min(up, key=lambda each: each.cost(policy, exclusive=exclusive), default=None)
        if station is not None:
            station.chosen += 1
    try:
        yield station
    finally:
        with _CHOOSING:
            if station is not None:
                station.chosen -= 1


class Threads:
    """Runs functions in threads, at most so many at a time.

    A stopped process does not wait for them, as it would for those of an executor, whose requests may take minutes.
    """

    def __init__(self, most: int) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._most, self._started = most, 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have a thread call a function. Called by any thread: one more than needed may start."""
        future: Future[T] = Future()
        self._work.put((future, work))
        if self._started < self._most:
            self._started += 1
            threading.Thread(target=self._run, daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            future, work = self._work.get()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
