"""Rollouts that are sampled in threads: whose rewards come first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core.errors import RunError
from rlhf_core.rollouts.flights import Flight, Order

PROMPTS = [np.array([4, 7, 9]), np.array([1, 2, 3])]


class Collector:
    """Notes what it is asked for; `hold` makes the sampling of a rollout wait, and `fail` ends it."""

    def __init__(self) -> None:
        self.rewards = [SimpleNamespace(label="r", collective=False, snapshot=None)]
        self.scored, self.rounds = list[int](), list[list[int]]()
        self.hold: dict[int, threading.Event] = {}
        self.fail: set[int] = set()

    def collect(
        self, policy: Any, key: Any, number: int, next_prompts: Callable[[], Any], **given: Any
    ) -> int:
        self.rounds.append(next_prompts().tolist())
        if number in self.hold:
            self.hold[number].wait(20)
        given["may_score"]()
        self.scored.append(number)
        if number in self.fail:
            raise RunError(f"rollout {number} failed")
        return number


@pytest.fixture(autouse=True)
def without_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.rollouts.flights.snapshots", lambda rewards: {})


def launch(collector: Any, number: int, before: Flight | None = None) -> Flight:
    journal: Any = SimpleNamespace(write=lambda entry, rewards: None)
    key: Any = f"key {number}"
    return Flight(collector, journal, Order(number, (number,), 0), "policy", key, PROMPTS, before)


def test_rewards_score_rollouts_in_their_order() -> None:
    """Though a later one is sampled first; where one fails, those after it do."""
    collector = Collector()
    collector.hold[0] = threading.Event()
    first = launch(collector, 0)
    second = launch(collector, 1, first)
    while len(collector.rounds) < 2:
        time.sleep(0.001)
    assert second._whole is not None
    with pytest.raises(TimeoutError):
        second._whole.result(0.05)
    assert collector.scored == []
    collector.hold[0].set()
    landed: Any = second.land().rollout
    assert landed == 1
    assert collector.scored == [0, 1]

    collector.fail.add(2)
    third = launch(collector, 2)
    with pytest.raises(RunError, match="rollout 2 failed"):
        launch(collector, 3, third).land()
    assert collector.scored == [0, 1, 2]
