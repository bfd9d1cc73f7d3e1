"""Episodes as a rollout has them: their seeds, their rewards, and what a checkpoint keeps of their turns."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rlhf_core.contracts import Turn
from rlhf_core.environments import EnvironmentCalls, EnvironmentOptions, EpisodeSettings
from rlhf_core.errors import NonFiniteError, RunError
from rlhf_core.rollouts import Reward
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
