"""What log_weights and previews wrote is in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.shared import report_runs as runs


def weights(scale: float, ratio: float) -> dict[str, Any]:
    return {
        "norm": scale,
        "zeros": 0.0,
        "update_ratio": ratio,
        "least": -scale,
        "largest": scale,
        "counts": [1, 2, 3, 2],
    }


def test_weights_are_drawn_those_that_move_most(tmp_path: Path) -> None:
    run = runs.make_policy_run(tmp_path / "first")
    names = [f"layers.{i}.kernel" for i in range(20)]
    rows: list[Any] = [
        {"step": step, "weights": {name: weights(step, i / 100) for i, name in enumerate(names)}}
        for step in (10, 20)
    ]
    runs.write(run / "policy/weights.jsonl", [*rows, {"step": 30, "weights": {"x": {"norm": None}}}])
    page = runs.page(run)
    drawn = [id.rpartition("-")[2] for id in page.charts() if "-weights-" in id]
    assert drawn[:2] == ["norm", "update_ratio"]  # zeros are all 0
    most = len(drawn) - 2
    assert 0 < most < len(names)
    for text in (f"Norm of parameters ({most} of 20)", names[-1], "weights.jsonl: 1 row of another form"):
        assert text in page.text
    assert names[0] not in page.text
    (chart,) = (each for id, each in page.charts().items() if id.endswith("-weights-0"))
    first, last = (array for name, array in runs.arrays(chart["item"]) if name == "top")
    counts = np.repeat([1, 2, 3, 2], 10) / 80  # in 40 bins from -20 to 20
    np.testing.assert_allclose(last, counts, atol=1e-12)
    np.testing.assert_allclose(first, [*[0] * 10, *2 * counts[::2], *[0] * 10], atol=1e-12)


def test_previews_stand_before_and_after(tmp_path: Path) -> None:
    run = runs.make_run(tmp_path / "first")
    for step in (0, 10, 20):
        rows = [{"prompt": "asked", "completion": f"written at {step}", "length": 3, "finished": True}]
        runs.write(run / f"policy/samples/preview-{step:06d}.jsonl", rows)
    text = runs.page(run).text
    assert "Previews, before and after" in text
    assert "written at 0" in text
    assert "written at 20" in text
    assert "written at 10" not in text
