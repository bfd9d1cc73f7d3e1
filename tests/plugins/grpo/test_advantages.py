import numpy as np
import pytest
from rlhf_grpo import group_advantages
from rlhf_grpo.advantages import RLOO, Group, NormalizeThenSum, ReinforcePP

from rlhf_core import AdvantageInputs

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


def test_a_constant_group_is_exactly_zero_whatever_its_rounding():
    rewards = np.full(7, 0.1 + 0.2, np.float32)
    for scale in ("group", "batch", "none"):
        assert not np.asarray(group_advantages(rewards, num_generations=7, scale=scale)).any()


def test_unscored_completions_are_left_out_of_mean_and_deviation():
    rewards = np.array([1.0, np.nan, 3.0, np.nan, 5.0, np.nan], np.float32)
    got = np.asarray(group_advantages(rewards, num_generations=3))
    deviation = np.std([1.0, 3.0], ddof=1)
    np.testing.assert_allclose(got[:3], [-1 / (deviation + 1e-4), 0, 1 / (deviation + 1e-4)], rtol=1e-5)
    np.testing.assert_array_equal(got[3:], 0)  # one scored completion has no deviation


def test_weights_and_functions_that_do_not_apply():
    rewards = np.array([[1.0, 10.0], [2.0, np.nan], [np.nan, np.nan], [0.0, 0.0]], np.float32)
    total = np.array([0.7 + 3.0, 1.4, np.nan, 0.0])
    got = np.asarray(group_advantages(rewards, num_generations=4, weights=[0.7, 0.3], scale="none"))
    np.testing.assert_allclose(got, np.nan_to_num(total - np.nanmean(total)), rtol=1e-6)


def test_normalize_then_sum():
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(12, 2)) * [1.0, 100.0]
    weights = np.array([2.0, 1.0])
    grouped = rewards.reshape(3, 4, 2)
    each = (grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, ddof=1, keepdims=True) + 1e-4)
    total = (each * weights).sum(-1)
    expected = (total - total.mean()) / (total.std(ddof=1) + 1e-4)
    got = group_advantages(rewards, num_generations=4, weights=weights, aggregation="normalize_then_sum")
    np.testing.assert_allclose(got, expected.reshape(-1), rtol=1e-4, atol=1e-5)


def test_normalize_then_sum_leaves_unscored_rows_out_of_the_last_mean_too():
    rewards = np.array([[1.0], [2.0], [np.nan], [1.0], [5.0], [3.0]])
    got = np.asarray(group_advantages(rewards, num_generations=3, aggregation="normalize_then_sum"))

    def z(x):
        return (x - x.mean()) / (x.std(ddof=1) + 1e-4)

    total = np.concatenate([z(np.array([1.0, 2.0])), z(np.array([1.0, 5.0, 3.0]))])
    expected = (total - total.mean()) / (total.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(got[[0, 1, 3, 4, 5]], expected, rtol=1e-4, atol=1e-6)
    assert got[2] == 0


def test_normalize_then_sum_counts_what_one_function_of_several_scored():
    nan = np.nan
    rewards = np.array([[1.0, nan], [2.0, 3.0], [4.0, 7.0], [nan, nan], [5.0, 1.0], [nan, 2.0]])
    got = np.asarray(group_advantages(rewards, num_generations=3, aggregation="normalize_then_sum"))

    def z(*x):
        return (np.array(x) - np.mean(x)) / (np.std(x, ddof=1) + 1e-4)

    first, second, last = z(1.0, 2.0, 4.0), z(3.0, 7.0), z(1.0, 2.0)
    total = np.array([first[0], first[1] + second[0], first[2] + second[1], last[0], last[1]])
    expected = (total - total.mean()) / (total.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(got[[0, 1, 2, 4, 5]], expected, rtol=1e-4)
    assert got[3] == 0


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
    "advantage", [Group(), Group("batch"), NormalizeThenSum(), RLOO(), ReinforcePP(), ReinforcePP("batch")]
)
def test_groups_with_nothing_or_one_completion_scored_have_no_advantage(advantage):
    nan = np.nan
    each = np.array([[nan, nan, nan], [nan, 2.0, nan], [1.0, nan, 4.0]])
    alone = AdvantageInputs.of(each[:2, :, None], np.ones(1), np.zeros((2, 3), np.int32))
    np.testing.assert_array_equal(advantage(alone), 0)
    got = advantage(AdvantageInputs.of(each[..., None], np.ones(1), np.zeros((3, 3), np.int32)))
    np.testing.assert_array_equal(got[np.isnan(each)], 0)
    assert got[2, 0] < 0 < got[2, 2]
    if advantage != ReinforcePP("batch"):  # the only one that compares groups
        assert got[1, 1] == 0


def test_defaults_are_those_of_group_advantages():
    """Rewards so close that eps shows."""
    rewards = GROUPS.astype(np.float64) * 1e-4
    for advantage, aggregation in (
        (Group(), "sum_then_normalize"),
        (NormalizeThenSum(), "normalize_then_sum"),
    ):
        expected = group_advantages(rewards.reshape(-1), num_generations=4, aggregation=aggregation)
        np.testing.assert_array_equal(advantage(inputs(rewards)).reshape(-1), expected)


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
    for advantage in (RLOO(), ReinforcePP(), ReinforcePP("batch")):
        np.testing.assert_allclose(advantage(given), advantage(inputs(less[None])), rtol=1e-6)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_a_constant_added_to_a_group_changes_nothing(scale):
    shifted = GROUPS + np.array([[1.0], [2.0], [-4.0]], np.float32)
    np.testing.assert_allclose(
        group_advantages(shifted.reshape(-1), num_generations=4, scale=scale),
        group_advantages(GROUPS.reshape(-1), num_generations=4, scale=scale),
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        (np.ones(5), {"num_generations": 2}, "not whole groups"),
        (np.ones(4), {"num_generations": 1}, "group of one"),
        (np.ones((4, 2)), {"num_generations": 2, "weights": [1.0]}, "1 for 2 reward functions"),
        (np.ones((4, 2)), {"num_generations": 2, "weights": [1.0] * 3}, "3 for 2 reward functions"),
        (np.ones(4), {"num_generations": 2, "scale": "std"}, "'std' is not one of"),
    ],
)
def test_what_cannot_be_computed_says_why(rewards, options, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, **options)


def inputs(rewards, weights=None):
    each = rewards[..., None] if rewards.ndim == 2 else rewards
    weights = np.ones(each.shape[-1]) if weights is None else weights
    total = np.where(np.isnan(each).all(-1), np.nan, np.nansum(each * weights, axis=-1))
    return AdvantageInputs(total, each, weights, np.zeros(total.shape, np.int32))


def test_leave_one_out_is_the_reward_less_the_mean_of_the_others():
    rewards = np.random.default_rng(1).normal(size=(3, 4))
    expected = [[row[i] - np.delete(row, i).mean() for i in range(4)] for row in rewards]
    np.testing.assert_allclose(RLOO()(inputs(rewards)), expected, rtol=1e-6)
    got = RLOO()(inputs(GROUPS.astype(np.float64)))
    np.testing.assert_allclose(got[0], [2 / 3, -2 / 3, -2 / 3, 2 / 3], rtol=1e-6)
    np.testing.assert_array_equal(got[1], 0)


def test_leave_one_out_among_those_that_are_scored():
    nan = np.nan
    got = RLOO()(inputs(np.array([[1.0, nan, 4.0, 7.0], [2.0, nan, nan, nan], [1.0, nan, nan, 4.0]])))
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
    got = ReinforcePP(baseline)(inputs(rewards))
    np.testing.assert_allclose(got, np.nan_to_num(centred / (spread + 1e-4)), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("advantage", [Group(), NormalizeThenSum(), RLOO(), ReinforcePP()])
def test_a_constant_group_among_others_is_exactly_zero(advantage):
    rewards = np.random.default_rng(3).normal(size=(4, 3, 2))
    rewards[2] = [0.1 + 0.2, 1e6 / 3]
    got = advantage(inputs(rewards, np.array([1.0, 0.1])))
    np.testing.assert_array_equal(got[2], 0)
    assert (got[[0, 1, 3]] != 0).all()
