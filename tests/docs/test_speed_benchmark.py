"""benchmarks/speed: every work runs, on a model of a few numbers; and what scripts import of ours exists."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.plugins import load_file

REPOSITORY = Path(__file__).resolve().parents[2]
SPEED = REPOSITORY / "benchmarks" / "speed"
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
def test_a_work_runs(work: str, runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SPEED))
    monkeypatch.chdir(tmp_path)
    steps = load_file(SPEED / "ours_steps.py")
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
