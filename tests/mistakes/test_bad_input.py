"""Consequences of what a user gets wrong: what is left out and said, and a directory that may not be written to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.mistakes.stages import returns
from tests.shared import places


def test_a_reward_that_is_nan_now_and_then_is_said_and_does_not_apply(
    place: Any, rlhf: Callable[..., Any]
) -> None:
    returns("NaN first", "return [float('nan'), *map(float, range(1, len(completions)))]").make(place)
    ended = rlhf("run", "policy.toml")
    assert ended.code == 0
    expected = "warning: reward 'rewards.py:brevity' returned NaN for 1 of 4 completions: treated as None"
    assert ended.warned.count(expected) == 1
    first = json.loads((place.path / "run/policy/samples/update-000000.jsonl").read_text().splitlines()[0])
    assert first["rewards"] == {"rewards.py:brevity": None}
    assert first["advantage"] == 0.0


def test_rows_that_do_not_fit_are_left_out_and_counted(place: Any, rlhf: Callable[..., Any]) -> None:
    row = places.FILES["pairs.jsonl"]
    place.rows("pairs.jsonl", row, row, {**row, "prompt": " ".join([row["prompt"]] * 9)}, row)
    ended = rlhf("run", "rm.toml")
    assert ended.code == 0
    expected = "5 pairs: 4 kept, 1 over 32 tokens filtered (20 %)"
    assert expected in ended.out
    # The plan has it, so the stage does not say it again; events.jsonl has the warning.
    assert expected not in ended.warned
    assert expected in (place.path / "run/events.jsonl").read_text(encoding="utf-8")


def test_a_directory_that_may_not_be_written_to(
    place: Any, rlhf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = place.path / "locked"
    locked.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked)  # root may write everywhere
    for command in ("check", "run"):
        ended = rlhf(command, "rm.toml", "--dir", "locked/run")
        assert ended.code == 2
        assert ended.message == f"dir: no permission to write to {locked}; give another --dir"
    ended = rlhf("score", "scorer", "pairs.jsonl", "-o", "locked/scores.jsonl")
    assert ended.code == 2
    assert ended.message == f"-o locked/scores.jsonl: no permission to write to {locked}; give another file"


def test_rows_longer_than_the_model_was_made_for_are_said(place: Any, rlhf: Callable[..., Any]) -> None:
    row = places.FILES["pairs.jsonl"]
    place.rows("pairs.jsonl", {**row, "prompt": " ".join([row["prompt"]] * 12)})
    place.settings("rm.toml", "max_sequence_length = 200")
    ended = rlhf("check", "rm.toml")
    assert ended[:3] == (0, "", "")
    said = " ".join(ended.out.replace("│", " ").split())
    assert "1 of up to 86 tokens, more than the model's 64 positions: set max_sequence_length" in said


def test_a_plan_has_the_labels_of_rewards(place: Any, rlhf: Callable[..., Any]) -> None:
    place.settings("policy.toml", 'rewards = [{ name = "rewards.py:brevity", label = "short" }]')
    assert "rewards short" in " ".join(rlhf("check", "policy.toml").out.split())
