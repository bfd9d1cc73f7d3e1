"""Reading complete and partial run directories: states, times, curves, the picture of the pipeline."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rlhf_report import charts, diagram
from rlhf_report.run_reader import Points, draw, parts, read_run

from tests.shared import report_runs as runs

make_run, write = runs.make_run, runs.write


def only_times(metrics: Path) -> None:
    """Leave out the other curves, which take most of a page's time."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    write(metrics, [{name: row[name] for name in ("step", "time", "step_time")} for row in rows])


def test_thinning_keeps_ends_extremes_and_means() -> None:
    values = np.random.default_rng(0).normal(size=1003)
    points = Points(np.arange(1.0, 1004.0), values)
    drawn = draw(points, 50)
    assert len(drawn.line_x) <= 102
    assert drawn.thinned
    assert drawn.line_x[0] == 1
    assert drawn.line_x[-1] == 1003
    assert {values.min(), values.max()} <= set(drawn.line_y)
    assert drawn.count.sum() == 1003
    np.testing.assert_allclose(drawn.mean_y @ drawn.count / 1003, values.mean(), atol=1e-12)
    few = draw(Points(points.steps[:100], values[:100]), 50)
    assert not few.thinned
    np.testing.assert_array_equal(few.mean_y, values[:100])


@pytest.mark.parametrize(
    "missing",
    [
        "events.jsonl",
        "pipeline.resolved.toml",
        "rm/stage.json",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("policy/metrics.jsonl", "policy/samples", "rm")
        ),
    ],
)
def test_what_is_missing_is_left_out(tmp_path: Path, missing: str) -> None:
    run = make_run(tmp_path / "half", steps=1)
    only_times(run / "rm/metrics.jsonl")
    only_times(run / "policy/metrics.jsonl")
    path = run / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = runs.page(run)
    assert "policy" in page.text


def test_a_torn_line_is_left_out_and_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "torn")
    metrics = run / "policy/metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-40])
    (run / "rm/stage.json").write_text('{"state": "do')
    (run / "policy/samples/update-000019.jsonl").write_bytes(b'{"prompt": "a"\xff\n')
    (run / "rm/evaluations/000020.json").write_text("[]")
    scores = {"edges": [0, 1], "chosen": [1], "rejected": []}  # one is missing
    write(run / "rm/evaluations/000000.json", [{"scores": scores, "calibration": []}])
    found = read_run(run)
    assert found.stages[1].updates == 19
    page = runs.page(run)
    for told in (
        "policy/metrics.jsonl: 1 damaged line",
        "rm/stage.json is not readable",
        "000000.json",
        "000020.json",
    ):
        assert told in page.text, told


def test_values_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    shutil.rmtree(run / "policy")
    with open(run / "rm/metrics.jsonl", "a") as file:
        file.write('{"step": 21, "time": 1700000040.0, "loss": null}\n')
    points = read_run(run).stages[0].metrics["loss"]
    assert points.missing == 1
    assert np.isfinite(points.values).all()
    assert "1 logged value not finite, not drawn" in runs.page(run).text


@pytest.mark.parametrize(
    ("last", "state"),
    [
        ({"event": "failed", "message": "loss is not finite"}, "failed"),
        ({"event": "stopped", "message": "stopped after update 7"}, "stopped"),
        (None, "interrupted"),
    ],
)
def test_a_stage_that_did_not_end_well_says_so_and_how_to_go_on(
    tmp_path: Path, last: dict[str, str] | None, state: str
) -> None:
    run = make_run(tmp_path / "run")
    shutil.rmtree(run / "rm")
    shutil.rmtree(run / "policy/samples")
    only_times(run / "policy/metrics.jsonl")
    record = json.loads((run / "policy/stage.json").read_text())
    (run / "policy/stage.json").write_text(json.dumps({**record, "state": "running"}))
    (run / "policy/plan.json").write_text('{"updates": 100}')
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()][:-1]
    write(
        run / "events.jsonl",
        [*events, *([{"time": runs.BEGAN + 220, "stage": "policy", **last}] if last else [])],
    )
    stage = read_run(run).stages[1]
    assert stage.state == state
    assert stage.seconds == pytest.approx(30.0 if last else 48.0)  # else: until the last row
    page = runs.page(run)
    assert "20 of 100 updates" in page.text
    assert f"rlhf run {run}/pipeline.resolved.toml" in page.text
    assert (last or {}).get("message", "") in page.text


def test_a_stage_that_has_not_begun(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    shutil.rmtree(run / "policy")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    write(run / "events.jsonl", [event for event in events if event["stage"] == "rm"])
    assert [stage.state for stage in read_run(run).stages] == ["done", "not begun"]
    assert "not begun" in runs.page(run).text


def test_where_the_time_went(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    found = {part.name: part.seconds for part in parts(run.stages[0], run.seconds)}
    # Begun at 0, first row at 10 after an update of 1 s; 20 updates of 1 s; done at 60.
    assert list(found.values()) == pytest.approx([9.0, 20.0, 31.0])
    assert sum(p.share for s in run.stages for p in parts(s, run.seconds)) == pytest.approx(1.0)


def test_the_picture_shows_what_flows(tmp_path: Path) -> None:
    stages = read_run(make_run(tmp_path / "run")).stages
    assert diagram.references(stages) == [("rm", "policy", "reward")]
    drawn = diagram.picture(stages)
    assert [box.name for box in drawn.boxes] == ["rm", "policy"]
    assert all(0 <= box.x < drawn.width and 0 <= box.y < drawn.height for box in drawn.boxes)
    assert drawn.boxes[1].x > drawn.boxes[0].x


def test_a_pipeline_with_a_line_past_a_stage() -> None:
    configs = {
        "a": {},
        "b": {"model": "a.model"},
        "c": {"model": "a.model", "rewards": [{"model": "b.model"}]},
    }
    stages: Any = [
        SimpleNamespace(name=n, trainer="t", state="done", config=c, updates=1, seconds=1.0)
        for n, c in configs.items()
    ]
    drawn = diagram.picture(stages)
    assert sorted(arrow.label for arrow in drawn.arrows) == ["model", "model", "reward"]
    assert [box.y for box in drawn.boxes] == [1.0, 1.0, 1.0]
    assert all(arrow.x < drawn.width and arrow.y < drawn.height for arrow in drawn.arrows)


def test_every_metric_is_in_one_chart() -> None:
    episodes = [
        "episodes/turns",
        "eval_episodes/turns",
        "episodes/failed",
        "episodes/cut_ratio",
        "episodes/tries",
    ]
    grouped = charts.charts([*episodes, "loss", "odd"])
    groups = ["Loss and gradient", *["Episodes"] * 4, "Other metrics"]
    assert [kind.group for kind, _ in grouped] == groups
    assert [found for _, found in grouped][1] == episodes[:2]
    every = ["loss", "eval_loss", "rewards/a/mean", "reward", "mine/odd", "eval_mine/odd", "num_tokens", "kl"]
    found = charts.charts(every)
    assert sorted(name for _, own in found for name in own) == sorted(set(every) - {"num_tokens"})
    assert next(own for kind, own in found if kind.title == "Loss") == ["loss", "eval_loss"]
    assert found[-1][1] == ["mine/odd", "eval_mine/odd"]


@pytest.mark.parametrize(
    ("value", "bounds"), [(0.3, (0.0, 0.6)), (-2e-4, (-4e-4, 0.0)), (0.0, (0.0, 1.0))], ids=str
)
def test_a_metric_that_never_changes_is_drawn_in_the_middle(
    value: float, bounds: tuple[float, float]
) -> None:
    points = Points(np.arange(1.0, 4.0), np.full(3, value))
    figure = charts.lines("kl", "KL", [charts.Line("kl", points, 0)], 10).item
    axis = next(iter(figure["doc"]["roots"]))["attributes"]["y_range"].get("attributes", {})
    assert (axis.get("start", 0.0), axis.get("end", 1.0)) == bounds  # Bokeh leaves out its defaults


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.99935, "0.9993"),
        (9709.4, "9,709"),
        (113793115.0, "1.14e+08"),
        (3e-4, "3.00e-04"),
        (0.0, "0"),
        (-1.5, "-1.5"),
        (None, "–"),
    ],
)
def test_numbers(value: float | None, written: str) -> None:
    assert charts.number(value) == written


@pytest.mark.parametrize(
    ("seconds", "written"), [(4.25, "4.2 s"), (41.0, "41 s"), (131.2, "2 min 11 s"), (11_100.0, "3 h 05 min")]
)
def test_clocks(seconds: float, written: str) -> None:
    assert charts.clock(seconds) == written


def test_a_directory_that_a_trainer_was_told_to_write_to(tmp_path: Path) -> None:
    write(
        tmp_path / "alone/metrics.jsonl", [{"step": i, "time": runs.BEGAN + i, "loss": 1.0} for i in (1, 2)]
    )
    stage = read_run(tmp_path / "alone").stages[0]
    assert (stage.name, stage.state, stage.updates) == ("alone", "interrupted", 2)
    assert math.isfinite(stage.seconds)
    runs.page(tmp_path / "alone")
    write(tmp_path / "alone/artifacts/model/rlhf_artifact.json", [{}])
    assert read_run(tmp_path / "alone").stages[0].state == "done"
