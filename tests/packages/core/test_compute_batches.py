"""Evaluations keep the device busy and no more: two batches at most are dispatched and not read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core import reading as module
from rlhf_core.fit import evaluator
from rlhf_core.metrics import Mean


class Device:
    """Counts what was computed and not read yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there, self.most = 0, 0
        monkeypatch.setattr(module, "put_rows", lambda mesh, batch: batch)
        monkeypatch.setattr(module, "jax", SimpleNamespace(device_get=self.read))

    def compute(self, batch: int) -> Any:
        self.there += 1
        self.most = max(self.most, self.there)
        return Mean(np.float32(batch), np.float32(1)), {"double": Mean(np.float32(2 * batch), np.float32(1))}

    def read(self, result: Any) -> Any:
        self.there -= 1
        return result


def test_the_evaluator_of_every_trainer_goes_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    monkeypatch.setattr("rlhf_core.fit.evaluation.jax", SimpleNamespace(jit=lambda f: f))
    evaluate = evaluator(lambda params, batch: device.compute(batch), None, lambda: range(5))  # type: ignore[arg-type]
    assert evaluate(SimpleNamespace(params=None)) == {"loss": 2.0, "double": 4.0}  # type: ignore[arg-type]
    assert (device.most, device.there) == (2, 0)


def test_long_evaluations_say_how_far_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    device, now, said = Device(monkeypatch), [0.0], []

    def compute(batch: int) -> Any:
        now[0] += 2.0
        return device.compute(batch)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    list(module.compute_batches(compute, None, range(40), said.append))  # type: ignore[arg-type]
    assert said == ["evaluating 3/40", "evaluating 29/40"]
    said.clear()
    list(module.compute_batches(compute, None, range(2), said.append))  # type: ignore[arg-type]
    assert said == []


def test_only_what_is_slow_is_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    said: list[str] = []
    with module.say_if_slow(said.append, "quick"):
        pass
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.01)
    with module.say_if_slow(said.append, "slow"):
        time.sleep(0.5)
    assert said == ["slow"]
