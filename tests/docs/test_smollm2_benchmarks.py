"""benchmarks/trust: the estimate of best-of-n, and the gold grades."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.plugins import load_file

REPOSITORY = Path(__file__).resolve().parents[2]
TRUST = REPOSITORY / "benchmarks" / "trust"
MODULES = ("task", "rewards", "judge", "measure", "pairs", "tasks", "topics", "calc")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a benchmark import its own modules and those of its example; others have some of the same names."""
    before = list(sys.path)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples" / "smollm2"))
    yield
    sys.path[:] = before
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_best_of_n_is_the_mean_over_all_draws(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TRUST))
    run: Any = load_file(TRUST / "run.py")
    rng = np.random.default_rng(0)
    proxy, gold = rng.normal(size=(3, 5)), rng.normal(size=(3, 5))
    expected = np.mean(
        [
            gold[row, max(draw, key=lambda i: proxy[row, i])]
            for row in range(3)
            for draw in combinations(range(5), n)
        ]
    )
    assert run.best_of_n(proxy, gold, n) == pytest.approx(expected, rel=1e-12)


@pytest.mark.usefixtures("modules")
def test_grades_are_the_share_of_the_parts_that_hold() -> None:
    task: Any = load_file(TRUST / "task.py")
    said = [
        [{"role": "assistant", "content": text}]
        for text in ("A red kite flies high.", "A blue kite flies high.")
    ]
    columns = {
        "needed": [["red", "kite"]] * 2,
        "banned": ["sea"] * 2,
        "least": [4] * 2,
        "limit": [9] * 2,
    }
    grades = task.gold(said, **columns)
    assert grades == [1.0, 0.75]
    assert task.right(said, **columns) == [1.0, 0.0]
