"""What an Update reports and what the step computes are told side by side, and never one for the other."""

import pytest

from rlhf_core.errors import InputError
from rlhf_core.fit import MetricWindow, Update
from rlhf_core.metrics import Mean


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
