"""The pages on DPO can be followed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.shared import documents

PAGES = ("docs/reference/trainers/dpo.md", "plugins/dpo/README.md")


@pytest.fixture
def place(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the model and the data that the pages name; one device."""
    monkeypatch.chdir(tmp_path)
    documents.on_one_device(monkeypatch)
    tiny.make_model(scale=4.0).save("base")
    tiny.write_rows(tmp_path / "pairs.jsonl", tiny.pairs(16))
    tiny.write_rows(tmp_path / "heldout.jsonl", tiny.pairs(6, seed=1))
    return tmp_path


@pytest.mark.long
def test_the_page_can_be_followed(
    repository: Path, place: Path, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(place))
    documents.follow(repository / PAGES[0], edit=str)
    logged = {
        run: tiny.read_rows(place / f"runs/{run}/policy/metrics.jsonl") for run in ("pairs", "anchored")
    }
    assert [row["step"] for row in logged["pairs"] if "eval_loss" in row] == [2, 4]
    assert "anchored/likelihood" not in logged["pairs"][-1]
    assert np.isfinite(logged["anchored"][-1]["eval_anchored/likelihood"])


@pytest.mark.long
def test_the_readme_runs(repository: Path, place: Path) -> None:
    (place / "path/to").mkdir(parents=True)
    (place / "base").rename(place / "path/to/model")
    (python,) = (text for language, text in documents.blocks(repository / PAGES[1]) if language == "python")
    scope: dict = {}
    exec(python, scope)
    assert scope["result"].metrics["loss"] < 0.7
    (toml,) = (text for language, text in documents.blocks(repository / PAGES[1]) if language == "toml")
    (place / "pairs.heldout.jsonl").write_bytes((place / "heldout.jsonl").read_bytes())
    (place / "p.toml").write_text(f'dir = "runs"\n{toml}')
    said = []
    for more in ([], ["--set", "policy.loss=robust"]):
        ended = documents.rlhf(["check", "p.toml", *more])
        assert not ended.code
        said.append(" ".join(ended.said.split()))  # lines break where the path ends them
    assert ["which makes 'robust' the same as 'sigmoid'" in each for each in said] == [False, True]
    assert "16 pairs" in said[0]
