"""What log_weights and previews wrote is in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rlhf_report.weights import MOST, _counts, weight_charts

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
    run = runs.make_run(tmp_path / "first")
    names = [f"layers.{i}.kernel" for i in range(MOST + 2)]
    rows: list[Any] = [
        {"step": step, "weights": {name: weights(step, i / 100) for i, name in enumerate(names)}}
        for step in (10, 20)
    ]
    runs.write(run / "policy/weights.jsonl", [*rows, {"step": 30, "weights": {"x": {"norm": None}}}])
    page = runs.page(run)
    for text in (
        f"Norm of parameters ({MOST} of {MOST + 2})",
        names[-1],
        "weights.jsonl: 1 row of another form",
    ):
        assert text in page.text
    assert names[0] not in page.text
    problems: list[str] = []
    drawn = list(weight_charts("w", runs.stages(run)["policy"], problems, 10))
    assert [chart.id for chart in drawn[:2]] == [
        "w-weights-norm",
        "w-weights-update_ratio",
    ]  # zeros are all 0
    assert len(drawn) == 2 + MOST


def test_counts_in_other_bins_keep_their_number() -> None:
    found = _counts(weights(1.0, 0.0), np.linspace(-2, 2, 9))
    np.testing.assert_allclose(found, [0, 0, 1, 2, 3, 2, 0, 0])


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
