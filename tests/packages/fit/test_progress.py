"""What belongs to a run: its checkpoints, of the same record, rows and length; and the metrics that it reports."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core import TrainerConfig
from rlhf_core.checkpoint import Restored
from rlhf_core.errors import InputError
from rlhf_core.fit import MetricWindow, Progress, Update
from rlhf_core.metrics import Mean
from tests.shared.specs import recorded_as

CONFIG: dict[str, Any] = {"scheduler": "linear", "num_train_epochs": 2}


def progress(directory: Path, *, total: int = 8, rows: int = 5, **changes: Any) -> Progress:
    config = {**CONFIG, **changes}
    record = {"trainer": "sft", "seed": 0, "config": config, "inputs": {}, "code": {}, "versions": {}}
    spec = recorded_as(record, run=directory.parent)
    stage: Any = SimpleNamespace(name="policy", dir=directory, specification=lambda: spec)
    updates: Any = SimpleNamespace(total=total, data=range(rows))
    return Progress(stage, TrainerConfig(), updates)


def checkpoint(of: Progress, step: int = 6) -> Restored:
    """What `Progress.save` writes, as far as it is compared."""
    host = {"record": dict(of.stage.specification().record), "rows": len(of.updates.data), "total": of.total}
    return Restored(step, None, host, {})


def test_a_run_whose_epochs_ended_early_continues(tmp_path: Path) -> None:
    """Rollouts of several rounds take the prompts of the epochs in fewer updates than were planned."""
    first = progress(tmp_path)
    first.updates.total = 6
    progress(tmp_path).require_same(checkpoint(first))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 4}, r"stage 'policy'\.train_data: it had 5 rows for training and has 4 now"),
        ({"rows": 6}, r"it had 5 rows for training and has 6 now"),
        (
            {"total": 9, "num_train_epochs": 3},
            r'num_train_epochs: then 2, now 3: scheduler = "linear" spreads',
        ),
        (
            {"learning_rate": 1.0},
            r"learning_rate: then not given, now 1\.0\n.*use another --dir, or delete",
        ),
        ({"total": 5}, "it has made 6 updates, more than the requested 5"),
    ],
)
def test_another_run_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        progress(tmp_path, **changes).require_same(checkpoint(progress(tmp_path)))


def test_the_feeds_metrics_are_averaged_over_updates():
    window = MetricWindow()
    for value in (1.0, 4.0):
        window.add(Update([], 3, str, {"reward": value}), {"loss": Mean(value, 1.0)})
    row = window.read(total_tokens=6)
    assert (row["reward"], row["loss"], row["num_tokens"]) == (2.5, 2.5, 6)


def test_a_name_that_both_use_is_reported():
    with pytest.raises(InputError, match=r"^metrics: loss reported both by the Update and by the objective"):
        MetricWindow().add(Update([], 3, str, {"loss": 7.0, "reward": 1.0}), {"loss": Mean(1.0, 1.0)})


def test_seconds_are_those_of_an_update_and_the_rest_is_the_update_itself(monkeypatch):
    window = MetricWindow()
    monkeypatch.setattr(MetricWindow, "elapsed", lambda self: 10.0)
    for seconds in (3.0, 0.0):
        window.add(Update([], 3, str, {}, {"time/rollout": seconds, "time/reward": seconds / 3}), {})
    row = window.read(total_tokens=6)
    assert (row["time/rollout"], row["time/reward"], row["time/update"]) == (1.5, 0.5, 3.0)
    assert row["step_time"] == 5.0


def test_without_rollouts_there_is_no_time_but_the_steps():
    window = MetricWindow()
    window.add(Update([], 3, str), {})
    assert not [name for name in window.read(3) if name.startswith("time/")]
