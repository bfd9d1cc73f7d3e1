"""The pages on GRPO: every block runs, every option is one, every loss has its section."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.shared import documents

REPOSITORY = documents.REPOSITORY
LOSSES_PAGE = REPOSITORY / "docs/reference/losses/policy.md"
PICTURE = LOSSES_PAGE.with_suffix(".svg")
TUTORIAL = REPOSITORY / "docs/tutorial/grpo.md"
PAGES = [LOSSES_PAGE, TUTORIAL]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_of_a_page_exist(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unknown options would be an error."""
    from rlhf_grpo import GRPOConfig

    from rlhf_core import plugins
    from rlhf_core.config import build

    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(
        next(text for _, text in documents.blocks(TUTORIAL) if documents.named(text) == "reward.py")
    )
    registry = plugins.load().registry
    for table in documents.stage_tables(page):
        build(GRPOConfig, table, where=page.name, registry=registry)


def test_every_loss_has_a_section_a_row_and_settings() -> None:
    from rlhf_grpo.losses import LOSSES

    text = LOSSES_PAGE.read_text(encoding="utf-8")
    tables = [tomllib.loads(block) for language, block in documents.blocks(LOSSES_PAGE) if language == "toml"]
    for name, loss in LOSSES.items():
        assert name in [table["loss"]["name"] for table in tables if "loss" in table]
        row = re.search(rf"^\| \[`{name}`\]\(#(\w+)\) \|.*$", text, re.MULTILINE)
        assert row is not None
        assert f"\n## {row[1]}\n" in text
        assert f"| `{loss.aggregation}` |" in row[0]


def test_the_picture_is_small_and_without_a_date() -> None:
    text = PICTURE.read_text(encoding="utf-8")
    assert len(text) < 120_000
    assert "<dc:date>" not in text


@pytest.mark.long
def test_python_of_the_page_on_losses_runs() -> None:
    """The blocks have their own assertions, or fail with an exception."""
    for language, text in documents.blocks(LOSSES_PAGE):
        if language == "python":
            documents.run_python(text)


@pytest.mark.long
def test_tutorial_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copy(REPOSITORY / "examples/make_data.py", tmp_path)
    documents.on_one_device(monkeypatch)
    documents.follow(TUTORIAL, compare=lambda shown, said: None)  # what it shows is of the whole run
    assert (tmp_path / "runs/sort/policy/artifacts/model/config.json").is_file()
