"""The pages on GRPO: every block runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.shared import documents

REPOSITORY = documents.REPOSITORY
LOSSES_PAGE = REPOSITORY / "docs/reference/losses/policy.md"
PICTURE = LOSSES_PAGE.with_suffix(".svg")
TUTORIAL = REPOSITORY / "docs/tutorial/grpo.md"


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
