"""Samplers of few slots, in which sequences take turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlhf_core.sampling import placement


@pytest.fixture
def in_slots(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give samplers that are made from now on so many slots, and at least `last` of them at the end of a call."""

    def set_to(count: int, last: int | None = None) -> None:
        monkeypatch.setitem(placement.SLOTS, "cpu", count)
        if last is not None:
            monkeypatch.setattr("rlhf_core.sampling.sampler.LAST_SLOTS", last)

    return set_to
