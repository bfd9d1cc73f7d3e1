"""Episodes as a rollout has them: their seeds, their rewards, and what a checkpoint keeps of their turns."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rlhf_core.contracts import Turn
from rlhf_core.environments import EnvironmentCalls, EnvironmentOptions, Episode, EpisodeSettings, TurnRecord
from rlhf_core.errors import NonFiniteError, RunError
from rlhf_core.rollouts import Reward
from rlhf_core.rollouts.rollout import Conversations
from tests.shared import collectors

G = 2
USER = {"role": "user", "content": "a"}


class Remembers:
    """Ends with the first turn; the third episode of a call fails."""

    seeds: list[int] = []  # noqa: RUF012

    def reset(self, row, seed):
        self.number = len(Remembers.seeds)
        Remembers.seeds.append(seed)
        return [USER]

    def step(self, completion):
        if self.number == 2:
            raise ValueError("no such game")
        return Turn(reward=float(self.number), done=True)


@pytest.fixture
def source():
    Remembers.seeds = []
    encoder = SimpleNamespace(prompt=lambda messages, tools: np.arange(3, dtype=np.int32))
    parser = SimpleNamespace(message=lambda tokens: {"role": "assistant", "content": "b"})
    calls = EnvironmentCalls(EnvironmentOptions(name="made_up"), Remembers, "here")
    return EpisodeSettings(calls, encoder, parser, 8, 16, 4)


class Says:
    """A sampler whose turns have two tokens."""

    def converse(self, params, prompts, key, ids, world):
        for k in range(len(prompts)):
            world.submit(k, np.array([4, 1]), np.full(2, -0.5, np.float32), True)
            world.replies(wait=True)


PROMPTS = SimpleNamespace(row=lambda i: {}, where=lambda i: f"row {i + 1}", columns={})


def test_the_seed_of_a_group_follows_the_number_of_its_first_completion(source):
    key = jax.random.key(3)
    collector = collectors.collector(PROMPTS, sampler=Says(), group=G, episodes=source)
    collector.draw(None, np.array([5, 0]), key, np.arange(4, 8))
    first, same, other, _ = seeds = list(Remembers.seeds)
    assert first == same != other
    for ids, expected in ((np.arange(6, 8), seeds[2:]), (np.arange(2), None)):
        Remembers.seeds = []
        collector.draw(None, np.array([3]), key, ids)
        assert Remembers.seeds == expected if expected else Remembers.seeds[0] not in seeds


def test_rewards_of_failed_episodes_are_left_out_of_every_function(source):
    given = Reward("environment", 1.0, lambda **columns: columns["environment_rewards"])
    ones = Reward("ones", 1.0, lambda completions: [1.0] * len(completions))
    collector = collectors.collector(PROMPTS, rewards=[given, ones], sampler=Says(), group=G, episodes=source)
    with pytest.warns(
        UserWarning, match="1 of 4 episodes failed and are dropped; the first: row 1: .* no such game"
    ):
        rollout = collector.sample(None, np.array([5, 0]), jax.random.key(3), np.arange(4))
    assert np.isnan(rollout.rewards).tolist() == [[False] * 2, [False] * 2, [True] * 2, [False] * 2]
    assert np.nan_to_num(rollout.total, nan=-1).tolist() == [1.0, 2.0, -1.0, 4.0]


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


def test_conversations_keep_the_numbers_and_rows_of_their_episodes(source, monkeypatch):
    """Where earlier episodes failed before their first turn."""
    seen = []

    class Breaks(Says):
        def converse(self, params, prompts, key, ids, world):
            seen.append(ids.tolist())
            raise NonFiniteError("the outputs are not finite", 0)

    def reset(self, row, seed):
        if row["number"] == 5:
            raise ValueError("no such row")
        return [USER]

    monkeypatch.setattr(Remembers, "reset", reset)
    prompts = SimpleNamespace(row=lambda i: {"number": i}, where=lambda i: f"row {i + 1}")
    collector = collectors.collector(prompts, sampler=Breaks(), group=G, episodes=source)
    with pytest.raises(RunError, match=r"^row 9: the outputs are not finite"):
        collector.draw(None, np.array([5, 8]), jax.random.key(3), np.arange(4))
    assert seen == [[2, 3]]


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
