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
    found = runs.results(run)
    charts = [chart for chart in found["charts"] if chart["group"] == "Weights"]
    assert [chart["title"] for chart in charts[:2]] == [
        "Norm of parameters (6 of 20)",
        "Size of an update, relative to the parameters (6 of 20)",
    ]
    assert [chart["title"] for chart in charts[2:]] == [f"{name}, %" for name in names[:13:-1]]
    assert found["problems"] == ["policy/weights.jsonl: 1 row of another form left out"]
    first, last = (line["y"] for line in charts[2]["lines"])
    counts = np.repeat([1, 2, 3, 2], 10) / 0.8  # per cent, in 40 bins from -20 to 20
    np.testing.assert_allclose(last, counts, atol=1e-10)
    np.testing.assert_allclose(first, [*[0] * 10, *2 * counts[::2], *[0] * 10], atol=1e-10)


def test_previews_stand_before_and_after(tmp_path: Path) -> None:
    run = runs.make_run(tmp_path / "first")
    for step in (0, 10, 20):
        rows = [{"prompt": "asked", "completion": f"written at {step}", "length": 3, "finished": True}]
        runs.write(run / f"policy/samples/preview-{step:06d}.jsonl", rows)
    found = runs.completions(run, "Previews")
    assert found["updates"] == [0, 20]
    (side,) = found["sides"]
    assert [side[place]["text"] for place in ("before", "after")] == ["written at 0", "written at 20"]
