"""Settings that cannot act are told in the plan, once in a run, and by the Python door; they are noted all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rlhf_core.config import TrainerConfig
from rlhf_core.config.warnings import config_warnings

WARMUP = "warmup_steps=9: the run has 2 updates, so that the learning rate ends at 2.22222e-07 of 1e-06"
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
            ["warmup_steps=5: the run has 4 updates, so that the learning rate ends at 0.8 of 1"],
        ),
        (
            {"learning_rate_end": 0.0},
            ["learning_rate_end=0: cannot act: scheduler is 'constant'; linear, cosine and wsd fall to it"],
        ),
        ({"learning_rate_end": 0.1, "scheduler": "wsd"}, []),
    ],
)
def test_what_is_said(settings: dict[str, Any], told: list[str]) -> None:
    assert list(config_warnings(TrainerConfig(learning_rate=1.0, **settings), 4)) == told


def test_a_run_of_one_update() -> None:
    (said,) = config_warnings(TrainerConfig(warmup_steps=2), 1)
    assert "the run has 1 update, so" in said


def test_a_check_shows_it(place: Any, rlhf: Callable[..., Any]) -> None:
    checked = rlhf("check", "policy.toml", *SETS["policy"])
    told = " ".join(checked.out.split())  # which wraps
    assert f"warning: {WARMUP}" in told
    assert f"warning: {TOP_P}" in told


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
    with pytest.warns(UserWarning, match=r"stage 'sft'\.warmup_steps=7: the run has 6 updates"):
        short.train("sft", warmup_steps=7)
