"""Fields that all trainers share, in real runs: optimizers, saving by time, comparing evaluations, the console."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core import fit, hookimpl, plugins
from rlhf_core.contracts import TRAINER
from rlhf_core.errors import InputError
from rlhf_core.mesh import make_mesh
from rlhf_core.pipeline.settings import settings_lines

RATES = {"adafactor": 3e-2, "lion": 3e-3, "muon": 3e-2, "sgd": 0.3}


@pytest.mark.parametrize(
    ("trainer", "defaults"),
    [
        ("sft", ()),
        ("reward", ("loss bradley_terry", "center_rewards_coefficient 0.1")),
        (
            "grpo",
            ("loss dapo (epsilon 0.2, ", "advantage group (scale group, ", "kl k3 (beta 0.04, place loss)"),
        ),
        ("dpo", ("loss sigmoid", "beta 0.1")),
        ("distill", ("divergence jsd (beta 0.5)",)),
    ],
)
def test_a_plan_names_the_defaults_that_decide_what_each_trainer_learns(
    trainer: str, defaults: tuple[str, ...]
) -> None:
    registry = plugins.load().registry
    (line,) = settings_lines(registry.get(TRAINER, trainer).config(), registry)
    shared = (
        "optimizer adamw",
        "learning_rate ",
        "scheduler constant",
        "num_train_epochs ",
        "max_grad_norm 1",
    )
    for expected in (*defaults, *shared):
        assert expected in line


class Interrupt:
    """A logger that interrupts after one update."""

    def __init__(self, step: int) -> None:
        self.step = step

    @hookimpl
    def rlhf_step_end(self, step: int) -> None:
        if step == self.step:
            raise KeyboardInterrupt


def checkpoints(directory: Path) -> list[int]:
    return sorted(int(each.name) for each in (directory / "checkpoints").iterdir() if each.name.isdecimal())


# The formulas: tests/packages/core; how states are sharded: tests/packages/training/test_memory_devices.py.
@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "adafactor",
        "muon",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("lion", "sgd")),
    ],
)
def test_every_optimizer_learns_sharded_and_resumes_from_its_checkpoint(short: Any, name: str) -> None:
    given: dict[str, Any] = {"optimizer": name, "learning_rate": RATES[name], "save_steps": 3}
    given["inputs"] = {"mesh": make_mesh(data=2, fsdp=2, devices=jax.devices()[:4])}
    whole, watch = short.train("sft", at="whole", **given)
    losses = [row["loss"] for row in watch.rows]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    with pytest.raises(KeyboardInterrupt):
        short.train("sft", at="again", listeners=(Interrupt(4),), **given)
    again, later = short.train("sft", at="again", **given)
    assert later.steps() == [4, 5, 6]
    for path, leaf in whole.items():
        np.testing.assert_array_equal(leaf, again[path], err_msg=path)


@pytest.mark.long
def test_saving_by_time(short: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on a minute a look."""
    now = iter(range(0, 10**6, 60))
    monkeypatch.setattr(fit.time, "perf_counter", lambda: float(next(now)))
    short.train("sft", at="seldom", save_interval_minutes=1e4)
    short.train("sft", at="often", save_interval_minutes=1e-3)
    # The last state is saved before the model is written, whatever the interval.
    assert checkpoints(tmp_path / "seldom" / "sft") == [6]
    assert checkpoints(tmp_path / "often" / "sft") == [1, 2, 3, 4, 5, 6]


def test_memory_is_tracked_where_asked_for(short: Any) -> None:
    _, watch = short.train("sft", max_training_steps=2, track_memory=True)
    assert all(row["memory/peak_rss_bytes"] > 2**20 for row in watch.rows)
    _, watch = short.train("sft", at="not", max_training_steps=2)
    assert not any(name.startswith("memory/") for row in watch.rows for name in row)


@pytest.mark.parametrize("progress", ["rich", "tqdm", "json"])
def test_the_console_shows_the_metrics_asked_for(
    short: Any, capsys: pytest.CaptureFixture[str], progress: str
) -> None:
    short.train(
        "sft", max_training_steps=2, progress_bar_type=progress, progress_metrics=["grad_norm", "absent"]
    )
    out, err = capsys.readouterr()
    if progress == "json":
        events = [json.loads(line) for line in out.splitlines()]
        assert [event["event"] for event in events] == ["start", "step", "step", "saved", "end"]
        return
    lines = [line for line in err.splitlines() if line.startswith(("[sft] 1/2", "[sft] 2/2"))]
    assert len(lines) == 2
    assert all("grad_norm" in line and "loss" not in line for line in lines)


# Comparing evaluations


def test_an_unknown_metric_is_refused_before_the_first_update(short: Any) -> None:
    with pytest.raises(InputError, match=r"does not report entrpy\. Did you mean 'eval_entropy'\?"):
        short.train(
            "sft",
            inputs={"eval_dataset": short.rows["sft"]},
            evaluation_steps=2,
            metric_for_best_model="entrpy",
            listeners=(Interrupt(1),),
        )


def test_what_is_compared_needs_held_out_data(short: Any) -> None:
    with pytest.raises(InputError, match=r"'reward'\.eval_data: missing; load_best_model_at_end compares"):
        short.train("reward", evaluation_steps=2, load_best_model_at_end=True)


# Values that are taken and said to do nothing


def test_a_stage_that_needs_other_devices_is_refused(short: Any) -> None:
    with pytest.raises(InputError, match=r"'sft'\.platform: the stage needs tpu, and jax runs on cpu here"):
        short.train("sft", max_training_steps=1, backend="tpu")
    assert short.train("sft", max_training_steps=1, backend="cpu")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"evaluation_steps": 2}, r"'sft'\.evaluation_steps: nothing is evaluated without eval_data"),
        (
            {"disable_dropout": False},
            r"disable_dropout: has no effect here: models are trained without dropout",
        ),
    ],
)
def test_what_has_no_effect_is_said(short: Any, given: dict[str, Any], told: str) -> None:
    with pytest.warns(UserWarning, match=told):
        short.train("sft", max_training_steps=1, **given)
