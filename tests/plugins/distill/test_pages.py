"""The page on distillation can be followed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.shared import documents

PAGE = "docs/reference/trainers/distill.md"
UNIQUE = ("completions/", "rollout/", "time/rollout", "time/update")
"""Beginnings of the metrics that the page lists; the others are every trainer's."""


@pytest.fixture
def place(tiny: ModuleType, teacher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the models and the data that the page names; one device."""
    monkeypatch.chdir(tmp_path)
    documents.on_one_device(monkeypatch)
    tiny.make_model(scale=4.0).save("base")
    teacher.save("large")
    for name, make in (("prompts", tiny.prompts), ("heldout", tiny.prompts), ("corpus", tiny.texts)):
        tiny.write_rows(tmp_path / f"{name}.jsonl", make(8))
    return tmp_path


@pytest.mark.long
def test_the_page_can_be_followed(repository: Path, place: Path, tiny: ModuleType) -> None:
    documents.follow(repository / PAGE)
    logged = {
        name: tiny.read_rows(place / f"runs/{name}/small/metrics.jsonl")
        for name in ("small", "supervised", "variation")
    }
    assert all(rows[-1]["loss"] > 0 for rows in logged.values())
    shown = (repository / PAGE).read_text(encoding="utf-8").partition("\n## Metrics\n")[2]
    listed = {line.split("`")[1] for line in shown.splitlines() if line.startswith("| `")}
    named = {name.removeprefix("eval_") for row in logged["small"] for name in row}
    assert {name for name in named if name.startswith(UNIQUE)} <= listed
    # The sampling test reads one of eight prompts, which these few rollouts may not have.
    assert {name for name in listed if "terminated" not in name and not name.startswith("sampling/")} <= named
    assert not any(name.startswith("completions/") for name in logged["supervised"][-1])
