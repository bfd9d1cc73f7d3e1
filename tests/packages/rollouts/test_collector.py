"""Dynamic sampling: which groups a rollout keeps, what it reports, and where the prompts go on."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rlhf_core import data
from rlhf_core.fit import MetricWindow, Update
from rlhf_core.rollouts import Reward, Rollout
from rlhf_core.rollouts.updates import _update_metrics
from rlhf_core.sampling import Rollouts
from tests.shared import collectors

G = 3
DIFFER = {1, 4, 5, 6}  # prompts whose completions get different rewards


@pytest.fixture
def prompts(tiny):
    return data.encode_prompts(data.load(tiny.prompts(8)), tiny.make_tokenizer(), max_prompt_length=16)


@pytest.fixture
def collect(tiny, prompts):
    """Collect rollout 4 of a state after 7 updates from prompts in this order; (rollout, prompts that were taken)."""

    def sampler(params, ids, key, numbers):
        n = len(ids) * G
        number = int(numbers[0]) // n
        tokens = np.arange(n, dtype=np.int32)[:, None] % 20 + 3 + number
        return Rollouts(tokens, np.ones(n, np.int32), np.zeros((n, 1), np.float32), np.ones(n, bool))

    def reward(completion_ids, number):
        return [
            float(i % G) if n in DIFFER else 0.25
            for i, (n, _) in enumerate(zip(number, completion_ids, strict=True))
        ]

    def collect(order, max_rounds, size=2):
        batches = iter(np.array(order).reshape(-1, size))
        rewards = [Reward("r", 2.0, reward)]
        sizes = {"size": size, "max_rounds": max_rounds}
        collector = collectors.collector(prompts, tiny.make_tokenizer(), rewards, sampler=sampler, **sizes)
        state = SimpleNamespace(params=None, key=jax.random.key(0), step=np.int32(7))
        rollout = collector.collect(
            state.params, jax.random.fold_in(state.key, 4), 4, lambda: next(batches), version=int(state.step)
        )
        assert rollout.number == 4
        assert len(list(batches)) == len(order) // size - rollout.rounds
        assert rollout.samples.version.tolist() == [7] * len(rollout.total)
        return rollout

    return collect


def test_rounds_end_where_one_is_enough_or_with_the_bound(collect):
    rollout = collect([0, 1], 1)
    assert rollout.prompts.tolist() == [0, 1]
    assert (rollout.rounds, rollout.metrics["frac_reward_zero_std"]) == (1, 0.5)
    assert not any(name.startswith("dynamic_sampling") for name in rollout.metrics)

    rollout = collect([4, 5, 0, 0], 2)
    assert (rollout.prompts.tolist(), rollout.rounds) == ([4, 5], 1)
    assert rollout.metrics["dynamic_sampling/dropped"] == 0

    with pytest.warns(UserWarning, match="2 rounds of 2 prompts gave 1 groups whose rewards differ"):
        rollout = collect([0, 2, 3, 6], 2)
    assert rollout.prompts.tolist() == [0, 6]  # the first that was drawn fills the gap
    assert rollout.metrics["dynamic_sampling/filled_up"] == 1
    assert rollout.metrics["dynamic_sampling/dropped"] == 2


def test_groups_without_a_difference_are_replaced(collect, prompts):
    rollout = collect([0, 1, 2, 3, 4, 5], 5)
    assert rollout.prompts.tolist() == [1, 4]
    assert rollout.rounds == 3
    assert rollout.total.tolist() == [0.0, 2.0, 4.0] * 2
    assert rollout.inputs.columns["number"] == [1] * G + [4] * G
    assert rollout.inputs.prompts == [prompts.raw[1]] * G + [prompts.raw[4]] * G
    # The tokens are those of the round and place at which the group was drawn.
    assert rollout.samples.tokens[:, 0].tolist() == [6, 7, 8, 5, 6, 7]
    assert [list(ids) for ids in rollout.inputs.completion_ids] == rollout.samples.tokens.tolist()
    expected = {"rounds": 3, "dropped": 3, "surplus": 1, "filled_up": 0}
    assert {n: rollout.metrics[f"dynamic_sampling/{n}"] for n in expected} == expected
    # Of all six groups, not of the two that are left.
    assert rollout.metrics["frac_reward_zero_std"] == 0.5
    assert rollout.metrics["reward"] == pytest.approx((3 * 0.5 + 3 * 2.0) / 6)

    rollout = collect([0, 1, 2, 3, 4, 5], 5)
    timing = rollout.timing
    assert timing.tokens == 3 * 2 * G  # one token each, of the groups that were left out too
    assert timing.sampling > 0
    assert timing.rewards > 0
    told = timing.metrics()
    assert (told["time/rollout"], told["time/reward"]) == (timing.sampling, timing.rewards)
    assert float(told["rollout/tokens_per_second"].result()) == pytest.approx(timing.tokens / timing.sampling)


def test_counts_add_up_and_extremes_stay_extremes_over_updates():
    rollout = {
        "reward": 1.0,
        "rewards/judge/failed": 2.0,
        "completions/min_length": 3.0,
        "completions/max_length": 8.0,
    }
    other = {
        "reward": 2.0,
        "rewards/judge/failed": 1.0,
        "completions/min_length": 2.0,
        "completions/max_length": 5.0,
    }
    window = MetricWindow()
    for metrics, once in ((rollout, True), (rollout, False), (other, True), (other, False)):
        window.add(Update([], 1, str, _update_metrics(metrics, first=once)), {})
    for row in (window.read(4), MetricWindow.from_json(json.loads(json.dumps(window.to_json()))).read(4)):
        assert (row["reward"], row["rewards/judge/failed"]) == (1.5, 3.0)
        assert (row["completions/min_length"], row["completions/max_length"]) == (2.0, 8.0)


def test_without_rewards_it_only_samples(tiny, prompts, tmp_path):
    def sampler(params, ids, key, numbers):
        n = len(ids) * G
        return Rollouts(
            np.full((n, 1), 5), np.ones(n, np.int32), np.zeros((n, 1), np.float32), np.ones(n, bool)
        )

    collector = collectors.collector(prompts, tiny.make_tokenizer(), sampler=sampler)
    state = SimpleNamespace(params=None, key=jax.random.key(0), step=np.int32(0))
    rollout = collector.collect(state.params, state.key, 0, lambda: np.arange(2))
    assert rollout.rewards.shape == (2 * G, 0)
    assert np.isnan(rollout.total).all()
    assert rollout.metrics["completions/mean_length"] == 1
    assert all(name.startswith("completions/") for name in rollout.metrics)
    rollout.write(tmp_path / "samples.jsonl", [])
    assert {*json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])} == {
        "prompt",
        "columns",
        "completion",
        "length",
        "finished",
    }


@pytest.mark.parametrize("own", [np.nan, 0.5])
def test_an_environment_without_rewards_has_no_metrics_of_them(prompts, own):
    samples = Rollouts(
        np.full((G, 1), 5), np.ones(G, np.int32), np.zeros((G, 1), np.float32), np.ones(G, bool)
    )
    rewards = [Reward("environment", 1.0, lambda completions: []), Reward("r", 1.0, lambda completions: [])]
    collector = collectors.collector(prompts, rewards=rewards, episodes=SimpleNamespace())
    each = np.array([[own, float(i)] for i in range(G)])
    metrics = collector.metrics(Rollout(np.array([0]), samples, each, np.nansum(each, 1)))
    assert metrics["rewards/r/mean"] == 1.0
    told = {name: x for name, x in metrics.items() if name.startswith("rewards/environment/")}
    assert told == (
        {}
        if np.isnan(own)
        else {f"rewards/environment/{x}": value for x, value in (("mean", 0.5), ("std", 0), ("unscored", 0))}
    )
