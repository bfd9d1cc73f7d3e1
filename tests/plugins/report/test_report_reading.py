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
from rlhf_report.run_reader import parts
from rlhf_report.watch.run_view import read_run

from tests.shared import report_runs as runs

make_run, write = runs.make_run, runs.write


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
    path = run / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert runs.page(run).run["stages"]


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
    told = "\n".join(runs.problems(run))
    for said in (
        "policy/metrics.jsonl: 1 damaged line",
        "rm/stage.json is not readable",
        "000000.json",
        "000020.json",
    ):
        assert said in told, said


def test_values_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    shutil.rmtree(run / "policy")
    with open(run / "rm/metrics.jsonl", "a") as file:
        file.write('{"step": 21, "time": 1700000040.0, "loss": null}\n')
    points = read_run(run).stages[0].metrics["loss"]
    assert points.missing == 1
    assert np.isfinite(points.values).all()
    assert {row["name"]: row["missing"] for row in runs.results(run, "rm")["metrics"]}["loss"] == 1


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
    shown = runs.page(run).stages["policy"]
    assert (shown["update"], shown["updates"]) == (20, 100)
    assert shown["next"] == f"rlhf run {run}/pipeline.resolved.toml"
    assert shown["message"] == (last or {}).get("message", "")


def test_a_stage_that_has_not_begun(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    shutil.rmtree(run / "policy")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    write(run / "events.jsonl", [event for event in events if event["stage"] == "rm"])
    assert [stage.state for stage in read_run(run).stages] == ["done", "not begun"]
    assert runs.page(run).stages["policy"]["state"] == "not begun"


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
    names = "episodes/turns eval_episodes/turns episodes/failed episodes/cut_ratio episodes/tries"
    episodes = names.split()
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
