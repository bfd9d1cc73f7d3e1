"""Advantages against published numbers and float64 NumPy, where rewards are equal, missing or far from zero."""

import numpy as np
import pytest
from rlhf_grpo import group_advantages

from rlhf_core import ADVANTAGE, AdvantageInputs, installed_registry

GROUPS = np.array([[1, 0, 0, 1], [0.35] * 4, [1, 2, 3, 4]], np.float32)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("group", [[0.86587543] * 2, [0], [-1.16180501, -0.38726834, 0.38726834, 1.16180501]]),
        ("batch", [[0.39607942] * 2, [0], [-1.18823826, -0.39607942, 0.39607942, 1.18823826]]),
        ("none", [[0.5] * 2, [0], [-1.5, -0.5, 0.5, 1.5]]),
    ],
)
def test_published_values(scale, expected):
    got = np.asarray(group_advantages(GROUPS.reshape(-1), num_generations=4, scale=scale)).reshape(3, 4)
    a = expected[0][0]
    np.testing.assert_allclose(got[0], [a, -a, -a, a], atol=1e-6)
    np.testing.assert_array_equal(got[1], 0)
    np.testing.assert_allclose(got[2], expected[2], atol=1e-6)
    assert got.dtype == np.float32


def advantage(name, **options):
    return installed_registry().get(ADVANTAGE, name, **options)


def inputs(rewards, weights=None):
    each = rewards[..., None] if rewards.ndim == 2 else rewards
    weights = np.ones(each.shape[-1]) if weights is None else weights
    return AdvantageInputs.of(each, weights, np.zeros(each.shape[:2], np.int32))


def test_weights_and_functions_that_do_not_apply():
    rewards = np.array([[1.0, 10.0], [2.0, np.nan], [np.nan, np.nan], [0.0, 0.0]], np.float32)
    total = np.array([0.7 + 3.0, 1.4, np.nan, 0.0])
    got = np.asarray(group_advantages(rewards, num_generations=4, weights=[0.7, 0.3], scale="none"))
    np.testing.assert_allclose(got, np.nan_to_num(total - np.nanmean(total)), rtol=1e-6)


def normalized(x):
    """Less the mean, by the deviation of what there is; 0 where one number is alone."""
    if np.count_nonzero(~np.isnan(x)) < 2:
        return 0 * x
    return (x - np.nanmean(x)) / (np.nanstd(x, ddof=1) + 1e-4)


NAN = np.nan


@pytest.mark.parametrize(
    ("rewards", "weights"),
    [
        (np.random.default_rng(0).normal(size=(12, 2)) * [1.0, 100.0], [2.0, 1.0]),
        (np.array([[1.0], [2.0], [NAN], [1.0], [5.0], [3.0]]), None),
        (np.array([[1.0, NAN], [2.0, 3.0], [4.0, 7.0], [NAN, NAN], [5.0, 1.0], [NAN, 2.0]]), None),
    ],
)
def test_normalize_then_sum(rewards, weights):
    """Of every function in its group, then of the sums in the batch; rows that none scored are left out of both."""
    grouped = rewards.reshape(-1, 3, rewards.shape[1])
    each = np.stack([[normalized(column) for column in group.T] for group in grouped]).swapaxes(1, 2)
    total = np.nansum(each * (1.0 if weights is None else np.array(weights)), axis=-1)
    total[np.isnan(grouped).all(-1)] = np.nan
    expected = np.nan_to_num(normalized(total.reshape(-1)))
    got = group_advantages(rewards, num_generations=3, weights=weights, aggregation="normalize_then_sum")
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rewards", "group", "expected"),
    [
        ([1, 0, 0, 0], 4, [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]),
        ([1, 2, 3, NAN], 4, [-1 / 1.0001, 0, 1 / 1.0001, 0]),
        ([1, NAN, 3, 5], 2, [0, 0, -1 / 1.4143135, 1 / 1.4143135]),
        ([NAN, NAN, NAN, NAN], 2, [0, 0, 0, 0]),
    ],
)
def test_standard_deviations_leave_out_what_was_not_scored(rewards, group, expected):
    """0.5 of four, 1.0 of three, none of one, 1.4142135 of two, none of none; 1e-4 is added."""
    got = group_advantages(np.array(rewards, np.float32), num_generations=group)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("last", [0.1 + 0.2, np.nan])
def test_sums_that_are_equal_on_paper_have_no_advantage(sign, last):
    rewards = sign * np.array([0.1 + 0.2, 0.3, 0.3, last])
    assert len(set(rewards[:3])) == 2
    for scale in ("group", "batch", "none"):
        assert not np.asarray(group_advantages(rewards, num_generations=4, scale=scale)).any()


@pytest.mark.parametrize("sign", [1, -1])
def test_four_units_in_the_last_place_are_rounding_and_five_a_difference(sign):
    for units, differs in ((4, False), (5, True)):
        rewards = sign * np.array([1, 1 + units * np.spacing(1.0)])
        assert group_advantages(rewards, num_generations=2, scale="none").any() == differs


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("group", {}),
        ("group", {"scale": "batch"}),
        ("normalize_then_sum", {}),
        ("rloo", {}),
        ("reinforce_pp", {}),
        ("reinforce_pp", {"baseline": "batch"}),
    ],
)
def test_groups_with_nothing_or_one_completion_scored_have_no_advantage(name, options):
    made = advantage(name, **options)
    each = np.array([[NAN, NAN, NAN], [NAN, 2.0, NAN], [1.0, NAN, 4.0]])
    np.testing.assert_array_equal(made(inputs(each[:2])), 0)
    got = made(inputs(each))
    np.testing.assert_array_equal(got[np.isnan(each)], 0)
    assert got[2, 0] < 0 < got[2, 2]
    if options != {"baseline": "batch"}:  # the only one that compares groups
        assert got[1, 1] == 0


def test_defaults_are_those_of_group_advantages():
    """Rewards so close that eps shows."""
    rewards = GROUPS.astype(np.float64) * 1e-4
    for name, aggregation in (("group", "sum_then_normalize"), ("normalize_then_sum", "normalize_then_sum")):
        expected = group_advantages(rewards.reshape(-1), num_generations=4, aggregation=aggregation)
        np.testing.assert_array_equal(advantage(name)(inputs(rewards)).reshape(-1), expected)


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("rewards", [[1e8, 1e8 + 1, 1e8, 1e8], [1000, 1000 + 2**-17, 1000, 1000]])
def test_small_differences_of_large_rewards_count(rewards, aggregation):
    less = np.array(rewards) - rewards[0]
    assert np.ptp(np.float32(rewards)) == 0
    for scale in ("group", "batch", "none"):
        options = {"num_generations": 4, "scale": scale, "aggregation": aggregation}
        got = group_advantages(rewards, **options)
        np.testing.assert_allclose(got, group_advantages(less, **options), rtol=1e-6)
        assert got[1] > 0
    grouped = np.array(rewards)[None, :, None]
    given = AdvantageInputs.of(grouped, np.ones(1), np.ones((1, 4), np.int32))
    for made in (advantage("rloo"), advantage("reinforce_pp"), advantage("reinforce_pp", baseline="batch")):
        np.testing.assert_allclose(made(given), made(inputs(less[None])), rtol=1e-6)


def test_leave_one_out_is_the_reward_less_the_mean_of_the_others():
    rewards = np.random.default_rng(1).normal(size=(3, 4))
    expected = [[row[i] - np.delete(row, i).mean() for i in range(4)] for row in rewards]
    np.testing.assert_allclose(advantage("rloo")(inputs(rewards)), expected, rtol=1e-6)
    got = advantage("rloo")(inputs(GROUPS.astype(np.float64)))
    np.testing.assert_allclose(got[0], [2 / 3, -2 / 3, -2 / 3, 2 / 3], rtol=1e-6)
    np.testing.assert_array_equal(got[1], 0)


def test_leave_one_out_among_those_that_are_scored():
    rewards = np.array([[1.0, NAN, 4.0, 7.0], [2.0, NAN, NAN, NAN], [1.0, NAN, NAN, 4.0]])
    got = advantage("rloo")(inputs(rewards))
    np.testing.assert_allclose(got[0], [1 - 5.5, 0, 4 - 4, 7 - 2.5], rtol=1e-6)
    np.testing.assert_array_equal(got[1], 0)
    np.testing.assert_allclose(got[2], [1 - 4, 0, 0, 4 - 1], rtol=1e-6)


@pytest.mark.parametrize("baseline", ["group", "batch"])
def test_reinforce_pp(baseline):
    rewards = np.random.default_rng(2).normal(size=(3, 4)) + np.array([[0.0], [5.0], [-5.0]])
    rewards[1, 2] = np.nan
    rewards[2] = [3.0, 3.0, np.nan, 3.0]
    if baseline == "group":
        centred = rewards - np.nanmean(rewards, axis=1, keepdims=True)
        spread = np.nanstd(centred, ddof=1)
    else:
        centred, spread = rewards - np.nanmean(rewards), np.nanstd(rewards, ddof=1)
    got = advantage("reinforce_pp", baseline=baseline)(inputs(rewards))
    np.testing.assert_allclose(got, np.nan_to_num(centred / (spread + 1e-4)), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["group", "normalize_then_sum", "rloo", "reinforce_pp"])
def test_a_constant_group_among_others_is_exactly_zero(name):
    rewards = np.random.default_rng(3).normal(size=(4, 3, 2))
    rewards[2] = [0.1 + 0.2, 1e6 / 3]
    got = advantage(name)(inputs(rewards, np.array([1.0, 0.1])))
    np.testing.assert_array_equal(got[2], 0)
    assert (got[[0, 1, 3]] != 0).all()
