"""What recipes are judged by: intervals, windows, and an oracle that shares nothing with the suite."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.shared import pipelines

MODULES = ("data", "rewards", "oracle", "intervals", "measures", "recipes", "reproduce")


@pytest.fixture(scope="module")
def code(repository: Path) -> Iterator[Any]:
    """The recipes' own modules, imported as a script in their directory would."""
    directory = str(repository / "tests/recipes")
    sys.path.insert(0, directory)
    for name in MODULES:
        sys.modules.pop(name, None)  # `recipes` may be the folder, which the experiments import from
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(directory)
        for name in MODULES:
            sys.modules.pop(name, None)


def test_an_interval_is_the_prediction_interval_of_a_new_seed(code: Any) -> None:
    values = [1.0, 1.2, 0.9, 1.1, 1.0, 0.8, 1.3, 1.0, 0.9, 1.1]
    low, high = code.intervals.interval(values, code.intervals.SCALES["value"])
    n, mean = len(values), sum(values) / len(values)
    s = math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1))
    t = 7.8788  # Student's 1 - 1/80,000 quantile with 9 degrees of freedom
    assert high - mean == pytest.approx(t * s * math.sqrt(1 + 1 / n), rel=1e-4)
    assert mean - low == pytest.approx(high - mean)


def test_intervals_hold_new_seeds_and_not_shifted_ones(code: Any) -> None:
    draw = np.random.default_rng(0)
    missed = caught = 0
    for _ in range(200):
        made = code.intervals.interval(draw.normal(5, 1, 20), code.intervals.SCALES["value"])
        missed += sum(value not in made for value in draw.normal(5, 1, 20))
        caught += 15.0 not in made
    assert missed <= 4
    assert caught == 200


def test_equal_values_leave_room_and_small_ones_have_no_lower_end(code: Any) -> None:
    scales, interval = code.intervals.SCALES, code.intervals.interval
    low, high = interval([2.0] * 10, scales["value"])
    assert (low, high) == pytest.approx((1.96, 2.04))
    low, high = interval([0.0] * 10, scales["tiny"])
    assert low == -math.inf
    assert high == pytest.approx(9e-7)
    assert float("nan") not in interval([2.0] * 10, scales["value"])
    with pytest.raises(ValueError, match="too few"):
        interval([1.0] * 9, scales["value"])


def test_a_metric_that_appears_or_is_missing_is_a_problem(code: Any) -> None:
    interval = code.intervals.Interval
    stored = code.intervals.Record({"a": interval(0, 1), "b": interval(0, 1)}, {})
    assert code.intervals.outside({"a": 0.5, "b": 1}, stored, 0) == {}
    problems = code.intervals.outside({"a": 2, "c": 0.5}, stored, 0)
    assert problems == {"a": "is 2, outside 0 to 1", "b": "is missing", "c": "has no interval"}


def test_a_recorded_seed_gives_its_own_values_again(code: Any, tmp_path: Path) -> None:
    interval = code.intervals.Interval
    record = code.intervals.Record(
        {"a": interval(0, 10), "b": interval(-math.inf, 1)}, {"a": [4.0, 5.0, 6.0]}
    )
    code.intervals.write(tmp_path / "x.json", record, seeds=3)
    stored = code.intervals.read(tmp_path / "x.json")
    assert stored == record
    assert code.intervals.outside({"a": 5.09, "b": 0}, stored, 1) == {}
    assert "which this seed gives" in code.intervals.outside({"a": 5.11, "b": 0}, stored, 1)["a"]
    assert code.intervals.outside({"a": 5.11, "b": 0}, stored, 3) == {}
    record = record._replace(rounding={"a": 0.05})
    code.intervals.write(tmp_path / "x.json", record, seeds=3)
    stored = code.intervals.read(tmp_path / "x.json")
    assert stored == record
    assert code.intervals.outside({"a": 5.14, "b": 0}, stored, 1) == {}
    assert "which this seed gives" in code.intervals.outside({"a": 5.16, "b": 0}, stored, 1)["a"]
    repeats = code.measures.repeats
    assert repeats("rm/eval_loss.last", {"rm": "reward"})
    assert repeats("policy/loss.early", {"policy": "grpo"})
    assert not repeats("policy/reward.end", {"policy": "grpo"})
    assert not repeats("policy/kl.start", {"policy": "grpo"})


def test_every_recipe_has_intervals_and_a_pipeline_that_the_suite_accepts(code: Any, tmp_path: Path) -> None:
    for name, recipe in code.recipes.RECIPES.items():
        place = tmp_path / name
        place.mkdir()
        file = recipe.write(place, 0)
        tomllib.loads(file.read_text())
        pipelines.planned(file, *recipe.sets, dir=None)
        stored = code.intervals.read(code.reproduce.stored_file(name))
        stages = {metric.partition("/")[0] for metric in stored.intervals}
        assert stages == set(recipe.stages) | (set(recipe.compared) if recipe.again else set())
        assert all(low < high for low, high in stored.intervals.values())
    policy_losses = {"grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo", "gspo_token", "sapo"}
    assert policy_losses <= code.recipes.RECIPES.keys()


@pytest.mark.parametrize("head", ["lm", "score"])
def test_the_oracle_computes_what_the_suite_computes(
    code: Any, tiny: ModuleType, tmp_path: Path, head: str
) -> None:
    model = tiny.make_model(head, scale=3.0, num_key_value_heads=1)
    model.save(tmp_path)
    oracle = code.oracle.Oracle(tmp_path)
    ids = np.array([[5, 9, 4, 3, 12, 1]])
    if head == "lm":
        logits = np.asarray(model.logits(ids, np.ones_like(ids)), np.float64)[0]
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        np.testing.assert_allclose(oracle.log_probs(ids[0]), expected, atol=2e-5)
    else:
        score = oracle.hidden(ids[0])[-1] @ oracle.weights["score.weight"][0]
        np.testing.assert_allclose(score, model.scores(ids, np.ones_like(ids))[0], atol=2e-5)


def test_a_run_is_measured_by_windows(code: Any) -> None:
    values = [float(i) for i in range(9)]
    windows = code.measures.WINDOWS
    assert {name: window(values) for name, window in windows.items()} == {
        "start": 0.0,
        "early": 2.0,
        "middle": 4.0,
        "end": 7.0,
        "last": 8.0,
        "largest": 8.0,
    }
    assert windows["middle"]([3.0]) == 3.0


def test_rewards_and_data_agree(code: Any, tmp_path: Path) -> None:
    code.data.generate(tmp_path, 3)
    rows = code.data.read_rows(tmp_path / "prompts.heldout.jsonl")
    replies = [code.data.answered(row)["completion"] for row in rows]
    columns = {key: [row[key] for row in rows] for key in ("word", "count")}
    assert code.rewards.right(replies, **columns) == [1.0] * len(rows)
    assert max(code.rewards.right([f"{reply} stone" for reply in replies], **columns)) < 0.5
    for row in code.data.read_rows(tmp_path / "pairs.jsonl"):
        assert row["chosen"] != row["rejected"]
    again = tmp_path / "again"
    code.data.generate(again, 3)
    files = [path.relative_to(tmp_path) for path in tmp_path.glob("*.jsonl")]
    assert all((tmp_path / file).read_bytes() == (again / file).read_bytes() for file in files)
    assert json.loads((again / "tokenizer" / "tokenizer_config.json").read_text())["eos_token"] == "<eos>"


@pytest.mark.parametrize("script", ["plant.py", "mutants.py"])
def test_everything_can_be_planted(repository: Path, script: str) -> None:
    """Every fault of faults.toml and every mutant of mutants.toml, where it says."""
    command = [sys.executable, str(repository / "tests/recipes" / script), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
