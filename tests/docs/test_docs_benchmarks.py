"""docs/results/benchmarks.md holds the figures that were measured."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.plugins import load_file

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs/results/benchmarks.md"
SPEED = REPOSITORY / "benchmarks" / "speed"


def test_the_tables_are_those_of_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SPEED))
    table: Any = load_file(SPEED / "table.py")
    assert table.RESULTS.is_file()
    page = tmp_path / "benchmarks.md"
    shutil.copy(PAGE, page)
    monkeypatch.setattr(table, "FILE", page)
    table.main()
    assert page.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8"), (
        f"run {Path(sys.executable).name} benchmarks/speed/table.py"
    )
