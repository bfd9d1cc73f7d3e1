"""docs/how-to/read_the_report.md, followed from top to bottom."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.shared import documents


@pytest.mark.long
def test_the_page_can_be_followed(
    repository: Path, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.make_model().save(tmp_path / "MODEL")
    documents.follow(repository / "docs/how-to/read_the_report.md", edit=str)
    assert (tmp_path / "both.html").stat().st_size < 2_000_000
    page = (tmp_path / "runs/rm/report.html").read_text(encoding="utf-8")
    for told in (
        "Calibration: accuracy over confidence",
        "Scores of held-out pairs, update 6",
        "Held-out pairs",
    ):
        assert told in page, told
