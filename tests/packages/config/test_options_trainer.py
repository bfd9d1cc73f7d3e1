"""The fields that all trainers share: their defaults and values with special meanings."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlhf_core.config import TrainerConfig


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("2h30m", 9000.0),
        ("1d", 86400.0),
        ("90m", 5400.0),
        ("45s", 45.0),
        ("1h 1.5m", 3690.0),
        ("50min", 3000.0),
        ("90 min", 5400.0),
        ("2hours", 7200.0),
        ("1 hr, 30 minutes", 5400.0),
        ("2hrs", 7200.0),
        ("30sec", 30.0),
        ("45 Seconds", 45.0),
        ("2 days", 172800.0),
        (10, 10.0),
        (0.5, 0.5),
    ],
)
def test_durations(given: Any, seconds: float) -> None:
    assert TrainerConfig(training_time_limit=given).training_time_limit == seconds
    if isinstance(given, str):
        assert TrainerConfig(save_interval_minutes=given).save_interval_minutes == seconds / 60


def test_zero_turns_clipping_off() -> None:
    assert TrainerConfig(max_grad_norm=0).max_grad_norm is None


def test_paths_are_text() -> None:
    config = TrainerConfig(model=Path("m"), train_data=Path("d.jsonl"), save_directory=Path("out"))
    assert (config.model, config.train_data, config.save_directory) == ("m", "d.jsonl", "out")


@pytest.mark.parametrize("given", ["none", None, "constant"])
def test_a_constant_rate_has_easydels_name_too(given: Any) -> None:
    assert TrainerConfig(scheduler=given).scheduler == "constant"


@pytest.mark.parametrize(("given", "tracks"), [(True, True), (False, False), (10.0, True), (0.0, False)])
def test_memory_is_tracked_or_not(given: Any, tracks: bool) -> None:
    assert bool(TrainerConfig(track_memory=given).track_memory) is tracks


COMPARING = {
    "early_stopping_patience": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
}


@pytest.mark.parametrize("field", COMPARING)
def test_what_compares_evaluations_is_named(field: str) -> None:
    value = COMPARING[field]
    assert TrainerConfig(evaluation_steps=5, **{field: value}).compares == field


def test_evaluations_are_not_compared_by_default() -> None:
    assert TrainerConfig(evaluation_steps=5).compares is None


def test_a_shared_field_that_a_trainer_does_not_use() -> None:
    class Config(TrainerConfig):
        UNUSED_FIELDS: ClassVar[dict[str, str]] = {"overlong": "nothing is long here"}

    with pytest.warns(UserWarning, match=r"^Config\.overlong: has no effect here: nothing is long here$"):
        config = Config(overlong="truncate")
    assert config.overlong == "filter"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Config(overlong="filter") == Config.from_dict(config.to_dict()) == config.replace()
