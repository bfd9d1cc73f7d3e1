"""Consequences of what a user gets wrong: what is left out and said, a run directory in which the repaired command
completes, and a disk that is full.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.checkpoint import Checkpoints
from rlhf_core.models import Model
from tests.mistakes.stages import returns
from tests.mistakes.test_messages import assert_whole
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


@contextmanager
def full_disk(limit: int = 2048) -> Iterator[None]:
    """No file grows beyond `limit` bytes, as far as this process is concerned."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.long  # as in test_order.py, and in tests/packages/core/test_artifacts.py
def test_a_disk_that_is_full_when_the_model_is_saved(
    place: Any, rlhf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Model.save

    def saved_on_a_full_disk(self: Model, *arguments: Any, **options: Any) -> None:
        with full_disk():
            save(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Model, "save", saved_on_a_full_disk)
        ended = rlhf("run", "rm.toml")
    assert ended.code == 1
    assert len(ended.message.splitlines()) == 1
    assert "artifact 'rm.model' could not be written to " in ended.message
    assert "no space left on the disk (" in ended.message
    assert not list((place.path / "run/rm/artifacts").iterdir())
    assert rlhf("run", "rm.toml").code == 0
    assert_whole(place.path / "run/rm")


@pytest.mark.long  # as in tests/packages/core/test_checkpoint_failures.py
def test_a_disk_that_is_full_at_a_checkpoint_leaves_the_one_before(
    place: Any, rlhf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write(
        "rm.toml", place.good["rm.toml"].replace(b"max_training_steps = 2", b"max_training_steps = 3")
    )
    command = ("run", "rm.toml", "--set", "rm.save_steps=1", "--set", "rm.log_steps=1")
    save = Checkpoints.save

    def saved(self: Checkpoints, step: int, *arguments: Any, **options: Any) -> None:
        if step == 1:
            save(self, step, *arguments, **{**options, "block": True})
            return
        with full_disk():
            save(self, step, *arguments, **{**options, "block": True})

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", saved)
        ended = rlhf(*command)
    assert ended.code == 1
    assert len(ended.message.splitlines()) == 1
    assert "the checkpoint of step 2 could not be written" in ended.message
    assert "no space left on the disk" in ended.message
    assert [path.name for path in (place.path / "run/rm/checkpoints").glob("[0-9]*")] == ["1"]
    assert rlhf(*command).code == 0
    assert_whole(place.path / "run/rm")


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
