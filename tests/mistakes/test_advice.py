"""Settings without effect are reported once in a run, and from Python; all the same they are noted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core import data
from rlhf_core.artifacts import MANIFEST
from rlhf_core.config import TrainerConfig
from rlhf_core.training.starting_model import default_warnings

WARMUP = "warmup_steps=9: the run has 2 updates, so the learning rate ends at 2.22222e-07 of 1e-06"
TOP_P = "sampling.top_p=0.9: completions come from a filtered distribution"
SETS = {
    stage: ["--set", f"{stage}.warmup_steps=9", "--set", f"{stage}.learning_rate=1e-6"]
    for stage in ("rm", "policy")
}
SETS["policy"] += ["--set", "policy.top_p=0.9"]


def test_an_update_has_as_many_epochs_as_is_said() -> None:
    assert data.count_updates(5, 64, 3) == 1
    assert np.bincount(next(data.batch_rows(5, 64, seed=0, epochs=3))).tolist() == [3] * 5


@pytest.mark.parametrize("source", ["owner/name", "here", {"model_type": "llama"}])
def test_a_stages_output_is_as_pretrained_as_what_the_stage_started_from(source: Any, tmp_path: Path) -> None:
    stage: Any = SimpleNamespace(inputs={})
    trained = tmp_path / "base" / "artifacts" / "model"
    trained.mkdir(parents=True)
    (trained / MANIFEST).touch()
    source = str(tmp_path) if source == "here" else source
    said = default_warnings(TrainerConfig(model=source), stage)
    assert len(said) == isinstance(source, str)
    (trained.parents[1] / "stage.json").write_text(json.dumps({"config": {"model": source}}))
    assert default_warnings(TrainerConfig(model=str(trained)), stage) == said


def test_a_check_counts_the_examples_of_an_update_that_the_data_do_not_fill(place: Any, rlhf: Any) -> None:
    rows, file = (place.path / "pairs.jsonl").read_text().splitlines(), place.path / "rm.toml"
    file.write_text(file.read_text().replace("max_training_steps", "# max_training_steps"))
    checked = rlhf("check", "rm.toml", "--set", "rm.total_batch_size=4096", "--set", "rm.num_train_epochs=3")
    assert f"1 update of {3 * len(rows)} pairs" in " ".join(checked.out.split())


@pytest.mark.parametrize(
    ("stage", "advice"), [("rm", [WARMUP]), pytest.param("policy", [WARMUP, TOP_P], marks=pytest.mark.long)]
)
def test_a_run_shows_it_once_and_notes_it(
    place: Any, rlhf: Callable[..., Any], stage: str, advice: list[str]
) -> None:
    ended = rlhf("run", f"{stage}.toml", *SETS[stage])
    assert ended.code == 0
    shown = ended.out + ended.warned + ended.message
    assert [shown.count(each) for each in advice] == [1] * len(advice)
    rows = [json.loads(line) for line in (place.path / "run/events.jsonl").read_text().splitlines()]
    noted = [row["message"] for row in rows if row["event"] == "warning"]
    assert f"stage '{stage}'.{WARMUP}" in noted
    assert all(any(each in message for message in noted) for each in advice)


@pytest.mark.long
def test_the_python_door_tells_it(short: Any) -> None:
    with (
        pytest.warns(UserWarning, match=r"stage 'sft'\.warmup_steps=7: the run has 6 updates"),
        pytest.warns(UserWarning, match=r"stage 'sft'\.total_batch_size=64: train_data has 11 rows"),
    ):
        short.train("sft", warmup_steps=7, total_batch_size=64)
    with pytest.warns(UserWarning, match=r"stage 'grpo'\.total_batch_size=64: train_data has 7 prompts"):
        short.train("grpo", total_batch_size=64, max_training_steps=1)
