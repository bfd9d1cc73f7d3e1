"""`rlhf demo` in miniature: run, found again, measured and shown. How well it learns, `make demo` says."""

from __future__ import annotations

import json
import math
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rlhf_tools.demo import measure, run, table

from rlhf_core.errors import InputError

SETS = (
    "base.model.hidden_size=16",
    "base.model.num_hidden_layers=1",
    "base.model.num_attention_heads=2",
    "base.model.intermediate_size=24",
    "base.max_training_steps=2",
    "rm.max_training_steps=2",
    "policy.max_training_steps=1",
    "policy.total_batch_size=16",
)


def taught(directory: Path, **options: Any) -> dict[str, Any]:
    sizes = run.Sizes(128, 96, 16, 16, 4, 16, 512)
    found: dict[str, Any] = run.demo(directory, seed=0, sizes=sizes, sets=SETS, **options)
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    directory = tmp_path_factory.mktemp("runs") / "quickstart-seed0"
    return SimpleNamespace(summary=taught(directory), directory=directory)


def shown(summary: dict[str, Any], directory: Path) -> str:
    from rich.console import Console

    out = StringIO()
    Console(file=out, width=80, highlight=False).print(table.closing_table(summary, directory))
    return out.getvalue()


@pytest.mark.long
def test_a_second_run_trains_nothing_and_one_on_other_data_is_refused(finished: SimpleNamespace) -> None:
    assert finished.summary["found"] is False
    before = {p: p.stat().st_mtime_ns for p in finished.directory.rglob("*") if p.is_file()}
    again = taught(finished.directory)
    after = {p: p.stat().st_mtime_ns for p in finished.directory.rglob("*") if p.is_file()}
    rewritten = {p.name for p in after if after[p] != before.get(p)}
    assert rewritten <= {"quickstart.toml", "pipeline.resolved.toml", ".lock"}
    assert again == {**finished.summary, "found": True}
    assert "nothing was trained" in " ".join(shown(again, finished.directory).split())
    with pytest.raises(InputError, match="other settings"):
        taught(finished.directory, shuffle_labels=True)


@pytest.mark.long
def test_the_summary_is_complete_and_its_table_fits_80_columns_without_colour(
    finished: SimpleNamespace,
) -> None:
    summary = json.loads((finished.directory / "summary.json").read_text())
    assert {**summary, "found": False} == finished.summary
    assert set(summary["pair_accuracy"]) == {"all", *measure.KINDS}
    before, after = summary["before"], summary["after"]
    shares = [each[k] for each in (before, after) for k in ("success", "best_of_8")]
    for share in (*shares, *summary["pair_accuracy"].values()):
        assert 0 <= share["low"] <= share["value"] <= share["high"] <= 1
    for estimate in (summary["kl"], summary["good_reply_reward"], after["reward"], after["length"]):
        assert estimate["low"] <= estimate["value"] <= estimate["high"]
    assert 1 <= after["length"]["value"] <= measure.LONGEST_REPLY
    assert len(summary["examples"]) == 3
    assert set(summary["seconds"]) == {"base", "rm", "policy", "measuring"}
    assert all(seconds > 0 for seconds in summary["seconds"].values())
    text = shown(finished.summary, finished.directory)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "\x1b" not in text
    for words in ("before (SFT)", "after (GRPO)", "right, best of 8", "KL to SFT", "unfinished", "Wall time"):
        assert words in text
    for example in finished.summary["examples"]:
        assert example["prompt"] in text
    ends = [line.split()[-1] for line in text.splitlines() if line.startswith(("before ", "after "))]
    sides = [example[side] for example in summary["examples"] for side in ("before", "after")]
    said = ["wrong" if side["mistakes"] else "right" for side in sides]
    assert [end for end in ends if end in ("wrong", "right")] == said


@pytest.mark.long
def test_log_probabilities_of_replies_do_not_depend_on_padding(finished: SimpleNamespace) -> None:
    from rlhf_core import load_model

    model = load_model(finished.directory / "policy/artifacts/model")
    prompts = ["Mia wants a red kite .", "Mia wants a red"]
    replies = ["Dear Mia , here", "Thank you !"]
    encode = model.tokenizer
    tokens, lengths = np.zeros((2, 6), np.int32), np.zeros(2, np.int32)
    expected = []
    for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        head, whole = encode(prompt)["input_ids"], encode(f"{prompt} {reply}")["input_ids"]
        said = whole[len(head) :]
        tokens[row, : len(said)], lengths[row] = said, len(said)
        logits = np.asarray(model.logits([whole], [[1] * len(whole)]), np.float64)[0]
        logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected.append(sum(logps[t - 1, whole[t]] for t in range(len(head), len(whole))))
    found = measure.sequence_logps(model, prompts, tokens, lengths)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (3, 10), (250, 512), (512, 512)])
def test_the_interval_of_a_share_solves_wilsons_equation(successes: int, trials: int) -> None:
    found = measure.proportion(successes, trials)
    share = successes / trials
    assert found["value"] == share
    for end in (found["low"], found["high"]):
        deviation = abs(share - end)
        assert deviation == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / trials), abs=1e-9)
    assert 0 <= found["low"] <= share <= found["high"] <= 1 + 1e-12


def test_the_interval_of_a_mean_covers_19_times_in_20() -> None:
    rng = np.random.default_rng(0)
    found = [measure.mean(rng.normal(3.0, 2.0, 200)) for _ in range(2000)]
    assert np.mean([f["low"] <= 3.0 <= f["high"] for f in found]) == pytest.approx(0.95, abs=0.015)


def test_the_stopwatch_adds_up_the_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_core import plugins

    stage = SimpleNamespace(name="base", dir=tmp_path, is_main=True)
    now = iter([100.0, 103.0, 500.0, 501.5, 502.0])
    for attempt in ("killed", "finished"):
        host = plugins.load(files=[run.HERE / "stopwatch.py"])
        with monkeypatch.context() as patch:
            patch.setattr("time.monotonic", lambda: next(now))
            host.hook.rlhf_stage_start(stage=stage, config=None)
            host.hook.rlhf_step_end(stage=stage, step=1, metrics={})
            if attempt == "finished":
                host.hook.rlhf_stage_end(stage=stage, error=None)
    assert json.loads((tmp_path / "wall_time.json").read_text()) == {"seconds": 5.0}
