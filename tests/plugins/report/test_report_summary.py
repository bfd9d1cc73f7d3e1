"""The sentence of a stage: what changed on held-out data, and whether it is noise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rlhf_report as reporting
from scipy.stats import t

from tests.shared import report_runs as runs


def previews(run: Path, before: Sequence[float | None], after: Sequence[float | None]) -> None:
    for step, rewards in ((0, before), (20, after)):
        rows: list[dict[str, Any]] = [
            {"prompt": f"asked {i}", "completion": "x", "reward": value, "rewards": {"right": value}}
            for i, value in enumerate(rewards)
        ]
        runs.write(run / f"policy/samples/evaluation-{step:06d}.jsonl", rows)


BETTER = [1.0, 0.8, 1.1, 0.9, 1.0, 1.2, 0.7, 1.0]
IMPROVED = "more than chance: an improvement."


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (BETTER, IMPROVED),
        (BETTER[:4], IMPROVED),
        (BETTER[:5], IMPROVED),
        (BETTER * 6, IMPROVED),
        ([-each for each in BETTER], "more than chance: the model is worse than before."),
        ([1.0, -1.0, 1.1, -0.9, 1.0, -1.2, 0.7, 0.5], "which may be noise: the interval contains 0."),
    ],
)
def test_a_change_is_compared_prompt_by_prompt(tmp_path: Path, change: list[float], verdict: str) -> None:
    run, count = runs.make_policy_run(tmp_path / "run"), len(change)
    before = np.arange(count) / 4
    previews(run, before.tolist(), (before + change).tolist())
    half = t.ppf(0.975, count - 1) * np.std(change, ddof=1) / np.sqrt(count)
    told = runs.words(run)
    assert f"The mean reward of {count} training prompts was {before.mean():.4g} before training and" in told
    assert verdict in told
    low, high = np.mean(change) - half, np.mean(change) + half
    interval = told.partition("95 % interval over prompts: ")[2].partition(")")[0].split(" to ")
    np.testing.assert_allclose([float(bound) for bound in interval], [low, high], rtol=0.01, atol=0.005)
    cut = [{"step": i, "completions/clipped_ratio": 1.0} for i in range(1, 17)]
    runs.write(run / "policy/metrics.jsonl", cut)
    first, second = (each["text"] for each in runs.page(run).stages["policy"]["verdict"])
    assert "100% of the completions are cut" in first
    assert verdict.replace(": an improvement", ", but whether it is an improvement is in doubt") in second


def test_few_prompts_and_no_change_have_no_interval(tmp_path: Path) -> None:
    run = runs.make_policy_run(tmp_path / "run")
    previews(run, [1.0, None, 2.0], [2.0, 1.0, 2.0])
    told = runs.words(run)
    assert "2 of 3 training prompts" in told
    assert "So few prompts say nothing about others." in told
    previews(run, [1.0] * 8, [1.0] * 8)
    told = runs.words(run)
    assert "it changed for none of them." in told
    assert "interval over prompts" not in told


def test_an_evaluation_before_training_counts_all_its_prompts(tmp_path: Path) -> None:
    run = runs.make_policy_run(tmp_path / "run")
    previews(run, [1.0] * 4, [9.0] * 4)
    record = json.loads((run / "policy/stage.json").read_text())
    record["config"]["eval_data"] = "held.jsonl"
    (run / "policy/stage.json").write_text(json.dumps(record))
    for step, rewards in ((0, [0.0, 1.0, None, 0.0, 1.0]), (20, [1.0, 1.0, 0.0, 1.0, 1.0])):
        path = run / f"policy/evaluations/{step:06d}.json"
        runs.write(path, [{"step": step, "prompt_rewards": rewards}])
    assert (
        "The mean reward of 4 of 5 held-out prompts was 0.5 before training and 1 after update 20"
        in runs.words(run)
    )
    (run / "policy/evaluations/000000.json").rename(run / "policy/evaluations/000010.json")
    told = runs.words(run)
    assert "was 0.5 after update 10 and 1 after update 20" in told
    assert "For the 4 whose completions are kept it was 1 before training and 9 after update 20." in told
    runs.write(run / "policy/evaluations/000020.json", [{"step": 20, "prompt_rewards": "many"}])
    assert "policy/evaluations/000020.json is not readable" in runs.words(run)


def test_the_losses_of_rows_have_an_interval(tmp_path: Path) -> None:
    run = runs.make_policy_run(tmp_path / "run")
    shutil.rmtree(run / "policy/samples")
    before, after = np.arange(1.0, 7), np.array([0.5, 1.2, 3.5, 3, 4, 5])
    for step, losses in ((10, before), (20, after)):
        rows = [{"row": i + 1, "loss": loss} for i, loss in enumerate(losses)]
        content = {"step": step, "rows": rows, "metrics": {"eval_loss": losses.mean()}}
        runs.write(run / f"policy/evaluations/{step:06d}.json", [content])
    runs.write(run / "policy/metrics.jsonl", [{"step": i, "eval_loss": 1.0} for i in (10, 20)])
    half = t.ppf(0.975, 5) * np.std(after - before, ddof=1) / np.sqrt(6)
    mean = (after - before).mean()
    told = runs.words(run)
    assert f"It fell for 5 of 6 held-out rows: a change of {mean:+.3g} in the mean over rows" in told
    interval = told.partition("over rows (95 % interval: ")[2].partition(")")[0].split(" to ")
    bounds = [float(bound) for bound in interval]
    np.testing.assert_allclose(bounds, [mean - half, mean + half], rtol=0.01, atol=0.005)


@pytest.mark.parametrize(
    ("metrics", "row", "said"),
    [
        ({"eval_rewards/accuracies": 0.75}, {"chosen": 1.0, "rejected": 0.0}, "in 75.0% of 8 held-out pairs"),
        ({"eval_rewards/chosen": 0.5, "eval_loss": 0.4}, {"reward": 0.5}, "The held-out loss was 0.4"),
    ],
)
def test_implicit_rewards_are_no_rewards_of_prompts(
    tmp_path: Path, metrics: dict[str, float], row: dict[str, float], said: str
) -> None:
    """DPO's make an accuracy; those of KTO, whose bad replies are to fall, are left out."""
    run = runs.make_policy_run(tmp_path / "run")
    shutil.rmtree(run / "policy/samples")
    content = {"step": 20, "rows": [{"row": i + 1, **row} for i in range(8)], "metrics": metrics}
    for step in (10, 20):
        runs.write(run / f"policy/evaluations/{step:06d}.json", [content])
    runs.write(run / "policy/metrics.jsonl", [{"step": 20, **metrics}])
    assert said in runs.words(run)


def test_an_accuracy_has_an_interval(tmp_path: Path) -> None:
    run = runs.make_run(tmp_path / "run")  # 4 pairs, 0.875
    shutil.rmtree(run / "policy")
    # The ends p of Wilson's interval solve (share − p)² = z² p (1 − p) / n.
    z = 1.959964**2 / 4
    low, high = np.sort(np.roots([1 + z, -2 * 0.875 - z, 0.875**2]))
    expected = (
        "After update 20 the chosen reply has the higher score in 87.5% of 4 held-out pairs "
        f"(95 % interval: {low:.1%} to {high:.1%}), which guessing could reach too."
    )
    assert expected in runs.words(run)


def test_a_held_out_loss_that_rose_is_worse(tmp_path: Path) -> None:
    run = runs.make_policy_run(tmp_path / "run")
    rows = [{"step": i, "time": runs.BEGAN + i, "eval_loss": float(i)} for i in (1, 2)]
    runs.write(run / "policy/metrics.jsonl", rows)
    assert (
        "The held-out loss was 1 after update 1 and 2 after update 2: worse than at the first"
        in runs.words(run)
    )
    runs.write(run / "policy/metrics.jsonl", rows[:1])
    assert "The held-out loss was 1 after update 1." in runs.words(run)


def test_the_numbers_are_those_of_the_model_that_was_saved(tmp_path: Path) -> None:
    run = runs.make_run(tmp_path / "run")
    shutil.rmtree(run / "policy")
    rows = [
        {"step": step, "loss": loss, "eval_loss": held_out}
        for step, loss, held_out in ((0, None, 0.7), (10, 0.6, 0.5), (20, 0.25, 1.625))
    ]
    rows[0].pop("loss")
    runs.write(run / "rm/metrics.jsonl", rows)
    best = {"metric": "eval_loss", "value": 0.5, "step": 10, "bad": 1, "updates": 20, "model": 10}
    (run / "rm/best.json").write_text(json.dumps(best))
    told = runs.words(run)
    assert (
        "The held-out loss was 0.7 after update 0 and 0.5 after update 10, whose model was saved instead"
        in told
    )
    page = runs.page(run)
    assert page.stages["rm"]["saved"] == 10
    numbers = {row["name"]: row["saved"] for row in page.answers["rm/results"]["metrics"]}
    assert numbers == {"loss": 0.6, "eval_loss": 0.5}
    compared = runs.Report(reporting.compare([run, run], tmp_path / "both.html")).all
    (found,) = (answer["stages"][0] for route, answer in compared.items() if "compare" in route)
    assert (found["saved"], {row["name"]: row["values"] for row in found["last"]}) == (
        [10, 10],
        {"loss": [0.6, 0.6], "eval_loss": [0.5, 0.5]},
    )
    (run / "rm/best.json").write_text(json.dumps(best | {"model": 0, "step": 0}))
    assert "The held-out loss was 0.7 after update 0, whose model was saved" in runs.words(run)
