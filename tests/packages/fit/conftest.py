"""Runs whose trainer asks for something else than it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlhf_core import fit
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
