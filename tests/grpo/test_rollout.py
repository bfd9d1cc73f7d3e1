"""A rollout on its way from samples to rewards, advantages, trees and the samples file."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from rlhf_grpo.rollout import Draw, Rollout, advantage_inputs, advantages_of, group_trees, write_samples

from rlhf_core import data
from rlhf_core.errors import RunError
from rlhf_core.rollouts import Reward, measure, reward_inputs, rollout_metrics
from rlhf_core.sampling import Rollouts

G, C = 3, 4
END = 1


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return tiny.make_tokenizer()


@pytest.fixture(scope="module")
def prompts(tiny, tokenizer):
    return data.encode_prompts(data.load(tiny.prompts(5)), tokenizer, max_prompt_length=16)


@pytest.fixture
def samples():
    """Six completions of one to four tokens; the second and the last were cut."""
    lengths = np.array([2, 4, 1, 3, 2, 4], np.int32)
    finished = np.array([True, False, True, True, True, False])
    tokens = np.arange(3, 3 + 6 * C, dtype=np.int32).reshape(6, C)
    tokens[np.arange(C) >= lengths[:, None]] = 0
    tokens[finished, lengths[finished] - 1] = END
    logps = np.where(tokens > 0, -np.arange(6 * C, dtype=np.float32).reshape(6, C) / 10, 0).astype(np.float32)
    return Rollouts(tokens, lengths, logps, finished)


@pytest.fixture
def rollout(samples):
    rewards = np.array([[1, 0.5], [np.nan, 0.5], [0, 0.5], [2, 0.5], [2, 0.5], [np.nan, np.nan]])
    return Rollout(7, np.array([4, 2]), samples, rewards, np.arange(6, dtype=np.float32))


def test_reward_functions_get_prompts_completions_and_columns_in_step(prompts, samples, tokenizer):
    inputs = reward_inputs(prompts, [4, 2], samples, tokenizer)
    assert inputs.prompts == [prompts.raw[4]] * G + [prompts.raw[2]] * G
    assert inputs.columns["number"] == [4, 4, 4, 2, 2, 2]
    assert set(inputs.columns) == {"answer", "number"}
    assert inputs.completion_ids == [[3, 1], [7, 8, 9, 10], [1], [15, 16, 1], [19, 1], [23, 24, 25, 26]]
    # As text without special tokens: "a" is token 3.
    assert inputs.completions == [
        " a",
        " e f g h",
        "",
        " m n",
        " q",
        " u v w x",
    ]  # they continue their prompts


def test_chat_prompts_get_message_lists(tokenizer, samples):
    rows = [{"prompt": [{"role": "user", "content": "a b"}]}, {"prompt": [{"role": "user", "content": "c"}]}]
    chat = data.encode_prompts(data.load(rows), tokenizer, max_prompt_length=16, chat_template="plain")
    inputs = reward_inputs(chat, [1, 0], samples, tokenizer)
    assert inputs.prompts[0] == [{"role": "user", "content": "c"}]
    assert inputs.completions[1] == [{"role": "assistant", "content": "e f g h"}]


def test_metrics(rollout):
    rewards = [Reward("right", 1.0, None), Reward("short", 2.0, None)]
    total = np.array([2.0, 1.0, 1.0, 3.0, 3.0, np.nan])
    found = rollout_metrics(rewards, rollout.rewards, total, rollout.samples, G)
    expected = {
        "reward": 2.0,
        "reward_std": (np.std([2, 1, 1], ddof=1) + 0) / 2,
        "frac_reward_zero_std": 0.5,
        "completions/mean_length": 16 / 6,
        "completions/min_length": 1,
        "completions/max_length": 4,
        "completions/mean_terminated_length": 8 / 4,  # 2, 1, 3, 2
        "completions/min_terminated_length": 1,
        "completions/max_terminated_length": 3,
        "completions/clipped_ratio": 2 / 6,
        "rewards/right/mean": 5 / 4,
        "rewards/right/std": np.std([1, 0, 2, 2], ddof=1),
        "rewards/short/mean": 0.5,
        "rewards/short/std": 0.0,
    }
    assert found == pytest.approx(expected)


def test_metrics_of_a_function_that_applies_to_nothing_are_no_numbers(rollout):
    each = np.column_stack([np.full(6, np.nan), np.ones(6)])
    rewards = [Reward("never", 1.0, None), Reward("always", 1.0, None)]
    found = rollout_metrics(rewards, each, np.ones(6), rollout.samples, G)
    assert np.isnan(found["rewards/never/mean"])
    assert found["frac_reward_zero_std"] == 1.0


def test_groups_of_one_have_no_spread(rollout):
    """Neither 0 nor 1: a completion alone is compared with nothing."""
    found = rollout_metrics([], np.ones((6, 0)), np.arange(6.0), rollout.samples, 1)
    assert found["reward"] == 2.5
    assert not {"reward_std", "frac_reward_zero_std"} & set(found)
    alone = np.array([2.0, np.nan, np.nan, np.nan, 3.0, np.nan])
    found = rollout_metrics([], np.ones((6, 0)), alone, rollout.samples, G)
    assert np.isnan(found["reward_std"])
    assert np.isnan(found["frac_reward_zero_std"])
    one_of_two = np.array([2.0, np.nan, np.nan, 4.0, 3.0, np.nan])
    found = rollout_metrics([], np.ones((6, 0)), one_of_two, rollout.samples, G)
    assert (found["reward_std"], found["frac_reward_zero_std"]) == (pytest.approx(np.sqrt(0.5)), 0.0)


def test_where_nothing_ended_there_is_no_length_of_it(rollout):
    samples = rollout.samples._replace(finished=np.zeros(6, bool))
    found = rollout_metrics([], np.ones((6, 0)), np.arange(6.0), samples, G)
    assert not [name for name in found if "terminated" in name]
    assert found["completions/max_length"] == 4


def test_weighted_sum_and_advantage_inputs(prompts, samples, tokenizer):
    rewards = [
        Reward("f1", 0.7, lambda completions: np.ones(6)),
        Reward("f2", 0.3, lambda completions: np.zeros(6)),
    ]
    each, total = measure(rewards, reward_inputs(prompts, [4, 2], samples, tokenizer))
    assert total.tolist() == pytest.approx([0.7] * 6)
    inputs = advantage_inputs(each, total, [0.7, 0.3], samples.lengths, G)
    assert np.shape(inputs.rewards) == (2, G)
    assert np.shape(inputs.rewards_by_function) == (2, G, 2)
    assert inputs.weights.tolist() == [0.7, 0.3]
    assert inputs.lengths.tolist() == [[2, 4, 1], [3, 2, 4]]


@pytest.mark.parametrize("masked", [False, True])
def test_a_group_is_a_tree_with_its_prompt_once(prompts, rollout, masked):
    trees = group_trees(prompts, rollout, 0, 2, mask_truncated=masked)
    assert [tree.prefix.tolist() for tree in trees] == [list(prompts.ids[4]), list(prompts.ids[2])]
    first, second = trees
    assert [branch.tolist() for branch in first.branches] == [[3, 1], [7, 8, 9, 10], [1]]
    assert [weight.tolist() for weight in first.weights] == [[1, 1], [0 if masked else 1] * 4, [1]]
    assert second.sequence_values["advantages"].tolist() == [3, 4, 5]
    assert second.sequence_values["index"].tolist() == [3, 4, 5]
    np.testing.assert_array_equal(first.token_values["sampling_logps"][1], rollout.samples.logps[1])
    assert [len(x) for x in second.token_values["sampling_logps"]] == [3, 2, 4]
    only = group_trees(prompts, rollout, 1, 2, mask_truncated=masked)
    assert len(only) == 1
    assert only[0].sequence_values["index"].tolist() == [3, 4, 5]


def test_samples_file(prompts, rollout, tokenizer, tmp_path):
    inputs = reward_inputs(prompts, rollout.prompts.tolist(), rollout.samples, tokenizer)
    rewards = [SimpleNamespace(label="right"), SimpleNamespace(label="short")]
    total = np.array([2.0, 1.0, 1.0, 3.0, 3.0, np.nan])
    drawn = Draw(rollout.prompts, rollout.samples, inputs, rollout.rewards, total)
    path = tmp_path / "samples" / "some.jsonl"
    write_samples(path, drawn, rewards, rollout.advantages)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 6
    assert rows[1] == {
        "prompt": prompts.raw[4],
        "completion": " e f g h",
        "reward": 1.0,
        "rewards": {"right": None, "short": 0.5},
        "advantage": 1.0,
        "length": 4,
        "finished": False,
    }
    assert rows[5]["reward"] is None


def test_a_checkpoint_gives_the_rollout_back(rollout):
    again = Rollout.from_arrays(7, {name: x.copy() for name, x in rollout.arrays().items()})
    assert again.number == 7
    np.testing.assert_array_equal(again.rewards, rollout.rewards)
    for name in ("prompts", "advantages"):
        np.testing.assert_array_equal(getattr(again, name), getattr(rollout, name))
        assert getattr(again, name).dtype == getattr(rollout, name).dtype
    for ours, theirs in zip(again.samples, rollout.samples, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


def misspelt(inputs):
    return inputs.reward


@pytest.mark.parametrize(
    ("advantage", "message"),
    [
        (lambda inputs: inputs.rewards.T, r"shape \[3, 2\]; wanted is a number a completion, \[2, 3\]"),
        (lambda inputs: inputs.rewards.reshape(-1), r"shape \[6\]; wanted"),
        (lambda inputs: inputs.rewards[..., None] * np.ones(5), r"shape \[2, 3, 5\]; wanted"),
        (lambda inputs: None, r"shape \[\]; wanted"),
        (
            lambda inputs: inputs.rewards / 0,
            r"returned nan for sample 0 of prompt 0, whose rewards are \[0.0, 1.0, ",
        ),
        (lambda inputs: "high", r"raised ValueError: could not convert string to float"),
        (
            misspelt,
            r"raised AttributeError: 'AdvantageInputs' object has no attribute 'reward'.* \(.*test_rollout.py ",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_what_is_no_advantage(advantage, message):
    total = np.arange(6.0)
    inputs = advantage_inputs(total[:, None], total, [1.0], np.ones(6), 3)
    with pytest.raises(RunError, match=f"^advantage 'mine' .*{message}"):
        advantages_of(advantage, inputs, name="mine")


def test_what_is_one():
    total = np.arange(6.0)
    inputs = advantage_inputs(total[:, None], total, [1.0], np.ones(6), 3)
    found = advantages_of(lambda inputs: inputs.rewards - 1, inputs, name="mine")
    np.testing.assert_array_equal(found, total - 1)
    assert found.dtype == np.float32
