"""Torn and missing files of run directories: the report is written, and names the files it could not read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.shared import report_runs as runs

LINES = [
    *("name = 1", "stage = 3", 'seed = "x"', "[[stage]]", "dir = [1]", 'name = "../../etc"', "[[stage.a]]"),
    *("rewards = 3", 'name = ""', f"x = {'[' * 3000}{']' * 3000}"),
]


def spoil(file: Path, rng: random.Random) -> None:
    how = rng.randrange(4)
    if how == 0:
        file.unlink()
        file.mkdir()
    elif how == 1:
        content = file.read_bytes()
        file.write_bytes(content[: rng.randrange(len(content))])
    elif how == 2 or file.suffix != ".toml":
        file.write_bytes(b"[" * 100_000)
    else:
        lines = file.read_text().split("\n")
        lines[rng.randrange(len(lines))] = rng.choice(LINES)
        file.write_text("\n".join(lines))


def with_evaluations(run: Path) -> Path:
    """Add what evaluations of the policy and its newest rollout leave."""
    for step in (0, 20):
        rows = [
            {
                "prompt": f"asked {i}",
                "columns": {"answer": i, "note": "x"},
                "completion": [
                    {"role": "assistant", "content": "so"},
                    {"role": "assistant", "content": "yes"},
                ],
                "reward": float(i + step),
                "rewards": {"model": float(i + step)},
                "advantage": i - 3.5,
                "turns": [{"message": 1, "tokens": 2, "reward": 1.0}],
            }
            for i in range(8)
        ]
        for name in (f"evaluation-{step:06d}", f"update-{step:06d}"):
            runs.write(run / f"policy/samples/{name}.jsonl", rows)
        means = [row["reward"] for row in rows]
        runs.write(run / f"policy/evaluations/{step:06d}.json", [{"step": step, "prompt_rewards": means}])
    return run


@pytest.mark.long
@pytest.mark.parametrize("runs_spoiled", [4, pytest.param(40, marks=pytest.mark.exhaustive)])
def test_spoiled_run_directories(tmp_path: Path, runs_spoiled: int) -> None:
    rng = random.Random(0)
    problems = 0
    for number_ in range(runs_spoiled):
        run = with_evaluations(runs.make_run(tmp_path / str(number_)))
        files = [path for path in sorted(run.rglob("*")) if path.is_file()]
        for file in rng.sample(files, 3):
            spoil(file, rng)
        problems += len(runs.problems(run))
    assert problems >= runs_spoiled / 2  # what could not be read is named


def test_a_pipeline_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = runs.make_run(tmp_path / "run")
    for content, said in (
        ("[[", "is not readable"),
        ("stage = 3", "not every stage in it has a unique name"),
    ):
        (run / "pipeline.resolved.toml").write_text(content)
        problems = runs.problems(run)
        assert any("pipeline.resolved.toml" in each and said in each for each in problems), content
        assert set(runs.stages(run)) == {"rm", "policy"}


def test_a_stage_name_does_not_lead_out_of_the_run(tmp_path: Path) -> None:
    run = runs.make_run(tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "metrics.jsonl").write_text('{"step": 1, "time": 1, "secret": 1.0}\n')
    with open(run / "pipeline.resolved.toml", "a") as file:
        file.write('[[stage]]\nname = "../elsewhere"\ntrainer = "sft"\n')
    assert list(runs.stages(run)) == ["rm", "policy"]
    assert any("name" in problem for problem in runs.problems(run))
