"""Fields that all trainers share, in real runs: optimizers, saving by time, comparing evaluations, the console."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core import fit
from rlhf_core.errors import InputError
from rlhf_core.mesh import make_mesh
from tests.shared.interrupts import interrupt


def checkpoints(directory: Path) -> list[int]:
    return sorted(int(each.name) for each in (directory / "checkpoints").iterdir() if each.name.isdecimal())


# The formulas: tests/packages/core; how states are sharded: tests/packages/training/test_memory_devices.py.
@pytest.mark.long
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_every_optimizer_learns_sharded_and_resumes_from_its_checkpoint(short: Any, name: str) -> None:
    given: dict[str, Any] = {"optimizer": name, "learning_rate": 3e-2, "save_steps": 3}
    given["inputs"] = {"mesh": make_mesh(data=2, fsdp=2, devices=jax.devices()[:4])}
    whole, watch = short.train("sft", at="whole", **given)
    losses = [row["loss"] for row in watch.rows]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    with pytest.raises(KeyboardInterrupt):
        short.train("sft", at="again", listeners=(interrupt(4),), **given)
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


def test_unknown_metrics_and_other_devices_are_refused_before_the_first_update(short: Any) -> None:
    with pytest.raises(InputError, match=r"does not report entrpy\. Did you mean 'eval_entropy'\?"):
        short.train(
            "sft",
            inputs={"eval_dataset": short.rows["sft"]},
            evaluation_steps=2,
            metric_for_best_model="entrpy",
            listeners=(interrupt(1),),
        )

    with pytest.raises(InputError, match=r"'sft'\.platform: the stage needs tpu, and jax runs on cpu here"):
        short.train("sft", max_training_steps=1, backend="tpu")
    assert short.train("sft", max_training_steps=1, backend="cpu")


def swapped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]


def one_lesson(short: Any) -> list[dict[str, Any]]:
    """Pairs of which all say the same; on the swapped ones every update is one for the worse."""
    return [{**row, "chosen": " a", "rejected": " b"} for row in short.rows["reward"]]


@pytest.mark.long  # as the next one; which is the best: tests/packages/fit/test_best.py
def test_the_model_of_the_best_evaluation(short: Any, tmp_path: Path) -> None:
    rows = one_lesson(short)
    inputs = {"train_dataset": rows, "eval_dataset": swapped(rows)}
    given = {
        "inputs": inputs,
        "evaluation_steps": 2,
        "metric_for_best_model": "loss",
        "max_training_steps": 12,
    }
    before = short.tiny.leaves(short.models["reward"].params)
    found, watch = short.train(
        "reward", at="best", load_best_model_at_end=True, early_stopping_patience=2, **given
    )
    assert watch.steps("eval_loss") == [0, 2, 4]  # at 0 the metric's name is looked up, in vain it may be
    assert watch.steps() == [1, 2, 3, 4]
    for path, leaf in before.items():
        np.testing.assert_array_equal(leaf, found[path], err_msg=path)
    record = json.loads((tmp_path / "best" / "reward" / "best.json").read_text())
    assert (record["step"], record["model"], record["updates"]) == (0, 0, 4)
    last, _ = short.train("reward", at="last", early_stopping_patience=2, **given)
    assert any(not np.array_equal(leaf, found[path]) for path, leaf in last.items())


@pytest.mark.long
def test_stopped_after_the_last_evaluation_it_goes_on_to_the_same_model(short: Any, tmp_path: Path) -> None:
    rows = one_lesson(short)
    given: dict[str, Any] = {
        "inputs": {"train_dataset": rows, "eval_dataset": swapped(rows)},
        "evaluation_steps": 2,
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
        "early_stopping_patience": 2,
        "save_total_limit": 1,
    }
    whole, _ = short.train("reward", at="whole", **given)
    with pytest.raises(KeyboardInterrupt):
        short.train("reward", at="again", listeners=(interrupt(4),), save_steps=1, **given)
    assert checkpoints(tmp_path / "again" / "reward") == [0, 3]
    again, later = short.train("reward", at="again", save_steps=1, **given)
    assert later.steps("eval_loss") == [4]
    for path, leaf in whole.items():
        np.testing.assert_array_equal(leaf, again[path], err_msg=path)
