"""Reward functions: their arguments, valid return values, and errors about all others."""

import asyncio
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_core import REWARD, Registry, RewardInputs
from rlhf_core.contracts import total_reward
from rlhf_core.environments import EnvironmentOptions
from rlhf_core.errors import InputError, RunError
from rlhf_core.rollouts import Reward, WeightedReward, open_rewards, score, set_up

INPUTS = RewardInputs(
    prompts=["a", "a", "b"],
    completions=["x y", "x", ""],
    completion_ids=[[5, 6, 1], [5, 1], [1]],
    columns={"answer": ["x", "y", None], "number": [1, 1, 2]},
)


def reward(function, label="r", weight=1.0):
    return Reward(label, weight, function)


def values(function):
    return score([reward(function)], INPUTS)[:, 0].tolist()


def test_columns_arrive_by_name_and_all_of_them_where_asked_for():
    assert values(lambda completions: [len(c) for c in completions]) == [3, 1, 0]
    assert values(lambda completion_ids: [len(ids) for ids in completion_ids]) == [3, 2, 1]
    assert values(lambda number, prompts: [n + ord(p) for n, p in zip(number, prompts, strict=True)]) == [
        98,
        98,
        100,
    ]
    assert values(lambda number, scale=10: [n * scale for n in number]) == [10, 10, 20]

    seen = {}

    def every(prompts, completions, completion_ids, **columns):
        seen.update(columns, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return np.zeros(3)

    values(every)
    assert seen == {
        **INPUTS.columns,
        **{k: getattr(INPUTS, k) for k in ("prompts", "completions", "completion_ids")},
    }

    async def notebook():
        return values(lambda completions: [0.5] * 3)

    assert asyncio.run(notebook()) == [0.5] * 3


def test_asynchronous_functions_run_together():
    met = []

    async def first(completions):
        met.append("first begins")
        await asyncio.sleep(0.01)
        met.append("first ends")
        return [1.0, 2.0, 3.0]

    async def second(completions):
        met.append("second begins")
        return [4.0, 5.0, 6.0]

    table = score([reward(first, "a"), reward(second, "b")], INPUTS)
    assert table.tolist() == [[1, 4], [2, 5], [3, 6]]
    assert met == ["first begins", "second begins", "first ends"]


class Judge:
    """A callable object with `setup`, like reward models."""

    def __init__(self):
        self.stages = []

    def setup(self, stage):
        self.stages.append(stage)

    async def __call__(self, completions, answer):
        return [float(len(self.stages))] * len(completions)


STAGE = SimpleNamespace(name="policy", mesh=None, is_main=True)
PROMPTS = SimpleNamespace(columns={"answer": ["x"], "number": [1]}, where=str)


def test_objects_are_set_up_once_unless_a_column_is_missing():
    judge = Judge()
    set_up([reward(judge)], PROMPTS, STAGE)
    assert judge.stages[0].name == "policy"
    assert values(judge) == [1.0, 1.0, 1.0]

    judge = Judge()
    rewards = [reward(judge), reward(lambda completions, gold, key: None, "exact")]
    with pytest.raises(InputError, match=r"needs the column 'gold'[\s\S]*needs the column 'key'"):
        set_up(rewards, PROMPTS, STAGE)
    assert judge.stages == []


def test_none_and_nan_mean_not_scored_and_nan_is_warned_of_once():
    assert values(lambda completions: [1, None, 0])[0] == 1
    function = reward(lambda completions: [1.0, None, float("nan")])
    with pytest.warns(UserWarning, match="reward 'r' returned NaN for 1 of 3 completions") as caught:
        table = score([function], INPUTS)
    assert np.isnan(table[1:, 0]).all()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score([function], INPUTS)
        score([reward(lambda completions: [1, None, 0])], INPUTS)

    rewards = [
        reward(lambda completions: [1.0, None, 1.0], "f1", 0.7),
        reward(lambda completions: [0.0, 0.0, None], "f2", 0.3),
    ]
    each = score(rewards, INPUTS)
    total = total_reward(each, np.array([0.7, 0.3]))
    assert total.tolist() == pytest.approx([0.7, 0.0, 0.7])
    assert np.isnan(each).tolist() == [[False, False], [True, False], [False, True]]
    assert np.isnan(total_reward(np.array([[np.nan, np.nan]]), np.ones(2)))


def fail(completions):
    raise KeyError("gold")


def test_what_a_function_does_to_its_arguments_no_other_sees():
    said = [[{"role": "assistant", "content": "x"}], [{"role": "assistant", "content": "y"}]]
    inputs = RewardInputs([["a"], ["b"]], said, [[5, 1], [6, 1]], {"words": [["x"], ["y"]]})

    def changes(prompts, completions, completion_ids, words):
        for text, ids, own in zip(completions, completion_ids, words, strict=True):
            text[0]["content"] = "gone"
            ids.clear()
            own.append("more")
        completions.pop()
        return [0.0, 0.0]

    def sees(completions, completion_ids, words):
        return [
            float(len(ids) + len(own) + len(text[0]["content"]))
            for text, ids, own in zip(completions, completion_ids, words, strict=True)
        ]

    assert score([reward(changes, "a"), reward(sees, "b")], inputs)[:, 1].tolist() == [4.0, 4.0]
    assert inputs.completions == [[{"role": "assistant", "content": text}] for text in "xy"]


def test_an_exception_keeps_its_cause():
    with pytest.raises(RunError) as caught:
        values(fail)
    assert isinstance(caught.value.__cause__, KeyError)


def brevity(completions):
    return [0.0] * len(completions)


@pytest.fixture
def registry():
    registry = Registry()
    with registry.transaction("test"):
        registry.add(REWARD, "brevity", brevity)
        registry.add(REWARD, "scaled", lambda completions, *, by=1.0: [by] * len(completions))
    return registry


def build(components=(), given=None, weights=None, *, registry, environment=None):
    named = [WeightedReward(**c) for c in components]
    stage = SimpleNamespace(name="policy", registry=registry, inputs={"rewards": given})
    return open_rewards(named, stage, weights=weights, environment=environment)


def test_rewards_by_name_or_as_functions_with_their_labels_and_weights(registry):
    one, two = build(
        [{"name": "scaled", "by": 3.0, "weight": 0.5}, {"name": "scaled", "label": "other"}],
        registry=registry,
    )
    assert (one.label, one.weight) == ("scaled", 0.5)
    assert (two.label, two.weight) == ("other", 1.0)
    assert score([one, two], INPUTS)[0].tolist() == [3.0, 1.0]

    made = build(given=[brevity, "scaled", Judge()], registry=registry)
    assert [each.label for each in made] == ["brevity", "scaled", "Judge"]

    made = build(
        [{"name": "brevity", "weight": 9.0}, {"name": "scaled"}], weights=[0.7, 0.3], registry=registry
    )
    assert [each.weight for each in made] == [0.7, 0.3]

    environment = EnvironmentOptions(weight=3.0)
    made = build([{"name": "scaled"}], [values], [0.7, 0.3], registry=registry, environment=environment)
    assert [each.weight for each in made] == [3.0, 0.7, 0.3]
    with pytest.raises(
        InputError, match=r"3 weights for 1 reward; the environment has its own, environment\.weight"
    ):
        build([{"name": "scaled"}], weights=[1.0, 2.0, 3.0], registry=registry, environment=environment)
