"""Models that are saved in several files, however small they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlhf_core.models import weights


@pytest.fixture
def in_shards(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Write weights into files of so many bytes."""
    return lambda size: monkeypatch.setattr(weights, "SHARD_BYTES", size)
