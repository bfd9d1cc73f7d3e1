"""Runs whose trainer asks for something else than it does, and data that count as large however small they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import fit
from rlhf_core.data import cache, source
from rlhf_core.training import define


@pytest.fixture
def change_build(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[fit.Build], fit.Build]], None]:
    """Change what trainers of the next runs build."""
    plain = fit.fit

    def set_to(change: Callable[[fit.Build], fit.Build]) -> None:
        def run(stage: Any, config: Any, build: fit.Build) -> Any:
            return plain(stage, config, change(build))

        monkeypatch.setattr(define, "fit", run)

    return set_to


@pytest.fixture
def in_small_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Encode eight rows at a time, choose a layout for the first sixteen, and keep the tokens of all."""
    monkeypatch.setattr(source, "BLOCK", 8)
    monkeypatch.setattr(source, "SAMPLE", 16)
    monkeypatch.setattr("rlhf_core.data.streams.SAMPLE", 16)
    monkeypatch.setattr(cache, "SMALL", 1)
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
