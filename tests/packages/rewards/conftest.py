"""The workers of reward functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rlhf_core.workers import pool


@pytest.fixture(scope="module")
def close_workers() -> Iterator[Callable[[], None]]:
    """End all workers when it is called, as a run does at its end, and after a file's tests."""
    yield pool.close
    pool.close()
