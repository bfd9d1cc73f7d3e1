"""benchmarks: tables are of their results, works run on a model of a few numbers, figures are counted by hand."""

from __future__ import annotations

import ast
import importlib
import shutil
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.plugins import load_file

REPOSITORY = Path(__file__).resolve().parents[2]
BENCHMARKS = REPOSITORY / "benchmarks"
SCRIPTS = {
    "speed/table.py": "docs/results/benchmarks.md",
    "growth/tables.py": "docs/results/benchmarks.md",
    "smollm2/table.py": "docs/results/learning.md",
    "trust/table.py": "docs/results/reward_benchmark.md",
}
"""{script below benchmarks: the page whose tables it writes}."""
OF_SEVERAL = ("task", "rewards", "judge", "measure", "pairs", "tasks", "topics", "calc")
"""Modules that more than one benchmark, or its example, has."""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Load a script of a benchmark, which imports modules beside it and those of its example."""
    for name in OF_SEVERAL:
        monkeypatch.delitem(sys.modules, name, raising=False)

    def call(script: str) -> Any:
        file = BENCHMARKS / script
        monkeypatch.syspath_prepend(str(REPOSITORY / "examples" / "smollm2"))
        monkeypatch.syspath_prepend(str(file.parent))
        return load_file(file)

    return call


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_tables_are_those_of_the_results(
    script: str, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, page, copy = load(script), REPOSITORY / SCRIPTS[script], tmp_path / "page.md"
    shutil.copy(page, copy)
    monkeypatch.setattr(table, "FILE", copy)
    table.main()
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8"), (
        f"run {Path(sys.executable).name} benchmarks/{script}"
    )


def test_products_by_hand(load: Any) -> None:
    """A reward step without a head costs 6 · N · tokens for the layers that compute every token, and attention.

    The last of four layers computes keys and values alone, but for the places that scores are read at.
    """
    tables = load("growth/tables.py")
    (row,) = (r for r in tables.read()["model"] if (r["work"], r["model"]) == ("W1", "10m"))
    layer, keys = row["matrix_parameters"] / 4, 2 * 256 * 128
    places = 8 * 32
    products = 6 * (3 * layer + keys) * row["tokens"] + 6 * (layer - keys) * places
    assert 1.0 < row["flops"] / products < 1.25
    assert tables.plain_flops(row) == 6 * row["matrix_parameters"] * row["tokens"]


def test_every_axis_has_its_table(load: Any) -> None:
    text = (REPOSITORY / SCRIPTS["growth/tables.py"]).read_text(encoding="utf-8")
    assert all(f"<!-- end of growth with {axis} -->" in text for axis in load("growth/tables.py").read())


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_best_of_n_is_the_mean_over_all_draws(n: int, load: Any) -> None:
    run = load("trust/run.py")
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


def test_grades_are_the_share_of_the_parts_that_hold(load: Any) -> None:
    task = load("trust/task.py")
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


SMALL = {"PAIRS": 2, "PAIR_TOKENS": 8, "PROMPTS": 2, "GROUP": 2, "PROMPT": 4, "COMPLETION": 4, "WARM_UP": 0}


@pytest.mark.parametrize(
    ("work", "runner"),
    [
        pytest.param("W1", "run_updates", marks=pytest.mark.long),
        pytest.param("W2", "run_updates", marks=pytest.mark.long),
        pytest.param("W3", "run_rollouts", marks=pytest.mark.long),
        pytest.param("W4", "run_trainer", marks=pytest.mark.long),
        ("W5", "run_log_probs"),
    ],
)
def test_a_work_runs(
    work: str, runner: str, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = load("speed/ours_steps.py")
    works: Any = steps.works
    for name, value in {**SMALL, "SEQUENCES": 2, "LENGTH": 8}.items():
        monkeypatch.setattr(works, name, value)
    model = works.Model(hidden=16, layers=1, heads=2, kv_heads=2, intermediate=16, vocab=256)
    monkeypatch.setattr(works, "MODELS", {"10m": model})
    monkeypatch.setattr(works, "WIDE", model)
    row = getattr(steps, runner)(works.Task(work, "10m", works.BETA, 1, None, None))
    assert row["seconds"]
    assert min(row["seconds"]) > 0


def test_what_scripts_import_of_ours_exists() -> None:
    missing = [
        f"{file.relative_to(REPOSITORY)}: {module}.{name}"
        for folder in ("benchmarks", "tests/recipes", "docs")
        for file in (REPOSITORY / folder).rglob("*.py")
        for module, name in _imports(file)
        if not _exists(module, name)
    ]
    assert not missing


def _imports(file: Path) -> list[tuple[str, str]]:
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlhf_") and node.module
        for alias in node.names
    ]


def _exists(module: str, name: str) -> bool:
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True
