"""benchmarks/growth: its tables, and its products by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_core.plugins import load_file

REPOSITORY = Path(__file__).resolve().parents[2]
GROWTH = REPOSITORY / "benchmarks" / "growth"
PAGE = REPOSITORY / "docs/results/benchmarks.md"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(GROWTH))
    return load_file(GROWTH / "tables.py")


def test_every_axis_has_its_table(tables: Any) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- end of growth with {axis} -->" in text for axis in tables.read())


def test_products_by_hand(tables: Any) -> None:
    """A reward step without a head costs 6 · N · tokens for the layers that compute every token, and attention.

    The last of four layers computes keys and values alone, but for the places that scores are read at.
    """
    (row,) = (r for r in tables.read()["model"] if (r["work"], r["model"]) == ("W1", "10m"))
    layer, keys = row["matrix_parameters"] / 4, 2 * 256 * 128
    places = 8 * 32
    products = 6 * (3 * layer + keys) * row["tokens"] + 6 * (layer - keys) * places
    assert 1.0 < row["flops"] / products < 1.25
    assert tables.plain_flops(row) == 6 * row["matrix_parameters"] * row["tokens"]
