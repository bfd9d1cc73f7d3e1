"""The pages on GRPO: every block runs, every option is one, every loss has its page and its picture."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from rlhf_core.plugins.component import load_file

documents = load_file(Path(__file__).parents[1] / "shared" / "documents.py")
REPOSITORY = documents.REPOSITORY
LOSS_PAGES = sorted((REPOSITORY / "docs/losses").glob("*.md"))
TUTORIAL = REPOSITORY / "docs/tutorial/grpo.md"
PAGES = [*LOSS_PAGES, TUTORIAL]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_of_a_page_are_grpo_s(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_every_loss_has_a_page_a_picture_and_a_row() -> None:
    from rlhf_grpo.losses import LOSSES

    directory = REPOSITORY / "docs/losses"
    rows = (directory / "index.md").read_text(encoding="utf-8").splitlines()
    for name, loss in LOSSES.items():
        page = (directory / f"{name}.md").read_text(encoding="utf-8")
        assert f"]({name}.svg)" in page
        tables = [
            tomllib.loads(text)
            for language, text in documents.blocks(directory / f"{name}.md")
            if language == "toml"
        ]
        assert name in [table["loss"]["name"] for table in tables if "loss" in table]
        (row,) = [row for row in rows if row.startswith(f"| [`{name}`]({name}.md) |")]
        assert f"| `{loss.aggregation}` |" in row


@pytest.mark.parametrize(
    "picture", sorted((REPOSITORY / "docs/losses").glob("*.svg")), ids=lambda file: file.stem
)
def test_pictures_are_small_and_without_a_date(picture: Path) -> None:
    text = picture.read_text(encoding="utf-8")
    assert len(text) < 60_000
    assert "<dc:date>" not in text


@pytest.mark.parametrize(
    "page", [page for page in LOSS_PAGES if ("```python" in page.read_text())], ids=lambda p: p.stem
)
def test_python_of_a_loss_page_runs(page: Path) -> None:
    for language, text in documents.blocks(page):
        if language == "python":
            documents.run_python(text)


@pytest.mark.slow
def test_tutorial_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    documents.on_one_device(monkeypatch)
    documents.follow(TUTORIAL, compare=lambda shown, said: None)  # what it shows is of the whole run
    sys.modules.pop("reward", None)
    assert (tmp_path / "runs/sort/policy/artifacts/model/config.json").is_file()
