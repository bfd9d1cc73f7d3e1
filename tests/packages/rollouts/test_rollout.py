"""A rollout: its rewards and metrics, its samples file, and its arrays in a checkpoint."""

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core import Stage, data
from rlhf_core.contracts import RewardInputs
from rlhf_core.environments import Episode, TurnRecord
from rlhf_core.metrics import Mean
from rlhf_core.rollouts import Reward, Rollout, RolloutUpdates
from rlhf_core.rollouts.rollout import Conversations, Timing, completion_lines
from rlhf_core.sampling import Rollouts
from tests.shared import collectors

G, C = 3, 4


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return tiny.make_tokenizer()


@pytest.fixture(scope="module")
def prompts(tiny, tokenizer):
    return data.encode_prompts(data.load(tiny.prompts(5)), tokenizer, max_prompt_length=16)


@pytest.fixture
def rollout(samples):
    rewards = np.array([[1, 0.5], [np.nan, 0.5], [0, 0.5], [2, 0.5], [2, 0.5], [np.nan, np.nan]])
    total = np.array([2.0, 1.0, 1.0, 3.0, 3.0, np.nan])
    values = {"old_logps": samples.logps - 1}
    advantages = np.arange(6, dtype=np.float32)
    return Rollout(
        np.array([4, 2]), samples, rewards, total, number=7, advantages=advantages, token_values=values
    )


def test_reward_functions_get_prompts_completions_and_columns_in_step(prompts, samples, tokenizer):
    inputs = collectors.scored(prompts, [4, 2], samples, tokenizer).inputs
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


def metrics(rollout, functions=(), **changes):
    return collectors.collector(rewards=functions).metrics(replace(rollout, **changes))


@pytest.mark.filterwarnings("ignore:.*unscored")
def test_metrics(rollout):
    rewards = [Reward("right", 1.0, None), Reward("short", 2.0, None)]
    total = np.array([2.0, 1.0, 1.0, 3.0, 3.0, np.nan])
    found = metrics(rollout, rewards, total=total)
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
        "rewards/right/unscored": 2 / 6,
        "rewards/short/mean": 0.5,
        "rewards/short/std": 0.0,
        "rewards/short/unscored": np.isnan(rollout.rewards[:, 1]).mean(),
    }
    assert found == pytest.approx(expected)


NAN = np.nan


@pytest.mark.parametrize(
    ("each", "total", "count"),
    [
        ([1, 1, NAN, 1, 1, 1], [1, 1, 1, 1, 1, 1], 1),  # others of its prompt have a value
        ([NAN, NAN, NAN, 1, 1, 1], [1, 1, 1, 1, 1, 1], None),  # meant for other prompts
        ([NAN, NAN, NAN, 1, 1, 1], [NAN, NAN, NAN, 1, 1, 1], 3),  # no reward applies
        ([1] * 6, [1] * 6, None),
    ],
)
def test_a_reward_that_leaves_completions_unscored_is_reported_once(rollout, recwarn, each, total, count):
    reward = Reward("judge", 1.0, None)
    rollout = replace(rollout, rewards=np.array(each, float)[:, None], total=np.array(total, float))
    for _ in range(2):
        metrics(rollout, [reward])
    said = f"stage 'policy': reward 'judge' left {count} of 6 completions unscored (None)"
    assert [str(each.message).startswith(said) for each in recwarn] == ([] if count is None else [True])


def test_metrics_without_a_value(rollout):
    each = np.column_stack([np.full(6, np.nan), np.ones(6)])
    rewards = [Reward("never", 1.0, None), Reward("always", 1.0, None)]
    found = metrics(rollout, rewards, rewards=each, total=np.ones(6))
    assert np.isnan(found["rewards/never/mean"])
    assert found["frac_reward_zero_std"] == 1.0

    samples = rollout.samples._replace(finished=np.zeros(6, bool))
    found = metrics(rollout, samples=samples, rewards=np.ones((6, 0)), total=np.arange(6.0))
    assert not [name for name in found if "terminated" in name]
    assert found["completions/max_length"] == 4

    rollout = replace(rollout, rewards=np.ones((6, 0)))
    found = metrics(rollout, prompts=np.arange(6), total=np.arange(6.0))
    assert found["reward"] == 2.5
    assert not {"reward_std", "frac_reward_zero_std"} & set(found)
    alone = np.array([2.0, np.nan, np.nan, np.nan, 3.0, np.nan])
    found = metrics(rollout, total=alone)
    assert np.isnan(found["reward_std"])
    assert np.isnan(found["frac_reward_zero_std"])
    one_of_two = np.array([2.0, np.nan, np.nan, 4.0, 3.0, np.nan])
    found = metrics(rollout, total=one_of_two)
    assert (found["reward_std"], found["frac_reward_zero_std"]) == (pytest.approx(np.sqrt(0.5)), 0.0)


def test_samples_file_without_secrets(prompts, rollout, tokenizer, tmp_path, monkeypatch):
    inputs = collectors.scored(prompts, rollout.prompts, rollout.samples, tokenizer).inputs
    rewards = [SimpleNamespace(label="right"), SimpleNamespace(label="short")]
    path = tmp_path / "samples" / "some.jsonl"
    replace(rollout, inputs=inputs).write(path, rewards)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 6
    assert rows[1] == {
        "prompt": prompts.raw[4],
        "columns": {"answer": prompts.columns["answer"][4], "number": 4},
        "completion": " e f g h",
        "reward": 1.0,
        "rewards": {"right": None, "short": 0.5},
        "advantage": 1.0,
        "length": 4,
        "finished": False,
    }
    assert rows[5]["reward"] is None
    by_token = np.where(rollout.samples.mask, np.arange(C, dtype=np.float32), np.float32(99))
    replace(rollout, inputs=inputs, advantages=by_token).write(path, rewards)
    means = [json.loads(line)["advantage"] for line in path.read_text().splitlines()]
    assert means == [0.5, 1.5, 0.0, 1.0, 0.5, 1.5]  # over the tokens of the completion

    secret = 'canary-"said"-9'
    monkeypatch.setenv("MY_API_KEY", secret)
    inputs = collectors.scored(prompts, rollout.prompts, rollout.samples, tokenizer).inputs
    said = [{"role": "user", "content": f"401 for {secret}"}]
    cells = {"key": ["x" * 990 + secret] * 6, "object": [Path(secret)] * 6}
    inputs = inputs._replace(completions=[said] * 6, columns=cells)
    replace(rollout, inputs=inputs).write(tmp_path / "some.jsonl", [])
    text = (tmp_path / "some.jsonl").read_text()
    assert "canary" not in text
    assert json.loads(text.splitlines()[0])["completion"][0]["content"] == "401 for " + 10 * "*"


def test_a_sample_has_the_columns_of_its_row(prompts, rollout, tokenizer, tmp_path):
    inputs = collectors.scored(prompts, rollout.prompts, rollout.samples, tokenizer).inputs
    cells = {
        "answer": [float("nan")],
        "when": date(2026, 1, 2),
        "long": "x" * 5000,
        "quoted": '"' * 1000,
        "too_long": "x" * 1001,
        "items": [1] * 333,  # "[1, 1, …]" has 3 characters per item
        "too_many": [1] * 334,
        "keyed": {("a", 1): 2, "b": 3},
        "environment_rewards": 1.0,
    }

    def write(cells):
        columns = {name: [value] * 6 for name, value in cells.items()}
        replace(rollout, inputs=inputs._replace(columns=columns)).write(tmp_path / "some.jsonl", [])
        return json.loads((tmp_path / "some.jsonl").read_text().splitlines()[0])

    assert write(cells)["columns"] == {
        "answer": [None],
        "when": "2026-01-02",
        "long": "x" * 1000 + "…",
        "quoted": '"' * 1000,
        "too_long": "x" * 1000 + "…",
        "items": [1] * 333,
        "too_many": str([1] * 334)[:1000] + "…",
        "keyed": {"b": 3},
    }
    assert "columns" not in write({"environment_rewards": 1.0})


def test_a_checkpoint_gives_the_rollout_back(rollout):
    arrays = {name: x.copy() for name, x in rollout.arrays().items()}
    again = Rollout.from_arrays(arrays, number=7, rounds=2, metrics={"reward": 1.0})
    assert (again.number, again.rounds, again.metrics, again.inputs) == (7, 2, {"reward": 1.0}, None)
    np.testing.assert_array_equal(again.token_values["old_logps"], rollout.token_values["old_logps"])
    for name in ("prompts", "rewards", "total", "advantages"):
        np.testing.assert_array_equal(getattr(again, name), getattr(rollout, name))
        assert getattr(again, name).dtype == getattr(rollout, name).dtype
    for ours, theirs in zip(again.samples, rollout.samples, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("finished_only", [False, True])
def test_a_group_is_a_tree_with_its_prompt_once(prompts, rollout, finished_only):
    mask = rollout.samples.mask & rollout.samples.finished[:, None] if finished_only else None
    trees = rollout.trees(prompts, mask=mask)
    assert [tree.prefix.tolist() for tree in trees] == [list(prompts.ids[4]), list(prompts.ids[2])]
    first, second = trees
    assert [branch.tolist() for branch in first.branches] == [[3, 1], [7, 8, 9, 10], [1]]
    assert [weight.tolist() for weight in first.weights] == [[1, 1], [0 if finished_only else 1] * 4, [1]]
    assert second.sequence_values["index"].tolist() == [3, 4, 5]
    np.testing.assert_array_equal(first.token_values["sampling_logps"][1], rollout.samples.logps[1])
    np.testing.assert_array_equal(first.token_values["old_logps"][1], rollout.samples.logps[1] - 1)
    assert [x.tolist() for x in second.token_values["advantages"]] == [[3] * 3, [4] * 2, [5] * 4]
    (only,) = rollout.trees(prompts, 1, 2)
    assert only.sequence_values["index"].tolist() == [3, 4, 5]
    by_token = np.arange(6 * C, dtype=np.float32).reshape(6, C)
    (only,) = replace(rollout, advantages=by_token).trees(prompts, 1, 2)
    assert [x.tolist() for x in only.token_values["advantages"]] == [[12, 13, 14], [16, 17], [20, 21, 22, 23]]


def test_trees_of_missing_rewards_and_of_tokens_that_the_policy_did_not_write(prompts, rollout):
    (tree,) = replace(rollout, advantages=np.zeros(0, np.float32)).trees(prompts, 1)
    assert tree.sequence_values["reward"].tolist() == [3, 3, 0]
    assert set(tree.token_values) == {"sampling_logps", "old_logps"}
    assert [len(rollout.trees(prompts, *part)) for part in ((), (0, 1), (2,), (0, 9))] == [2, 1, 0, 2]

    mask = rollout.samples.mask.copy()
    mask[1, 1:3] = False  # such as a tool's answer in the middle of a completion
    (tree,) = replace(rollout, samples=rollout.samples._replace(mask=mask)).trees(prompts, 0, 1)
    assert [weight.tolist() for weight in tree.weights] == [[1, 1], [1, 0, 0, 1], [1]]


TURNS = [
    [TurnRecord(0, 2)],
    [TurnRecord(0, 1), TurnRecord(3, 4, np.array([8, 9], np.int32))],
    [TurnRecord(0, 1)],
    [TurnRecord(0, 3)],
    [TurnRecord(0, 2)],
    [],
]


@pytest.fixture
def talks(rollout):
    def talks(one_row_per_turn):
        said = [np.arange(3, dtype=np.int32), np.arange(5, 7, dtype=np.int32)]
        rewards = [[1.0] * len(turns) for turns in TURNS]
        return replace(
            rollout, conversations=Conversations(said, TURNS, rewards, [None] * 6, one_row_per_turn)
        )

    return talks


def test_an_episode_is_a_branch_or_each_turn_with_its_own_context_a_tree(talks):
    rollout = talks(False)
    assert rollout.tree_groups() == [0, 1]
    assert rollout.tree_groups(1) == rollout.tree_groups(1, 2) == [1]
    first, second = rollout.trees(None)
    assert (first.prefix.tolist(), second.prefix.tolist()) == ([0, 1, 2], [5, 6])
    assert [len(branch) for branch in second.branches] == [3, 2, 4]

    rollout = talks(True)
    assert rollout.tree_groups() == [0, 0, 0, 0, 1, 1]
    assert rollout.tree_groups(0, 1) == [0] * 4
    trees = rollout.trees(None)
    assert [tree.prefix.tolist() for tree in trees] == [[0, 1, 2]] * 2 + [[8, 9], [0, 1, 2]] + [[5, 6]] * 2
    assert [tree.branches[0].tolist() for tree in trees[:4]] == [[3, 1], [7], [10], [1]]
    assert [len(rollout.trees(None, *part)) for part in ((0, 1), (1,), (1, 2))] == [4, 2, 2]

    inputs = RewardInputs([""] * 6, ["a"] * 6, [[]] * 6, {})
    rounds = [replace(talks(True), inputs=inputs)] * 2
    assert Rollout.join(rounds).tree_groups() == [0] * 4 + [1] * 2 + [2] * 4 + [3] * 2

    plain = replace(talks(True), advantages=np.zeros(0, np.float32), token_values={})
    taken = plain.take(np.array([1]))
    assert taken.conversations.prompts[0].tolist() == [5, 6]
    assert taken.tree_groups() == [0, 0]
    again = Rollout.from_arrays(taken.arrays(), number=7, rounds=1, metrics={})
    assert [tree.prefix.tolist() for tree in again.trees(None)] == [[5, 6]] * 2


def test_the_length_of_a_sample_is_what_the_policy_wrote(talks, tmp_path):
    rollout = talks(False)
    mask = rollout.samples.mask.copy()
    mask[1, 1:3] = False
    inputs = RewardInputs([""] * 6, ["a"] * 6, [[]] * 6, {})
    replace(rollout, samples=rollout.samples._replace(mask=mask), inputs=inputs).write(
        tmp_path / "some.jsonl", []
    )
    rows = [json.loads(line) for line in (tmp_path / "some.jsonl").read_text().splitlines()]
    assert [row["length"] for row in rows] == [2, 2, 1, 3, 2, 4]


def test_token_values_lie_where_the_mask_is_and_end_with_the_completion(rollout):
    every = np.ones((6, C), bool)
    values = [np.arange(1, n + 1, dtype=np.float32) for n in rollout.samples.lengths]
    laid = rollout.with_token_values({"new": values}, mask=every).token_values
    assert laid["new"].tolist() == [
        [1, 2, 0, 0],
        [1, 2, 3, 4],
        [1, 0, 0, 0],
        [1, 2, 3, 0],
        [1, 2, 0, 0],
        [1, 2, 3, 4],
    ]
    np.testing.assert_array_equal(laid["old_logps"], rollout.token_values["old_logps"])
    every[1, 0] = False
    values[1] = values[1][1:]
    assert rollout.with_token_values({"new": values}, mask=every).token_values["new"][1].tolist() == [
        0,
        2,
        3,
        4,
    ]


def test_failures_of_rounds_add_up_and_other_metrics_are_averaged(rollout):
    inputs = RewardInputs([""] * 6, ["a"] * 6, [[]] * 6, {})
    metrics = [{"reward": 1.0, "episodes/failed": 2.0}, {"reward": 2.0, "episodes/failed": 3.0, "rare": 5.0}]
    rounds = [replace(rollout, inputs=inputs, metrics=each) for each in metrics]
    assert Rollout.join(rounds).metrics == {"reward": 1.5, "episodes/failed": 5.0, "rare": 5.0}

    assert Timing(1.0, 2.0).metrics() == {"time/rollout": 1.0, "time/reward": 2.0}
    assert "rollout/tokens_per_second" in Timing(1.0, 2.0, 1).metrics()


@pytest.mark.parametrize(("ahead", "replay"), [(0, None), (1, None), (0, SimpleNamespace(until=4))])
def test_a_sampler_judges_the_tokens_of_whole_rollouts(ahead: int, replay: Any) -> None:
    """Its log-probabilities and the trainer's are of one policy, and of what it sampled itself."""
    judged = list[tuple[int, float]]()

    def verdict(version: int, difference: float) -> str | None:
        judged.append((version, difference))
        return "off" if difference > 1 else None

    made: Any = SimpleNamespace(
        collector=SimpleNamespace(sampler=SimpleNamespace(verdict=verdict)),
        options=SimpleNamespace(ahead=ahead),
        stage=SimpleNamespace(replay=replay),
        updates_per_rollout=2,
        _difference=Mean(0.0, 0.0),
    )
    sums = [Mean(2.0, 1.0), Mean(1.0, 5.0), Mean(4.0, 2.0), Mean(8.0, 1.0), Mean(0.0, 0.0), Mean(0.0, 0.0)]
    found = [
        RolloutUpdates.measured(made, step, {"sampling/logp_difference_mean": each})
        for step, each in enumerate(sums)
    ]
    assert RolloutUpdates.measured(made, 7, {"loss": Mean(0.0, 1.0)}) is None
    if ahead or replay:
        assert judged == []
    else:
        assert judged == [(0, 0.5), (2, 4.0)]
        assert found == [None, None, None, "off", None, None]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("context", [None, np.arange(6, dtype=np.int32)])
def test_a_checkpoint_keeps_turns_and_whether_each_is_a_row(again, context):
    """Also of episodes of one turn, which has no context in either case."""
    turns = [[TurnRecord(0, 2), TurnRecord(5, 7, context)], [], [TurnRecord(0, 1)], [TurnRecord(0, 3)]]
    prompts = [np.arange(3, dtype=np.int32), np.arange(1, dtype=np.int32)]
    arrays = Conversations(prompts, turns, one_row_per_turn=again).arrays("e/")
    kept = Conversations.from_arrays(arrays, "e/")
    assert kept.one_row_per_turn is again
    assert [[(t.start, t.end) for t in each] for each in kept.turns] == [
        [(t.start, t.end) for t in each] for each in turns
    ]
    assert (kept.turns[0][1].context is None) is (context is None)
    assert [prompt.tolist() for prompt in kept.prompts] == [[0, 1, 2], [0]]
    assert Conversations.from_arrays(arrays, "another/") is None


def test_conversations_of_episodes_that_did_not_begin_or_were_not_answered():
    empty, prompt = np.zeros(0, np.int32), np.arange(3, dtype=np.int32)
    every = [Episode({}, 0, "", prompt=each) for each in (empty, prompt, empty, empty)]
    said = Conversations.of(SimpleNamespace(episodes=every), 2, one_row_per_turn=False)
    assert [each.tolist() for each in said.prompts] == [[0, 1, 2], [0]]

    said = Conversations(
        [], [[TurnRecord(0, 2, message=0), TurnRecord(5, 6, message=2)]], [[0.5]], ["failed"]
    )
    assert said.described(0) == {
        "turns": [{"message": 0, "tokens": 2, "reward": 0.5}, {"message": 2, "tokens": 1, "reward": None}],
        "failure": "failed",
    }


# Completions of a rollout in the terminal


def of(prompts, completions, rewards):
    n = len(completions)
    samples = Rollouts(
        np.ones((n, 3), np.int32), np.full(n, 3, np.int32), np.zeros((n, 3), np.float32), np.arange(n) > 0
    )
    inputs = RewardInputs(prompts, completions, [[1] * 3] * n, {})
    rewards = np.array(rewards, np.float64)
    return Rollout(np.arange(n), samples, rewards, np.nansum(rewards, 1), inputs)


def shown(rollout, labels, count):
    return list(completion_lines(rollout, [SimpleNamespace(label=label) for label in labels], count))


def test_printed_completions_are_evenly_spread_with_their_rewards_and_roles():
    many = of(["p"] * 7, [f"c{i}" for i in range(7)], [[i / 2] for i in range(7)])
    texts = shown(many, ["right"], 3)
    assert [text.splitlines()[0] for text in texts] == [
        "completion 1 of 7  reward 0  3 tokens, cut",
        "completion 4 of 7  reward 1.5  3 tokens",
        "completion 7 of 7  reward 3  3 tokens",
    ]
    assert len(shown(many, ["right"], 100)) == 7
    assert shown(many, ["right"], 0) == []
    advantaged = replace(many, advantages=np.arange(7, dtype=np.float32))
    assert shown(advantaged, ["right"], 2)[1].startswith(
        "completion 7 of 7  reward 3  advantage 6  3 tokens\n"
    )

    two = of(["p"], ["c"], [[1.0, np.nan]])
    assert shown(two, ["right", "short"], 1)[0].startswith("completion 1 of 1  reward 1  right 1  short –  3")
    assert shown(of(["p"], ["c"], [[1.0]]), [], 1)[0].startswith("completion 1 of 1  3 tokens")

    ask = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?\nSay."}]
    call = {"function": {"name": "add", "arguments": "{}"}}
    said = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    one, several = shown(
        of([ask, ask], [[{"role": "assistant", "content": "So."}], said], [[1], [1]]), ["r"], 2
    )
    assert one.splitlines()[1:] == ["  after system: Be brief. user: Why? Say.", "  │ So."]
    assert several.splitlines()[2:] == [f"  │ assistant: {[call]}", "  │ tool: 3"]


def test_no_line_of_a_completion_can_pass_for_another_and_none_drives_the_terminal(tmp_path, capsys):
    evil = "\x1b[2Jok\r[policy] done\n[policy] saved model\u2028x\n\n"
    stage = Stage("policy", tmp_path, 0, None, True, None, None)
    stage.say(*shown(of(["a" * 300], [evil + "b" * 2000], [[1]]), ["r"], 1))
    text = capsys.readouterr().err.removesuffix("\n")
    first, prompt, *lines = text.split("\n")
    assert first.startswith("[policy] completion 1 of 1")
    assert prompt == "  after …" + "a" * 199
    assert all(line.startswith("  │ ") for line in lines)
    assert "\x1b" not in text
    assert "\r" not in text
    assert text.endswith(f"… ({2000 + len(evil):,} characters)")
    assert shown(of(["p"], [""], [[1]]), ["r"], 1)[0].endswith("  │ (nothing)")
