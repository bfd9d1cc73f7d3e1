"""What an advantage is given, and what it returns: per completion or per token."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_core import ADVANTAGE, plugins
from rlhf_core.contracts import RewardInputs
from rlhf_core.errors import InputError, RunError
from rlhf_core.rollouts import Reward, Rollout
from rlhf_core.rollouts.rollout_warnings import RolloutWarnings
from rlhf_core.sampling import Rollouts
from tests.shared import collectors

G, C = 3, 4


@pytest.fixture
def rollout(samples):
    inputs = RewardInputs([""] * 6, ["a"] * 6, [[]] * 6, {"number": [4, 4, 4, 2, 2, 2]})
    each = np.stack([np.arange(6.0), np.ones(6)], axis=1)
    total = 0.7 * each[:, 0] + 0.3 * each[:, 1]
    return Rollout(np.array([4, 2]), samples, each, total, inputs)


def given_to_an_advantage(rollout):
    given = []
    rollout.with_advantages(lambda inputs: given.append(inputs) or inputs.rewards, REWARDS, name="mine")
    return given[0]


REWARDS = [Reward("f1", 0.7, None), Reward("f2", 0.3, None)]


def test_inputs_are_grouped_by_prompt_and_advantages_are_of_completions(rollout):
    inputs = given_to_an_advantage(rollout)
    np.testing.assert_array_equal(inputs.rewards, rollout.total.reshape(2, G).astype(np.float32))
    np.testing.assert_array_equal(inputs.rewards_by_function[..., 0], [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(inputs.weights, np.float32([0.7, 0.3]))
    assert {x.dtype for x in (inputs.rewards, inputs.rewards_by_function, inputs.weights)} == {
        np.dtype("float32")
    }
    assert inputs.lengths.tolist() == [[2, 4, 1], [3, 2, 4]]
    assert inputs.labels == ("f1", "f2")
    assert inputs.columns == {"number": [4, 4, 4, 2, 2, 2]}

    advantages = rollout.with_advantages(lambda inputs: inputs.rewards - 1, REWARDS, name="mine").advantages
    np.testing.assert_allclose(advantages, rollout.total - 1, rtol=1e-6, atol=1e-6)
    assert advantages.dtype == np.float32

    rollout = replace(rollout, inputs=None)
    assert given_to_an_advantage(rollout).columns == {}


def test_differences_that_float32_loses_are_kept_and_told_once(rollout, tmp_path, recwarn):
    large = 1e8 + np.array([0.0, 1, 0, 0, 0, 0])
    rollout = replace(rollout, rewards=np.stack([large, large], 1), total=large)
    inputs = given_to_an_advantage(rollout)
    assert inputs.rewards.dtype == np.float32
    assert not np.ptp(inputs.rewards)
    np.testing.assert_array_equal(inputs.rewards64, large.reshape(2, G))
    np.testing.assert_array_equal(inputs.rewards_by_function64[..., 1], large.reshape(2, G))
    group = plugins.load().registry.get(ADVANTAGE, "group", scale="none")
    got = rollout.with_advantages(group, REWARDS, name="group").advantages
    np.testing.assert_allclose(got, [-1 / 3, 2 / 3, -1 / 3, 0, 0, 0], rtol=1e-6)
    warnings = RolloutWarnings(SimpleNamespace(name="policy", dir=tmp_path, is_main=True))
    warnings.check(0, replace(rollout, total=large - 1e8))
    assert not recwarn
    for number in range(2):
        warnings.check(number, rollout)
    (told,) = recwarn
    assert "100000000.0 and 100000001.0, differ by less than float32 holds" in str(told.message)


def test_sums_that_are_equal_on_paper_are_no_difference(rollout):
    total = np.array([0.1 + 0.2, 0.3, 0.3, 1, 0, 0])
    metrics = collectors.collector(rewards=REWARDS).metrics(replace(rollout, total=total))
    assert metrics["frac_reward_zero_std"] == 0.5


def misspelt(inputs):
    return inputs.reward


@pytest.mark.parametrize(
    ("advantage", "message"),
    [
        (lambda inputs: inputs.rewards.T, r"shape \[3, 2\]; expected one number per completion, \[2, 3\]"),
        (lambda inputs: inputs.rewards.reshape(-1), r"shape \[6\]; expected"),
        (
            lambda inputs: inputs.rewards[..., None] * np.ones(3),
            r"shape \[2, 3, 3\]; expected .* \[2, 3, 4\]",
        ),
        (lambda inputs: np.ones((3, 2, 9)), r"shape \[3, 2, 9\]; expected"),
        (lambda inputs: np.ones((2, 3, 9, 1)), r"shape \[2, 3, 9, 1\]; expected"),
        (lambda inputs: None, r"shape \[\]; expected"),
        (
            lambda inputs: inputs.rewards / 0,
            r"returned nan for sample 0 of prompt 0, whose rewards are \[0.0, 1.0, ",
        ),
        (
            lambda inputs: np.where(inputs.rewards == 4, np.inf, 0)[..., None] * np.ones(9),
            r"returned .* for sample 1 of prompt 1",
        ),
        (lambda inputs: "high", r"raised ValueError: could not convert string to float"),
        (
            misspelt,
            r"raised AttributeError: 'AdvantageInputs' object has no attribute 'reward'.* \(.*test_advantages",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_what_is_no_advantage(rollout, advantage, message):
    rollout = replace(rollout, total=np.arange(6.0))
    with pytest.raises(RunError, match=f"^advantage 'mine' .*{message}"):
        rollout.with_advantages(advantage, REWARDS, name="mine")


def test_an_error_of_the_advantage_itself_is_passed_on(rollout):
    def picky(inputs):
        raise InputError("advantage.pass_at: 9 of 3 completions")

    with pytest.raises(InputError, match=r"^advantage\.pass_at: 9 of 3 completions$"):
        rollout.with_advantages(picky, REWARDS, name="mine")


@pytest.mark.parametrize(("width", "returned"), [(4, 6), (5, 6), (8, 6), (5, C)])
def test_an_advantage_per_token(rollout, width, returned):
    """As wide as the samples' arrays, however far the component's array reaches past the longest completion."""
    samples = rollout.samples
    samples = Rollouts(
        np.zeros((6, width), np.int32), samples.lengths, np.zeros((6, width)), samples.finished
    )
    out = np.arange(2 * G * returned, dtype=np.float64).reshape(2, G, returned)
    advantages = (
        replace(rollout, samples=samples).with_advantages(lambda _: out, REWARDS, name="mine").advantages
    )
    expected = np.pad(out.reshape(6, returned), ((0, 0), (0, 4)))[:, :width]
    np.testing.assert_array_equal(advantages, expected)
