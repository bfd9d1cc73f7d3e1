"""examples/first_steps.ipynb is followed: its cells, with few updates, and its shell commands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.shared import documents

NOTEBOOK = documents.REPOSITORY / "examples/first_steps.ipynb"


def cells() -> list[str]:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell["outputs"] for cell in found if cell["cell_type"] == "code"), "clear its outputs"
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


@pytest.mark.long
def test_the_notebook_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    documents.on_one_device(monkeypatch)
    names: dict[str, Any] = {"__name__": "__main__"}
    (settings, *rest) = cells()
    for source in (re.sub(r": \d+", ": 2", settings), *rest):
        if source.startswith("!"):
            ended = documents.type_in(source.removeprefix("!"))
            assert ended.code == 0, ended.said
        else:
            exec(compile(source, str(NOTEBOOK), "exec", dont_inherit=True), names)
    assert 0 <= names["policy"].metrics["reward"] <= 1
    assert len(names["rows"]) >= 1
