"""Numbers that other projects' tests and papers state, beside those in the tests of losses, advantages and rewards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_grpo import group_advantages, policy_loss
from rlhf_grpo.advantages import RLOO
from rlhf_grpo.functional import kept_by_entropy
from rlhf_grpo.losses import ratio
from rlhf_grpo.objective import Terms, combine

from rlhf_core import AdvantageInputs, LossOutput, PolicyInputs
from rlhf_core.logprobs import token_logps


class Plain:
    """A policy loss whose values are the log-probabilities themselves, so that only the averaging is left."""

    def __init__(self, aggregation):
        self.aggregation = aggregation

    def __call__(self, inputs):
        return LossOutput(inputs.logps)


def average(values, lengths, aggregation, sequences=None, num_items=None):
    """Sum and count of these values, the first `lengths` of each row."""
    values = jnp.asarray(values, jnp.float32)
    mask = (np.arange(values.shape[1]) < np.array(lengths)[:, None]).astype(np.float32)
    inputs = PolicyInputs(values, jnp.zeros_like(values), jnp.ones_like(values), jnp.asarray(mask))
    rows = len(lengths) if sequences is None else sequences
    return combine(Plain(aggregation), inputs, Terms("plain"), sequences=rows, num_items=num_items)[0]


@pytest.mark.parametrize(
    ("aggregation", "values", "lengths", "expected"),
    [
        ("token_mean", [[1, 2, 0], [3, 4, 5], [7, 0, 0]], [2, 3, 1], 22 / 6),
        ("sequence_mean", [[1, 3, 9], [2, 4, 0], [8, 0, 0]], [2, 2, 1], 13 / 3),
        ("fixed_length", [[1, 2, 0], [3, 4, 5], [7, 0, 0]], [2, 3, 1], 22 / 3),
    ],
)
def test_averages_are_the_same_when_two_ranks_share_the_rows(aggregation, values, lengths, expected):
    assert float(average(values, lengths, aggregation).result()) == pytest.approx(expected)
    parts = [average(values[rows], lengths[rows], aggregation) for rows in (slice(0, 2), slice(2, 3))]
    assert float(parts[0].merge(parts[1]).result()) == pytest.approx(expected)


def test_a_wholly_masked_row_counts_as_zero_in_the_mean_over_sequences():
    assert float(average([[1, 3], [5, 7]], [2, 0], "sequence_mean").result()) == 1.0


def test_micro_batches_of_two_and_five_tokens():
    """Their sum is 28: a mean of the two means would be 3.25."""
    small, large = (
        average([[1, 2, 0]], [2], "token_mean"),
        average([[3, 4, 5], [6, 7, 0]], [3, 2], "token_mean"),
    )
    assert float(small.merge(large).result()) == 4.0
    assert float(small.result() + large.result()) / 2 == 3.25


def test_the_policy_loss_of_two_ranks():
    """Advantages a token, zeros among them, and a hole."""
    logps = np.array([[-0.2, -0.4, -0.1], [-0.7, -0.3, -0.2], [-0.6, -0.1, -0.5]])
    moved = np.array([[0.03, -0.04, 0.01], [0.02, 0.05, -0.03], [0.04, 0.0, -0.02]])
    advantages = np.array([[1.0, -0.5, 0.0], [0.3, -1.2, 0.5], [1.5, 0.0, -0.7]])
    mask = np.array([[1, 1, 0], [1, 1, 1], [1, 0, 1]])
    for shift in (0.0, 0.3):  # without it nothing is clipped
        r = np.exp(moved + shift)
        value = -np.minimum(r * advantages, np.clip(r, 0.8, 1.2) * advantages)
        expected = (value * mask).sum() / 7

        def ours(rows, logps=logps, old=logps - moved - shift):
            arrays = (x[rows].astype(np.float32) for x in (logps, old, advantages, mask))
            return float(policy_loss(*arrays, loss_type="bnpo", num_items=7.0)[0])

        assert ours(slice(0, 3)) == pytest.approx(expected, rel=1e-5)
        assert ours(slice(0, 2)) + ours(slice(2, 3)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("kl", "expected"), [("k1", 100.0), ("k2", 5000.0), ("k3", 99.0)])
def test_the_kl_is_not_cut_off_at_a_log_ratio_of_one_hundred(kl, expected):
    one = jnp.ones((1, 1))
    _, metrics = policy_loss(100 * one, None, one[0], one, ref_logps=0 * one, kl=kl)
    assert float(metrics["kl"]) == pytest.approx(expected)


def test_no_entropy_is_kept_where_all_is_masked():
    entropies = jnp.arange(1, 13).reshape(2, 6) / 10
    assert not np.asarray(kept_by_entropy(entropies, jnp.zeros((2, 6)), 0.2)).any()


def test_ratios_of_tokens_and_of_sequences():
    logps = jnp.array([[-1.0, -0.5, -2.0], [-0.2, -1.5, 0.0]])
    old = jnp.array([[-1.2, -0.5, -1.5], [-0.6, -1.4, 0.0]])
    mask = jnp.array([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    inputs = PolicyInputs(logps, old, jnp.ones((2, 3)), mask)
    there = np.asarray(mask) > 0
    np.testing.assert_allclose(
        np.asarray(ratio(inputs))[there], [1.22140276, 1, 0.60653066, 1.4918247, 0.90483742], rtol=1e-6
    )
    for level in ("sequence", "sequence_token"):
        np.testing.assert_allclose(ratio(inputs, level)[:, 0], [0.90483742, 1.16183424], rtol=1e-6)


def test_advantages_of_one_success_in_four():
    rewards = np.array([1.0, 0, 0, 0])
    np.testing.assert_allclose(
        group_advantages(rewards, num_generations=4), [1.4997, -0.4999, -0.4999, -0.4999], atol=5e-5
    )
    inputs = AdvantageInputs(rewards[None], rewards[None, :, None], np.ones(1), np.ones((1, 4), np.int32))
    np.testing.assert_allclose(RLOO()(inputs), [[1, -1 / 3, -1 / 3, -1 / 3]], rtol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_a_loop_over_the_groups(scale):
    rewards = np.random.default_rng(0).normal(size=24) * 3
    expected = np.zeros(24)
    for first in range(0, 24, 6):
        group = rewards[first : first + 6]
        mean = sum(group) / 6
        spread = {
            "group": (sum((r - mean) ** 2 for r in group) / 5) ** 0.5 + 1e-4,
            "batch": (sum((r - sum(rewards) / 24) ** 2 for r in rewards) / 23) ** 0.5 + 1e-4,
            "none": 1.0,
        }[scale]
        for i in range(first, first + 6):
            expected[i] = (rewards[i] - mean) / spread
    got = group_advantages(rewards, num_generations=6, scale=scale)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.long  # `tests/packages/logprobs` has it in float64, in chunks of all sizes
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_head_in_chunks_equals_the_whole(temperature, dtype, tolerance):
    """64 tokens, 32 dimensions, 128 words, chunks of 32: log-probabilities, entropies, and both gradients."""
    draw = np.random.default_rng(1)
    hidden = jnp.asarray(draw.normal(size=(1, 64, 32)), dtype)
    kernel = jnp.asarray(draw.normal(size=(32, 128)) / 32**0.5, dtype)
    targets = draw.integers(0, 128, (1, 64)).astype(np.int32)

    def chunked(hidden, kernel):
        logps, entropies = token_logps(
            hidden, kernel, targets, temperature=temperature, at_once=("tokens", 32), entropy=True
        )
        return logps.sum() + entropies.sum(), (logps, entropies)

    def full(hidden, kernel):
        logits = hidden.astype(jnp.float32) @ kernel.astype(jnp.float32) / temperature
        log_p = jax.nn.log_softmax(logits)
        logps = jnp.take_along_axis(log_p, jnp.asarray(targets)[..., None], axis=-1)[..., 0]
        entropies = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        return logps.sum() + entropies.sum(), (logps, entropies)

    got, expected = (
        jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(hidden, kernel) for f in (chunked, full)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize(
    ("rewards", "group", "expected"),
    [
        ([1, 2, 3, np.nan], 4, [-1 / 1.0001, 0, 1 / 1.0001, 0]),
        ([1, np.nan, 3, 5], 2, [0, 0, -1 / 1.4143135, 1 / 1.4143135]),
        ([np.nan, np.nan, np.nan, np.nan], 2, [0, 0, 0, 0]),
    ],
)
def test_standard_deviations_leave_out_what_was_not_scored(rewards, group, expected):
    """1.0 of three, none of one, 1.4142135 of two, none of none; 1e-4 is added."""
    got = group_advantages(np.array(rewards, np.float32), num_generations=group)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)
