"""rlhf report and rlhf compare: the contents of the pages, and how the commands end."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rlhf_report as reporting
from rlhf_report import charts, samples

from tests.shared import report_runs as runs

make_run, write = runs.make_run, runs.write


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return runs.page(make_run(tmp_path_factory.mktemp("page") / "first"))


def test_the_page_tells_the_run(page: Any) -> None:
    for told in ("first", "2 min 00 s", "2 × cpu, jax 0.10.2, Python 3.11.7", "rlhf-core 0.1.0", "seed = 3"):
        assert told in page.text, told
    assert page.text.count("done") >= 4
    assert {"stage-rm", "stage-policy", "timing", "warnings", "configuration"} <= set(page.ids())
    assert len(page.ids()) == len(set(page.ids()))
    targets = {a["href"].removeprefix("#") for a in page.of("a")}
    assert targets <= set(page.ids())


def test_every_chart_has_a_place_and_all_that_the_script_looks_for(page: Any) -> None:
    places = [a["id"] for a in page.of("figure") if "data-chart" in a]
    charts = page.charts()
    assert set(places) == set(charts)
    assert len(places) == 11
    for id, chart in charts.items():
        text = json.dumps(chart["item"])
        assert f"{id}-plot" in page.ids()
        for name in ["cursor", "here", *range(len(chart["colours"]))]:
            assert f'"{id}/{name}"' in text
    accessible = [a for a in page.of("figure") if "data-chart" in a]
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in accessible)


def test_nothing_is_loaded_from_elsewhere(page: Any) -> None:
    for tag, attributes in page.elements:
        assert not ({"src", "srcset", "data", "action"} & set(attributes)), tag
        assert attributes.get("href", "#").startswith("#")
        assert tag not in ("link", "iframe", "img", "object", "embed", "base")
    assert "url(" not in re.sub(r"url\(#", "", page.scripts["style"])
    policy = next(a["content"] for a in page.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_whatever_a_completion_holds_stays_text(page: Any) -> None:
    assert len(page.of("script")) == 3
    assert page.of("img") == []
    assert "onerror" not in {name for _, attributes in page.elements for name in attributes}
    assert page.text.count(f"completion 0 7 {runs.EVIL}") == 1
    assert f"careful with {runs.EVIL}" in page.text


def test_completions_stand_at_the_same_place_in_the_order_of_their_rewards(page: Any) -> None:
    for i in (0, 2, 4, 5, 7):  # of 8: the lowest, a quarter, the half, three quarters, the highest
        for step in (0, 19):
            assert f"completion {step} {i} " in page.text
    assert "completion 0 1 " not in page.text
    assert "brevity –" in page.text
    assert "3 tokens, truncated" in page.text


def test_completions_of_the_same_prompts_stand_side_by_side(tmp_path: Path) -> None:
    run = runs.make_policy_run(tmp_path / "first")
    for step in (0, 19):
        rows = [{"prompt": "again", "completion": f"at {step}", "reward": 1.0, "rewards": {}}]
        rows += [{"prompt": f"only {step}", "completion": "once", "reward": 5.0, "rewards": {}}]
        write(run / f"policy/samples/update-{step:06d}.jsonl", rows)
    page = runs.page(run)
    assert "at 0" in page.text
    assert "at 19" in page.text
    assert "once" not in page.text


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
    run = evaluated(tmp_path / "first", {0: (1.0, 2.0), 10: (5.0, 5.0), 20: (7.0, 9.0)}, group=3)
    page = runs.page(run)
    assert "at update 0 and at update 20, each with the completion of median reward among its 3" in page.text
    for i in range(2):
        assert page.text.count(f"asked {i}") == 1
        for step in (0, 20):
            assert f"answer {i} of {step}, 1" in page.text  # the middle one of three
            assert f"answer {i} of {step}, 0" not in page.text
    assert "of 10" not in page.text
    assert "completion 0 4" not in page.text  # of a rollout
    words = " ".join(page.text.split())
    assert "reward2.5→9" in words  # means of 1, 2, 3, 2, 3, 4 and of 7, 8, 9, 9, 10, 11
    assert "model1.5→8" in words
    assert "brevity0.5→0.5" in words
    for told in (
        "mean of 3: 2",
        "mean of 3: 3",
        "mean of 3: 8",
        "mean of 3: 10",
    ):  # of each prompt, each time
        assert told in words
    assert "tokens4→24" in words
    assert "brevity –" in page.text


def test_fixed_prompts_of_a_run_that_has_just_begun(tmp_path: Path) -> None:
    page = runs.page(evaluated(tmp_path / "first", {0: [1.0]}))
    assert "Update 0, the only one that was stored." in page.text
    assert "before and after" not in page.text.partition("asked 0")[0].rpartition("Completions")[2]


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
    assert f"Up to {steps:,} values per curve were logged" in page.text
    chart = next(
        c for id, c in page.charts().items() if '"kl"' in json.dumps(c) or "KL to" in label(page, id)
    )
    drawn = np.concatenate([array for name, array in runs.arrays(chart["item"]) if name == "y"])
    assert drawn.max() == 100.0
    assert drawn.min() == -50.0


def label(page: Any, id: str) -> str:
    return next(a["aria-label"] for a in page.of("figure") if a["id"] == id)


def test_compare(tmp_path: Path) -> None:
    both = [make_run(tmp_path / "a/run", rate=1e-4), make_run(tmp_path / "b/run", rate=3e-4, offset=1.0)]
    path = reporting.compare(both, tmp_path / "both.html")
    page = runs.Page(path.read_text(encoding="utf-8"))
    assert "a/run" in page.text
    assert "b/run" in page.text
    assert "learning_rate" in page.text
    assert re.search(r"learning_rate\s*0.0001\s*0.0003", page.text)
    charts = page.charts()
    assert all(len(chart["colours"]) == 2 for chart in charts.values())
    assert set(charts) == {a["id"] for a in page.of("figure")}
    assert any("a/run: " in label(page, id) and "b/run: " in label(page, id) for id in charts)
    assert path.stat().st_size < 2_000_000


def test_compare_takes_runs_of_different_stages(tmp_path: Path) -> None:
    both = [make_run(tmp_path / "a"), make_run(tmp_path / "b")]
    shutil.rmtree(both[1] / "policy")
    page = runs.Page(reporting.compare(both, tmp_path / "c.html").read_text(encoding="utf-8"))
    assert "policy" in page.text
    twice = runs.Page(reporting.compare([both[0]] * 2, tmp_path / "c.html").read_text(encoding="utf-8"))
    assert "a (1)" in twice.text
    assert "a (2)" in twice.text


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


def policy_charts(page: Any) -> dict[str, str]:
    """Return {label of a chart of the policy's stage: its legend and values, as read aloud}."""
    labels = [a["aria-label"] for a in page.of("figure") if a["id"].startswith("stage-policy")]
    return {text.partition(". ")[0]: text.partition(". ")[2] for text in labels}


def test_what_is_equal_is_one_curve_and_what_is_always_0_has_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    shutil.rmtree(run / "rm")
    rows = [json.loads(line) for line in (run / "policy/metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"clip_ratio/low_mean": 0.0, "clip_ratio/high_mean": 0.0, "memory/peak_rss_bytes": 6.5e9}
    rows[-1] |= {"eval_reward": 1.25}
    write(run / "policy/metrics.jsonl", rows)
    page = runs.page(run)
    found = policy_charts(page)
    assert found["Reward, mean of completions"].startswith("reward = rewards/model/mean: ")
    assert found["Reward, mean of completions"].endswith("; eval_reward: 1.25 at update 20")
    assert found["Memory, GB"] == "memory/peak_rss_bytes: 6.5 at update 1, 6.5 at update 20"
    assert "Share of tokens clipped" not in found
    words = " ".join(page.text.split())
    assert "Always 0, and not drawn: clip_ratio/high_mean, clip_ratio/low_mean." in words
    assert "memory/peak_rss_bytes6.50 GB" in words
    assert "e+09" not in words
    assert words.count("rewards/model/mean") == 2  # the legend, and the table of all metrics


def test_histograms_need_values(tmp_path: Path) -> None:
    run = runs.make_policy_run(tmp_path / "first")
    assert not [title for title in policy_charts(runs.page(run)) if title.endswith("before and after")]
    for step in (0, 19):
        rows = [{"prompt": str(i), "completion": "x", "reward": float(i % 3), "length": i} for i in range(64)]
        write(run / f"policy/samples/update-{step:06d}.jsonl", rows)
    assert len([title for title in policy_charts(runs.page(run)) if title.endswith("before and after")]) == 2


def test_a_prompt_whose_reward_fell_is_marked_and_the_first_sentence_alone_judges(tmp_path: Path) -> None:
    run = evaluated(tmp_path / "first", {0: (3.0, 2.0), 20: (2.0, 2.0)})
    page = runs.page(run)
    assert page.text.count("▼ lower") == 1  # of the first prompt
    assert "▲ higher" not in page.text
    assert "mean of these 2 prompts" in page.text
    assert not [a for _, a in page.elements if a.get("class") in ("good", "bad")]
    # 48 prompts, of which the two that are shown became worse, and most others better.
    after = [2.0, 2.0, *[4.0] * 46]
    for step, rewards in ((0, [3.0, 2.0, *[3.0] * 46]), (20, after)):
        rows = {"step": step, "prompt_rewards": rewards}
        write(run / f"policy/evaluations/{step:06d}.json", [rows])
    words = runs.words(run)
    assert (
        "The mean reward of 48 training prompts was 2.979 before training and 3.917 after update 20" in words
    )
    assert words.count("an improvement") == 1
    assert "better" not in words
    assert "worse" not in words


def test_what_is_said_is_said_of_the_trained_model(tmp_path: Path) -> None:
    """Of the best evaluation, where that is the model that was saved, and not of the last one."""
    run = runs.make_policy_run(tmp_path / "first")
    for step, reward in ((0, 1.0), (10, 3.0), (20, 2.0)):
        write(run / f"policy/samples/evaluation-{step:06d}.jsonl", answers(step, (reward, reward)))
        write(run / f"policy/evaluations/{step:06d}.json", [{"step": step, "prompt_rewards": [reward] * 5}])
    write(run / "policy/best.json", [{"model": 10}])
    words = runs.words(run)
    assert "was 1 before training and 3 after update 10" in words
    assert "at update 0 and at update 10" in words
    assert "answer 0 of 10, 0" in words
    assert "answer 0 of 20" not in words


def test_percentiles_are_at_the_updates_of_metrics(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    for step in range(3):
        rows = [{"prompt": "p", "completion": "x", "reward": float(step), "length": 2}] * 4
        write(run / f"policy/samples/update-{step:06d}.jsonl", rows)
    stage = runs.stages(run)["policy"]
    _, _, spreads = samples.completions(stage, [])
    assert spreads[0].updates.tolist()[:3] == [1, 2, 3]
    assert spreads[0].percentiles[:3, 2].tolist() == [0, 1, 2]
    band, line = (
        charts.band("b", "", spreads[0]),
        charts.lines("l", "", [charts.Line("reward", stage.metrics["reward"], 0)], 9),
    )
    assert all('"start":0' in json.dumps(each.item, separators=(",", ":")) for each in (band, line))


def test_a_row_stands_with_its_columns_and_without_its_role_as_text(tmp_path: Path) -> None:
    """Control characters, and marks that reorder text, are escapes."""
    run = runs.make_policy_run(tmp_path / "first")
    columns = {"answer": 42, "note\x9b": f"see {runs.EVIL}", "name": "gnp\u202e.exe", "long": "x" * 1000}
    for step in (0, 20):
        said = [{"role": "assistant", "content": f"\x1b[31msaid at {step}"}]
        row = {"prompt": "asked", "completion": said, "columns": columns, "reward": 3.0}
        write(run / f"policy/samples/evaluation-{step:06d}.jsonl", [{**row, "rewards": {"model": 3.0}}])
    page = runs.page(run)
    shown = f"answer 42 note\\x9b see {runs.EVIL} name gnp\\u202e.exe long {'x' * 300}… (1,000 characters)"
    assert page.text.count(shown) == 1
    assert page.of("img") == []
    assert not set("\x1b\x9b\u202e") & set(page.html)
    assert "\\x1b[31msaid at 20" in page.text
    assert "assistant:" not in page.text
    assert "Bold: the reward." in page.text
    assert "model 3" not in page.text


def test_the_newest_rollout_shows_what_was_made_more_and_less_likely(tmp_path: Path) -> None:
    run = runs.make_policy_run(tmp_path / "first")
    rows = [
        {
            "prompt": f"prompt {p}",
            "completion": f"said {p} {i} {runs.EVIL}",
            "reward": 1.0,
            "advantage": p * (i - 4.5),
        }
        for p in range(5)
        for i in range(10)
    ]
    write(run / "policy/samples/update-000019.jsonl", rows)
    page = runs.page(run)
    words = " ".join(page.text.split()).partition("What was trained on")[2]
    assert "the rollout before update 20" in words
    assert [p for p in range(5) if f"prompt {p}" in words] == [2, 3, 4]  # the groups that differ most
    assert (
        words.index("said 4 9") < words.index("said 4 8") < words.index("said 4 3") < words.index("said 4 0")
    )
    assert "said 4 2" not in words
    assert "and 2 more" in words
    assert "advantage 18" in words
    assert "advantage -18" in words
    assert page.of("img") == []


def test_pairs_stand_under_the_name_of_their_row(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    shutil.rmtree(run / "policy")
    pair = {"prompt": "<|im_start|>user\nHi", "chosen": "good", "rejected": "bad"}
    scores = {"chosen_score": 1.5, "rejected_score": -0.5, "row": "/far/away/pairs.jsonl row 7"}
    write(run / "rm/samples/evaluation-000020.jsonl", [{**pair, **scores}])
    page = runs.page(run)
    assert "pairs.jsonl row 7" in page.text
    assert "/far/away" not in page.text
    assert "both begin, as the model reads them<|im_start|>user\nHi" in page.text
