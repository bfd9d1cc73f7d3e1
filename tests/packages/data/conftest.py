"""A tokenizer whose tokens are letters and words of letters, and data that count as large however small they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_core.data import cache, files, table


@pytest.fixture(scope="module")
def tokenizer(tiny: ModuleType) -> Any:
    return tiny.make_tokenizer()


@pytest.fixture
def kept_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], Path]:
    """Keep the tokens of data of as many rows; returns where they are kept."""

    def set_to(rows: int) -> Path:
        monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(cache, "SMALL", rows)
        return tmp_path / "cache" / "tokens"

    return set_to


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Encode data in parts of so many rows."""
    return lambda rows: monkeypatch.setattr(table.Table.parts, "__defaults__", (rows,))


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], None]:
    """Hold files of so many bytes in memory; read larger ones from the disk."""
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    return lambda size: monkeypatch.setattr(files, "IN_MEMORY", size)
