"""What a user gets wrong, through the command itself: one message that says where and what to type, the right
exit code, no traceback, and a run directory in which the repaired command still completes.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.checkpoint import Checkpoints
from rlhf_core.models import Model
from rlhf_core.models.safetensors import Reader
from tests.shared import mistakes


@pytest.mark.long
@pytest.mark.parametrize(
    "stage", ["policy", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("base", "rm"))]
)
def test_mistakes_one_after_another_in_one_run_directory(
    stage: str, place: Any, rlhf: Callable[..., Any]
) -> None:
    wrong = []
    for mistake in mistakes.MISTAKES[stage]:
        mistake.make(place)
        ended = rlhf("run", f"{stage}.toml")
        at = [ended.message.find(part) for part in mistake.expected]
        if ended.code != mistake.code or -1 in at or len(ended.message.splitlines()) != 1:
            wrong.append(f"{mistake.name}: exit code {ended.code}, {ended.message!r}")
        place.restore()
    assert not wrong, "\n".join(wrong)
    assert rlhf("run", f"{stage}.toml").code == 0
    assert_whole(place.path / "run" / stage)


def assert_whole(directory: Path) -> None:
    """A finished stage: its artifact verifies, its metrics are those of one run, nothing temporary is left."""
    from rlhf_core import artifacts

    assert json.loads((directory / "stage.json").read_text())["state"] == "done"
    artifacts.open_artifact(directory / "artifacts/model")
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))
    assert not [path for path in directory.rglob(".*") if path.suffix in (".tmp", ".replaced")]


def test_a_reward_that_is_nan_now_and_then_is_said_and_does_not_apply(
    place: Any, rlhf: Callable[..., Any]
) -> None:
    mistakes.rewards("return [float('nan'), *(float(i) for i in range(1, len(completions)))]")(place)
    ended = rlhf("run", "policy.toml")
    assert ended.code == 0
    expected = "warning: reward 'rewards.py:brevity' returned NaN for 1 of 4 completions: treated as None"
    assert ended.warned.count(expected) == 1
    first = json.loads((place.path / "run/policy/samples/update-000000.jsonl").read_text().splitlines()[0])
    assert first["rewards"] == {"rewards.py:brevity": None}
    assert first["advantage"] == 0.0


def test_rows_that_do_not_fit_are_left_out_and_counted(place: Any, rlhf: Callable[..., Any]) -> None:
    row = mistakes.FILES["pairs.jsonl"]
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


FIVE = """
dir = "run"
[[stage]]
name = "base"
trainer = "sft"
model = "model"
train_data = "corpas.jsonl"
[[stage]]
name = "rm"
trainer = "rewrad"
model = "base.model"
train_data = "pairs.jsonl"
[[stage]]
name = "policy"
trainer = "grpo"
model = "bass.model"
train_data = "prompts.jsonl"
rewards = ["rewards.py:brevity"]
learning_rat = 1e-6
loss = { name = "dapo", epsilon_hihg = 0.3 }
"""


def test_check_reports_five_different_mistakes_together(place: Any, rlhf: Callable[..., Any]) -> None:
    place.write("five.toml", FIVE)
    ended = rlhf("check", "five.toml")
    assert ended.code == 2
    told = ended.message.splitlines()
    for line, (path, meant) in zip(
        told,
        [
            ("stage 'base'.train_data: ", "Did you mean 'corpus.jsonl'?"),
            ("stage 'rm'.trainer: ", "Did you mean 'reward'?"),
            ("stage 'policy'.learning_rat: ", "Did you mean 'learning_rate'?"),
            ("stage 'policy'.loss.epsilon_hihg: ", "Did you mean 'epsilon_high'?"),
            ("stage 'policy'.model: ", "Did you mean 'base.model'?"),
        ],
        strict=True,
    ):
        assert line.startswith(path), told
        assert meant in line, told
    assert not (place.path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ('trainer = "gpro"', "stage 'policy'.trainer: no trainer named 'gpro'. Did you mean 'grpo'?"),
        ('loss = "dpao"', "stage 'policy'.loss.name: no policy loss named 'dpao'. Did you mean 'dapo'?"),
        (
            "num_generation = 4",
            "stage 'policy'.num_generation: unknown field. Did you mean 'num_generations'?",
        ),
        ('learning_rate = "fast"', "stage 'policy'.learning_rate: expected a number, got 'fast'"),
        ("kl = { beta = -1 }", "stage 'policy'.kl.beta: "),
        ("total_batch_size = 3", "a group would be split"),
        ("num_generations = 1", "stage 'policy'.num_generations: "),
        ('model = "modle"', "stage 'policy'.model: no such file"),
        (
            'rewards = ["lenght"]',
            "stage 'policy'.rewards[0].name: no reward named 'lenght'. Did you mean 'length'?",
        ),
        ("epsilon = 0.1\nloss = { epsilon = 0.2 }", "stage 'policy'.epsilon"),
    ],
)
def test_check_tells_what_is_wrong_with_a_setting(
    settings: str, expected: str, place: Any, rlhf: Callable[..., Any]
) -> None:
    place.settings("policy.toml", settings)
    ended = rlhf("check", "policy.toml")
    assert ended.code == 2
    assert len(ended.message.splitlines()) == 1, ended.message
    assert expected in ended.message


def test_the_shapes_that_are_broken_here_are_those_of_the_model(place: Any) -> None:
    """The mistakes above are about tensors that exist, else they would prove nothing."""
    reader = Reader(place.path / "model/model.safetensors")
    assert reader.view("model.norm.weight").shape == (16,)
    assert np.shape(reader.view("model.layers.0.mlp.up_proj.weight")) == (24, 16)


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
