"""Settings without effect are reported in the plan, once in a run, and from Python; all the same they are noted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rlhf_dpo import DPOConfig
from rlhf_grpo import GRPOConfig

from rlhf_core import data
from rlhf_core.artifacts import MANIFEST
from rlhf_core.config import TrainerConfig
from rlhf_core.config.warnings import batch_warnings, config_warnings
from rlhf_core.training.starting_model import default_warnings

WARMUP = "warmup_steps=9: the run has 2 updates, so the learning rate ends at 2.22222e-07 of 1e-06"
TOP_P = "sampling.top_p=0.9: completions come from a filtered distribution"
SETS = {
    stage: ["--set", f"{stage}.warmup_steps=9", "--set", f"{stage}.learning_rate=1e-6"]
    for stage in ("rm", "policy")
}
SETS["policy"] += ["--set", "policy.top_p=0.9"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, []),
        ({"warmup_steps": 4}, []),
        (
            {"warmup_steps": 5},
            ["warmup_steps=5: the run has 4 updates, so the learning rate ends at 0.8 of 1"],
        ),
        (
            {"learning_rate_end": 0.0},
            [
                "learning_rate_end=0: has no effect: scheduler is 'constant'; linear, cosine and wsd fall to it"
            ],
        ),
        ({"learning_rate_end": 0.1, "scheduler": "wsd"}, []),
        ({"offload": ["optimizer"]}, ["offload: has no effect on CPUs, whose memory is the host's"]),
    ],
)
def test_what_is_said(settings: dict[str, Any], told: list[str]) -> None:
    assert list(config_warnings(TrainerConfig(learning_rate=1.0, **settings), 4)) == told


def test_a_run_of_one_update() -> None:
    (said,) = config_warnings(TrainerConfig(warmup_steps=2), 1)
    assert "the run has 1 update, so" in said


@pytest.mark.parametrize(
    ("settings", "sampling", "told"),
    [
        ({"total_batch_size": 5}, {}, None),
        (
            {"total_batch_size": 6, "num_train_epochs": 3},
            {},
            "so that an update has each of them up to 2 times",
        ),
        ({"total_batch_size": 64, "num_train_epochs": 3}, {}, "an update has each of them up to 3 times"),
        ({"total_batch_size": 64, "max_training_steps": 2}, {}, "an update has each of them up to 13 times"),
        ({"total_batch_size": 64, "num_train_epochs": 1}, {}, "the run is a single update on all of them"),
        ({"total_batch_size": 64}, {"prompts_per_rollout": 5, "num_generations": 8}, None),
        (
            {"total_batch_size": 64},
            {"prompts_per_rollout": 8, "num_generations": 8},
            "write total_batch_size = 40 ",
        ),
        (
            {"total_batch_size": 64},
            {"prompts_per_rollout": 32, "num_generations": 8},
            "write total_batch_size = 8 ",
        ),
    ],
)
def test_a_batch_larger_than_the_data_is_reported_with_what_to_write(
    settings: dict[str, Any], sampling: dict[str, int], told: str | None
) -> None:
    said = list(batch_warnings(TrainerConfig(**settings), 5, **sampling))
    assert len(said) == (told is not None)
    assert all(line.startswith("total_batch_size=") and str(told) in line for line in said)


def test_an_update_has_as_many_epochs_as_is_said() -> None:
    assert data.count_updates(5, 64, 3) == 1
    assert np.bincount(next(data.batch_rows(5, 64, seed=0, epochs=3))).tolist() == [3] * 5


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            TrainerConfig(),
            "learning_rate = 5e-05 and num_train_epochs = 10, .* write learning_rate = 1e-5 and num_",
        ),
        (
            TrainerConfig(max_training_steps=3),
            "learning_rate: the default is learning_rate = 5e-05, .* = 1e-5, or",
        ),
        (TrainerConfig(learning_rate=1e-4), "num_train_epochs: the default is num_train_epochs = 10,"),
        (TrainerConfig(learning_rate=5e-5, num_train_epochs=10), None),
        (TrainerConfig(learning_rate=5e-5, num_train_epochs=10).replace(seed=1), None),
        (TrainerConfig().replace(seed=1), "learning_rate = 5e-05 and"),
        (TrainerConfig(lora={"rank": 2}), None),
        (TrainerConfig(frozen_parameters="embed"), None),
        (GRPOConfig(), None),
        (DPOConfig(), None),
    ],
)
def test_shared_defaults_for_all_weights_of_a_pretrained_model_are_reported(
    config: TrainerConfig, told: str | None, tmp_path: Path
) -> None:
    stage: Any = SimpleNamespace(inputs={})
    trained = tmp_path / "base" / "artifacts" / "model"
    trained.mkdir(parents=True)
    (trained / MANIFEST).touch()
    for source, pretrained in [("owner/name", True), (str(tmp_path), True), ({"model_type": "llama"}, False)]:
        said = default_warnings(config.replace(model=source), stage)
        assert len(said) == (told is not None and pretrained)
        assert all(re.search(str(told), line) for line in said)
        # A stage's output is as pretrained as what the stage started from.
        (trained.parents[1] / "stage.json").write_text(json.dumps({"config": {"model": source}}))
        assert default_warnings(config.replace(model=str(trained)), stage) == said


def test_a_check_shows_it(place: Any, rlhf: Callable[..., Any]) -> None:
    checked = rlhf("check", "policy.toml", *SETS["policy"], "--set", "policy.total_batch_size=4096")
    told = " ".join(checked.out.split())  # which wraps
    assert "warning: total_batch_size=4096: train_data has" in told
    assert f"warning: {WARMUP}" in told
    assert f"warning: {TOP_P}" in told


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
