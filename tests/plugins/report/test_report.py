"""rlhf report and rlhf compare: what is in the pages, and how the commands end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rlhf_report as reporting
from rlhf_report import samples

from rlhf_core import InputError
from tests.shared import report_runs as runs

make_run, write = runs.make_run, runs.write


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return runs.page(make_run(tmp_path_factory.mktemp("page") / "first"))


def test_the_page_tells_the_run(page: Any) -> None:
    run = page.run
    assert (run["name"], run["seconds"], run["seed"], run["began"]) == ("first", 120.0, 3, runs.BEGAN)
    assert (run["machine"], run["versions"]) == ("2 × cpu, jax 0.10.2, Python 3.11.7", "rlhf-core 0.1.0")
    assert "seed = 3" in run["config"]
    assert [event["message"] for event in run["events"] if event["event"] == "warning"] == [
        f"careful with {runs.EVIL}"
    ] * 2
    assert [(arrow["label"]) for arrow in run["picture"]["arrows"]] == ["reward"]
    assert page.stages["rm"]["facts"] == ["1 epoch"]
    assert len(page.html) < 200_000


def test_results_are_those_of_the_files(page: Any) -> None:
    rm = page.answers["rm/results"]
    numbers = {row.pop("name"): row for row in rm["metrics"]}
    assert numbers["eval_loss"] == dict.fromkeys(("first", "last", "least", "largest"), 0.25) | {
        "saved": None,
        "count": 1,
        "missing": 0,
    }
    assert [chart["title"] for chart in rm["charts"]] == [
        "Scores of held-out pairs, update 20, %",
        "Calibration: accuracy over confidence",
    ]
    scores, calibration = rm["charts"]
    assert scores["lines"][0] == {"name": "chosen", "x": [0.5, 1.5], "y": [25.0, 75.0]}
    assert calibration["lines"][0] == {"name": "update 20, 4 pairs", "x": [0.7], "y": [0.75]}
    scores = [{"update": 20, "chosen": 1.5, "rejected": -0.5}]
    texts = {"row": "pairs.jsonl row 7", "prompt": "p", "chosen": "good", "rejected": "bad"}
    assert rm["pairs"] == [texts | {"scores": scores}]


def test_completions_stand_at_the_same_place_in_the_order_of_their_rewards(page: Any) -> None:
    (found,) = page.answers["policy/results"]["completions"]
    assert (found["updates"], found["same_prompts"]) == ([1, 20], False)
    for i, side in zip((0, 2, 4, 5, 7), found["sides"], strict=True):  # of 8: the lowest, a quarter, …
        assert side["before"]["text"] == f"completion 0 {i} {runs.EVIL}"
        assert side["after"]["text"] == f"completion 19 {i} {runs.EVIL}"
        assert side["before"]["rewards"]["brevity"] is None
    lowest = found["sides"][0]["before"]
    assert (lowest["length"], lowest["finish"]) == (3, "length")


def test_completions_of_the_same_prompts_stand_side_by_side(tmp_path: Path) -> None:
    run = runs.make_policy_run(tmp_path / "first")
    for step in (0, 19):
        rows = [{"prompt": "again", "completion": f"at {step}", "reward": 1.0, "rewards": {}}]
        rows += [{"prompt": f"only {step}", "completion": "once", "reward": 5.0, "rewards": {}}]
        write(run / f"policy/samples/update-{step:06d}.jsonl", rows)
    (side,) = runs.completions(run)["sides"]
    assert (side["prompt"], side["before"]["text"], side["after"]["text"]) == ("again", "at 0", "at 19")


def answers(step: int, values: Iterable[float], group: int = 1) -> list[dict[str, Any]]:
    """Return rows of fixed prompts; a prompt's completions have rewards v, v + 1, …"""
    return [
        {
            "prompt": f"asked {i}",
            "completion": f"answer {i} of {step}, {k}",
            "reward": value + k,
            "rewards": {"model": value, "brevity": None if k else 0.5},
            "length": 4 + step,
            "finished": True,
        }
        for i, value in enumerate(values)
        for k in range(group)
    ]


def evaluated(directory: Path, values: Mapping[int, Iterable[float]], group: int = 1) -> Path:
    """Make a run whose fixed prompts had these rewards, by the update."""
    run: Path = runs.make_policy_run(directory)
    for step, rewards in values.items():
        write(run / f"policy/samples/evaluation-{step:06d}.jsonl", answers(step, rewards, group))
    return run


def test_fixed_prompts_stand_before_and_after_with_every_reward(tmp_path: Path) -> None:
    """Those whose mean reward changed most come first."""
    run = evaluated(tmp_path / "first", {0: (1.0, 2.0), 10: (5.0, 5.0), 20: (7.0, 9.0)}, group=3)
    found = runs.completions(run)
    assert (found["updates"], found["same_prompts"], found["group"]) == ([0, 20], True, 3)
    for side, i, means in zip(found["sides"], (1, 0), ([3, 10], [2, 8]), strict=True):
        assert (side["prompt"], side["means"]) == (f"asked {i}", means)
        assert side["before"]["text"] == f"answer {i} of 0, 1"  # the middle one of three
        assert side["after"]["text"] == f"answer {i} of 20, 1"
    means = {row["name"]: (row["before"], row["after"]) for row in found["means"]}
    # Of 1, 2, 3, 2, 3, 4 and of 7, 8, 9, 9, 10, 11.
    assert means == {"reward": (2.5, 9), "model": (1.5, 8), "brevity": (0.5, 0.5), "tokens": (4, 24)}


def test_equal_completions_of_a_prompt_are_counted(tmp_path: Path) -> None:
    """Of a run that has just begun, here."""
    run = runs.make_policy_run(tmp_path / "first")
    rows = [{"prompt": "asked", "completion": "x" if i else "y", "reward": float(i)} for i in range(8)]
    write(run / "policy/samples/evaluation-000000.jsonl", rows)
    found = runs.completions(run)
    assert found["updates"] == [0, 0]
    assert found["sides"][0]["after"] is None
    assert found["sides"][0]["before"]["copies"] == 7


@pytest.mark.parametrize(("steps", "others"), [(700, 2), pytest.param(10_000, 30, marks=pytest.mark.long)])
def test_many_steps_stay_small_and_keep_their_extremes(tmp_path: Path, steps: int, others: int) -> None:
    run = make_run(tmp_path / "long", steps=steps)
    rows = [json.loads(line) for line in (run / "policy/metrics.jsonl").read_text().splitlines()]
    draw_from = np.random.default_rng(1)
    for row in rows:
        row |= {f"metric_{i}": float(draw_from.normal()) for i in range(others)}
    rows[steps * 3 // 7]["kl"], rows[steps * 7 // 8]["kl"] = 100.0, -50.0
    write(run / "policy/metrics.jsonl", rows)
    page = runs.page(run)
    assert len(page.html.encode()) < 2_000_000
    assert page.stages["policy"]["rows_logged"] == steps
    drawn = [row["kl"] for row in page.answers["policy/metrics"]["rows"]]
    assert (max(drawn), min(drawn)) == (100.0, -50.0)


def test_long_texts_are_cut_and_groups_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    """Those whose rewards differ most are kept, in the order in which they were sampled."""
    run = runs.make_policy_run(tmp_path / "first")
    rows = [
        {"prompt": f"{i // 2}", "completion": f"{i % 7}" * 9000, "reward": float((i % 2) * (i // 2 % 40))}
        for i in range(160)
    ]
    config = json.loads((run / "policy/stage.json").read_text())
    config["config"]["num_generations"] = 2
    (run / "policy/stage.json").write_text(json.dumps(config))
    write(run / "policy/samples/update-000000.jsonl", rows)
    found = runs.page(run).answers["policy/rollouts?update=1"]
    kept = [group["spread"] for group in found["groups"]]
    assert 20 < len(kept) < 60
    assert found["left_out"] == found["total"] - len(kept)
    assert found["groups"][0]["completions"][0]["text"].endswith("… (9,000 characters)")
    indices = [group["completions"][0]["index"] for group in found["groups"]]
    assert indices == sorted(indices)
    assert min(kept) >= sorted(abs(i % 40) / 2 for i in range(80))[-len(kept)]


def test_compare_takes_runs_of_different_stages(tmp_path: Path) -> None:
    both = [make_run(tmp_path / "a/run"), make_run(tmp_path / "b/run", rate=3e-4)]
    shutil.rmtree(both[1] / "policy")
    found = runs.Report(reporting.compare(both, tmp_path / "c.html")).all
    (compared,) = (answer for route, answer in found.items() if route.startswith("api/compare?"))
    assert [run["name"] for run in compared["runs"]] == ["a/run", "b/run"]
    assert {"name": "eval_loss", "values": [0.25, 0.25]} in compared["stages"][0]["last"]
    twice = runs.Report(reporting.compare([both[0]] * 2, tmp_path / "c.html"))
    assert {"run (1)", "run (2)"} <= set(runs.texts(twice.all))


def test_the_commands(tmp_path: Path, rlhf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs.make_policy_run(tmp_path / "one")
    make_run(tmp_path / "two")
    ended = rlhf("report", "one")
    assert ended.code == 0
    assert ended.out.startswith(f"{tmp_path}/one/report.html: 0.")
    assert rlhf("report", "one", "-o", "deep/page.html").code == 0
    assert Path("deep/page.html").is_file()
    assert rlhf("compare", "one", "two").code == 0
    assert Path("compare.html").is_file()


def test_a_link_that_leaves_the_run_is_not_followed(tmp_path: Path) -> None:
    run = runs.make_policy_run(tmp_path / "one")
    (run / "policy/samples/update-000020.jsonl").symlink_to("/etc/passwd")
    with pytest.raises(InputError, match="link that leaves"):
        reporting.report(run)


def test_histograms_need_values(tmp_path: Path) -> None:
    run = runs.make_policy_run(tmp_path / "first")

    def histograms() -> list[Any]:
        return [chart for chart in runs.results(run)["charts"] if chart.get("bars")]

    assert not histograms()
    for step in (0, 19):
        rows = [{"prompt": str(i), "completion": "x", "reward": float(i % 3), "length": i} for i in range(64)]
        write(run / f"policy/samples/update-{step:06d}.jsonl", rows)
    reward, _ = histograms()
    assert [line["x"] for line in reward["lines"]] == [[0, 1, 2]] * 2
    assert reward["lines"][1]["y"] == pytest.approx([100 * 22 / 64, 100 * 21 / 64, 100 * 21 / 64])


def test_what_is_said_is_said_of_the_trained_model(tmp_path: Path) -> None:
    """Of the best evaluation, where that is the model that was saved, and not of the last one."""
    run = runs.make_policy_run(tmp_path / "first")
    for step, reward in ((0, 1.0), (10, 3.0), (20, 2.0)):
        write(run / f"policy/samples/evaluation-{step:06d}.jsonl", answers(step, (reward, reward)))
        write(run / f"policy/evaluations/{step:06d}.json", [{"step": step, "prompt_rewards": [reward] * 5}])
    write(run / "policy/best.json", [{"model": 10}])
    assert "was 1 before training and 3 after update 10" in runs.words(run)
    found = runs.completions(run)
    assert found["updates"] == [0, 10]
    assert found["sides"][0]["after"]["text"] == "answer 0 of 10, 0"


def test_percentiles_are_at_the_updates_of_metrics(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    for step in range(3):
        rows = [{"prompt": "p", "completion": "x", "reward": float(step), "length": 2}] * 4
        write(run / f"policy/samples/update-{step:06d}.jsonl", rows)
    _, spreads = samples.completions(runs.stages(run)["policy"])
    assert spreads[0].updates.tolist()[:3] == [1, 2, 3]
    assert spreads[0].percentiles[:3, 2].tolist() == [0, 1, 2]
    band = runs.results(run)["charts"][0]
    assert band["title"] == "Reward of completions: percentiles"
    assert [band["lines"][2][name] for name in ("name", "colour", "dashed")] == ["median", 0, False]


def test_a_row_stands_with_its_columns_and_without_its_role_as_text(tmp_path: Path) -> None:
    run = runs.make_policy_run(tmp_path / "first")
    columns = {"answer": 42, "note": f"see {runs.EVIL}", "long": "x" * 1000}
    said = [{"role": "assistant", "content": "said"}]
    row = {"prompt": "asked", "completion": said, "columns": columns, "reward": 3.0}
    write(run / "policy/samples/evaluation-000000.jsonl", [row])
    (side,) = runs.completions(run)["sides"]
    assert side["before"]["text"] == "said"
    long = f"{'x' * 300}… (1,000 characters)"
    assert side["columns"] == {"answer": "42", "note": f"see {runs.EVIL}", "long": long}
