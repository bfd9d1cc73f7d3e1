"""Columns of numbers next to texts stay with their rows, reach the objective, and are checked."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from rlhf_core import data
from rlhf_core.packing import choose_layout, pack


def row(prompt: str, completion: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, **columns}


def encoded(tiny: ModuleType, rows: list[dict[str, Any]], **options: Any) -> data.Examples:
    return data.encode_texts(data.load(rows), tiny.make_tokenizer(), values=("rating",), **options)


def test_values_stay_with_the_rows_that_are_kept_and_reach_the_batch(tiny: ModuleType) -> None:
    rows = [
        row("a", " b", rating=0.25),
        row("a", " b c d e f g", rating=9.0),  # too long
        row("a", " ", rating=None),  # empty, so its number is not checked
        row("c", " d", rating="-1.5"),
    ]
    found = encoded(tiny, rows, max_length=4)
    assert found.values["rating"].dtype == np.float64
    assert found[0].sequence_values["rating"].dtype == np.float32
    np.testing.assert_array_equal(found.values["rating"], [0.25, -1.5])
    trees = found
    layout = choose_layout([tree.size for tree in trees], 1, hidden_size=8, max_tokens=32)
    (batch,) = pack(trees, layout, sequence_names=("rating",))
    assert sorted(batch.sequence_values["rating"][batch.last >= 0]) == [-1.5, 0.25]
