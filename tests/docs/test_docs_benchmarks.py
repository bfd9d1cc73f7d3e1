"""The pages of docs/results hold the figures that were measured."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.plugins import load_file

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = {
    "speed/table.py": "benchmarks.md",
    "growth/tables.py": "benchmarks.md",
    "smollm2/table.py": "learning.md",
    "trust/table.py": "reward_benchmark.md",
}
"""{script below benchmarks: the page of docs/results whose tables it writes}."""
OF_SEVERAL = ("task", "rewards", "judge", "measure", "pairs", "tasks", "topics", "calc")
"""Modules that more than one benchmark, or its example, has."""


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_tables_are_those_of_the_results(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OF_SEVERAL:
        monkeypatch.delitem(sys.modules, name, raising=False)
    file = REPOSITORY / "benchmarks" / script
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples" / "smollm2"))
    monkeypatch.syspath_prepend(str(file.parent))
    table: Any = load_file(file)
    page, copy = REPOSITORY / "docs/results" / SCRIPTS[script], tmp_path / "page.md"
    shutil.copy(page, copy)
    monkeypatch.setattr(table, "FILE", copy)
    table.main()
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8"), (
        f"run {Path(sys.executable).name} benchmarks/{script}"
    )
