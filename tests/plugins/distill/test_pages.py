"""The pages on distillation: what they show runs, and their tables are the code's."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rlhf_distill import DIVERGENCE, DistillConfig

from rlhf_core import installed_registry
from rlhf_core.config import build
from tests.shared import documents

PAGE, README = "docs/reference/trainers/distill.md", "plugins/distill/README.md"
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
    assert {name for name in listed if "terminated" not in name} <= named
    assert not any(name.startswith("completions/") for name in logged["supervised"][-1])


@pytest.mark.parametrize("page", [PAGE, README])
def test_every_divergence_is_in_the_table(repository: Path, page: str) -> None:
    text = (repository / page).read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith(("| `", "| divergence | `"))]
    for name in installed_registry().names(DIVERGENCE):
        assert any(f"`{name}` |" in row for row in rows), name


def test_the_readme_shows_fields(repository: Path) -> None:
    """Unknown fields would be an error."""
    (text,) = [text for language, text in documents.blocks(repository / README) if language == "toml"]
    (stage,) = tomllib.loads(text)["stage"]
    fields = {key: value for key, value in stage.items() if key not in ("name", "trainer")}
    build(DistillConfig, fields, where=README, registry=installed_registry())
