"""Whole pipelines, through the command: what they print, compute and write is what was recorded, to 1e-5.

`RECORD=1 .venv/bin/python -m pytest tests/goldens -n 2` records it anew. `make goldens` compares bits of two commits.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.goldens.pipelines import GOLDENS
from tests.goldens.run import differences, run

RECORDED = Path(__file__).with_name("recorded")


@pytest.mark.parametrize("name", [name for name, golden in GOLDENS.items() if golden.here])
def test_a_pipeline_does_what_was_recorded(name: str, tmp_path: Path) -> None:
    found = run(name, tmp_path / name)
    file = RECORDED / f"{name}.json"
    if "RECORD" in os.environ:
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(rounded(found), indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    wrong = list(differences(json.loads(file.read_text(encoding="utf-8")), found, tolerance=1e-5))
    assert not wrong, "\n".join(wrong[:20])


def rounded(value: object) -> object:
    """Return a result whose numbers have eight digits, and whose artifacts have no hashes."""
    if isinstance(value, float):
        return float(f"{value:.8g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items() if key != "hash"}
    return [rounded(each) for each in value] if isinstance(value, list) else value
