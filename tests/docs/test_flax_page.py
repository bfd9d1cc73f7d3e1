"""examples/flax/README.md is followed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from safetensors import safe_open

from tests.shared import documents


@pytest.mark.long  # `tests/packages/models/test_flax_modules.py` has what it shows
def test_the_page_can_be_followed(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    documents.on_one_device(monkeypatch)
    tiny.make_model().save(tmp_path / "MODEL")
    tiny.write_rows(tmp_path / "texts.jsonl", tiny.texts(8))
    documents.follow(documents.REPOSITORY / "examples/flax/README.md")
    with safe_open(tmp_path / "runs/small/base/artifacts/model/model.safetensors", "numpy") as file:
        assert "layers.0.query.kernel" in set(file.keys())
