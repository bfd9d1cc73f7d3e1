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


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"max_grad_norm": 0}, {"max_grad_norm": None}),  # clips nothing
        ({"model": Path("m"), "save_directory": Path("out")}, {"model": "m", "save_directory": "out"}),
        ({"train_data": Path("d.jsonl")}, {"train_data": "d.jsonl"}),
        *(({"scheduler": name}, {"scheduler": "constant"}) for name in ("none", None, "constant")),
        *(({"track_memory": each}, {"track_memory": True}) for each in (True, 10.0)),
        *(({"track_memory": each}, {"track_memory": False}) for each in (False, 0.0)),
        ({"evaluation_steps": 5}, {"compares": None}),
        *(
            ({"evaluation_steps": 5, field: value}, {"compares": field})
            for field, value in (
                ("early_stopping_patience", 2),
                ("load_best_model_at_end", True),
                ("metric_for_best_model", "accuracy"),
            )
        ),
        ({"dataloader_num_workers": 1}, {"workers": 1}),
        ({"dataloader_num_workers": 1, "dataset_num_proc": 2}, {"workers": 2}),
    ],
    ids=str,
)
def test_values_with_a_meaning_of_their_own(given: dict[str, Any], found: dict[str, Any]) -> None:
    config = TrainerConfig(**given)
    for name, value in found.items():
        read = getattr(config, name)
        assert (bool(read) if name == "track_memory" else read) == value


def test_a_shared_field_that_a_trainer_does_not_use() -> None:
    class Config(TrainerConfig):
        UNUSED_FIELDS: ClassVar[dict[str, str]] = {"overlong": "nothing is long here"}

    with pytest.warns(UserWarning, match=r"^Config\.overlong: has no effect here: nothing is long here$"):
        config = Config(overlong="truncate")
    assert config.overlong == "filter"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Config(overlong="filter") == Config.from_dict(config.to_dict()) == config.replace()
