"""Held-out pairs shown while the model learns: their texts, their scores, and where both are written."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rlhf_reward import RewardConfig

from rlhf_core import artifacts, data, hookimpl
from rlhf_core.scoring import Scorer


@pytest.fixture(scope="module")
def model(tiny: ModuleType) -> Any:
    return tiny.make_model("score", scale=4.0)


class Samples:
    """A logger that keeps what it is told of pairs."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, str, list[Any]]] = []

    @hookimpl
    def rlhf_samples(self, step: int, name: str, rows: list[Any]) -> None:
        self.logged.append((step, name, rows))


def train(
    tiny: ModuleType,
    model: Any,
    directory: Path,
    held_out: list[dict],
    listeners: tuple[Any, ...] = (),
    **changes: Any,
) -> Path:
    config = RewardConfig(
        learning_rate=1e-2,
        total_batch_size=4,
        max_training_steps=4,
        evaluation_steps=2,
        **changes,
    )
    datasets = {"train_dataset": tiny.pairs(8), "eval_dataset": held_out}
    tiny.run("reward", config, directory, listeners=listeners, model=model, **datasets)
    return directory / "samples"


def test_the_scores_are_those_of_the_model_at_that_update(
    tiny: ModuleType, model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = tiny.pairs(9, seed=2)
    watch = Samples()
    samples = train(tiny, model, tmp_path, held_out, listeners=(watch,), num_preview_samples=3)
    assert sorted(path.name for path in samples.iterdir()) == [
        "evaluation-000002.jsonl",
        "evaluation-000004.jsonl",
    ]
    rows = tiny.read_rows(samples / "evaluation-000004.jsonl")
    assert [row["row"].rpartition(" ")[2] for row in rows] == ["1", "5", "9"]  # from first to last
    scorer = Scorer.load(tmp_path / "artifacts" / "model")
    scores = scorer.score_rows(data.load([held_out[0], held_out[4], held_out[8]]))
    for i, (row, pair) in enumerate(zip(rows, (held_out[0], held_out[4], held_out[8]), strict=True)):
        assert row["margin"] == pair["margin"]
        for side in ("chosen", "rejected"):
            assert row[f"{side}_score"] == pytest.approx(scores[f"{side}_score"][i], rel=1e-4, abs=1e-6)
            text = pair["prompt"] + pair[side]
            assert (row["prompt"] + row[side]).split() == [*text.split(), "</s>"]
        assert not row["chosen"][:1] == row["rejected"][:1] != ""  # the prompt is all that they share
    before = tiny.read_rows(samples / "evaluation-000002.jsonl")
    assert watch.logged == [(2, "evaluation", before), (4, "evaluation", rows)]
    assert [row["chosen"] for row in before] == [row["chosen"] for row in rows]
    assert before[0]["chosen_score"] != rows[0]["chosen_score"]
    lines = [line for line in capsys.readouterr().err.splitlines() if "chosen  " in line]
    assert lines[3:] == [
        f"[reward]   chosen   {row['chosen_score']:8.3f}  {row['chosen'].strip()}" for row in rows
    ]


def test_no_more_than_there_are_and_none_where_none_are_asked_for(
    tiny: ModuleType, model: Any, tmp_path: Path
) -> None:
    held_out = tiny.pairs(2, seed=2)
    samples = train(tiny, model, tmp_path / "few", held_out, num_preview_samples=5)
    assert len(tiny.read_rows(samples / "evaluation-000002.jsonl")) == 2
    assert not train(tiny, model, tmp_path / "none", held_out, num_preview_samples=0).exists()


def test_only_pairs_that_are_scored(tiny: ModuleType, model: Any, tmp_path: Path) -> None:
    """The first two batches of three."""
    limits = {"eval_batch_size": 3, "max_evaluation_steps": 2, "num_preview_samples": 2}
    samples = train(tiny, model, tmp_path, tiny.pairs(9, seed=2), **limits)
    rows = tiny.read_rows(samples / "evaluation-000002.jsonl")
    assert [row["row"].rpartition(" ")[2] for row in rows] == ["1", "6"]


def test_a_long_text_is_cut_on_the_console_only(
    tiny: ModuleType, model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = " ".join("abcdefghij" * 6)
    held_out = [{"prompt": words, "chosen": f" B {words}", "rejected": f" C {words}"}]
    samples = train(tiny, model, tmp_path, held_out)
    (row,) = tiny.read_rows(samples / "evaluation-000002.jsonl")
    assert row["prompt"].strip() == words
    prompt, chosen, rejected = [x for x in capsys.readouterr().err.splitlines() if "…" in x][:3]
    assert prompt.endswith(f"  …{words[-87:]}")
    assert chosen.endswith(f"  {('B ' + words)[:87]}…")
    assert rejected.endswith(f"  {('C ' + words)[:87]}…")
    assert "contract" in artifacts.open_artifact(tmp_path / "artifacts" / "model").metadata
