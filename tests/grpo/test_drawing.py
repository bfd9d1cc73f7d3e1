"""Dynamic sampling: which groups a rollout keeps, what it reports, and where the prompts go on."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from rlhf_grpo.rollout import draw, merging

from rlhf_core import data
from rlhf_core.fit.batches import Update
from rlhf_core.fit.logged import MetricWindow
from rlhf_core.rollouts import Reward
from rlhf_core.sampling import Rollouts

G = 3
DIFFER = {1, 4, 5, 6}  # prompts whose completions get different rewards


@pytest.fixture
def prompts(tiny):
    return data.encode_prompts(data.load(tiny.prompts(8)), tiny.make_tokenizer(), max_prompt_length=16)


@pytest.fixture
def roll_out(tiny, prompts):
    rounds = []

    def sample(ids, number):
        rounds.append(number)
        n = len(ids) * G
        tokens = np.arange(n, dtype=np.int32)[:, None] % 20 + 3 + number
        return Rollouts(tokens, np.ones(n, np.int32), np.zeros((n, 1), np.float32), np.ones(n, bool))

    def reward(completion_ids, number):
        return [
            float(i % G) if n in DIFFER else 0.25
            for i, (n, _) in enumerate(zip(number, completion_ids, strict=True))
        ]

    def roll_out(order, max_rounds, size=2):
        batches = np.array(order).reshape(-1, size)
        rounds.clear()
        drawn, metrics, count = draw(
            sample,
            prompts,
            tiny.make_tokenizer(),
            [Reward("r", 2.0, reward)],
            lambda number: batches[number],
            max_rounds=max_rounds,
        )
        assert rounds == list(range(count))
        return SimpleNamespace(drawn=drawn, metrics=metrics, rounds=count)

    return roll_out


def test_one_round_keeps_everything(roll_out):
    found = roll_out([0, 1], 1)
    assert found.drawn.prompts.tolist() == [0, 1]
    assert (found.rounds, found.metrics["frac_reward_zero_std"]) == (1, 0.5)
    assert not any(name.startswith("dynamic_sampling") for name in found.metrics)


def test_groups_without_a_difference_are_replaced(roll_out, prompts):
    found = roll_out([0, 1, 2, 3, 4, 5], 5)
    assert found.drawn.prompts.tolist() == [1, 4]
    assert found.rounds == 3
    assert found.drawn.total.tolist() == [0.0, 2.0, 4.0] * 2
    assert found.drawn.inputs.columns["number"] == [1] * G + [4] * G
    assert found.drawn.inputs.prompts == [prompts.raw[1]] * G + [prompts.raw[4]] * G
    # The tokens are those of the round and place at which the group was drawn.
    assert found.drawn.samples.tokens[:, 0].tolist() == [6, 7, 8, 5, 6, 7]
    assert [list(ids) for ids in found.drawn.inputs.completion_ids] == found.drawn.samples.tokens.tolist()
    expected = {"rounds": 3, "dropped": 3, "surplus": 1, "filled_up": 0}
    assert {n: found.metrics[f"dynamic_sampling/{n}"] for n in expected} == expected
    # Of all six groups, not of the two that are left.
    assert found.metrics["frac_reward_zero_std"] == 0.5
    assert found.metrics["reward"] == pytest.approx((3 * 0.5 + 3 * 2.0) / 6)


def test_no_further_round_where_the_first_is_enough(roll_out):
    found = roll_out([4, 5, 0, 0], 2)
    assert (found.drawn.prompts.tolist(), found.rounds) == ([4, 5], 1)
    assert found.metrics["dynamic_sampling/dropped"] == 0


def test_the_bound_is_kept_and_told(roll_out):
    with pytest.warns(UserWarning, match="2 rounds of 2 prompts gave 1 groups whose rewards differ"):
        found = roll_out([0, 2, 3, 6], 2)
    assert found.drawn.prompts.tolist() == [0, 6]  # the first that was drawn fills the gap
    assert found.metrics["dynamic_sampling/filled_up"] == 1
    assert found.metrics["dynamic_sampling/dropped"] == 2


def test_what_drawing_took_is_of_all_rounds(roll_out):
    found = roll_out([0, 1, 2, 3, 4, 5], 5)
    clock = found.drawn.clock
    assert clock.tokens == 3 * 2 * G  # one token each, of the groups that were left out too
    assert clock.sampling > 0
    assert clock.rewards > 0
    told = clock.metrics()
    assert (told["time/rollout"], told["time/reward"]) == (clock.sampling, clock.rewards)
    assert float(told["rollout/tokens_per_second"].result()) == pytest.approx(clock.tokens / clock.sampling)


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
        window.add(Update([], 1, str, merging(metrics, once=once)), {})
    for row in (window.read(4), MetricWindow.from_json(json.loads(json.dumps(window.to_json()))).read(4)):
        assert (row["reward"], row["rewards/judge/failed"]) == (1.5, 3.0)
        assert (row["completions/min_length"], row["completions/max_length"]) == (2.0, 8.0)
