"""Episodes of made-up environments, without a model: what ends them, what they keep, and their limits to the token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core.contracts import Continuation, Turn
from rlhf_core.environments import (
    EnvironmentCalls,
    EnvironmentOptions,
    Episode,
    EpisodeError,
    Episodes,
    EpisodeSettings,
    checked_turn,
)
from rlhf_core.errors import RunError, Stopped

PROMPT, ADDED, STOP = 5, 3, 1
"""Tokens of a prompt, and of what an environment adds; the id that ends a completion."""
USER = {"role": "user", "content": "and then?"}
ENCODER: Any = SimpleNamespace(
    prompt=lambda messages, tools: np.arange(PROMPT + 4 * (len(messages) - 1), dtype=np.int32),
    observation=lambda messages, added, ended_by, tools: np.full(ADDED, 7, np.int32),
    problem=lambda tools, roles, encoded_again: "the template has no 'system'" * ("system" in roles) or None,
)
PARSER: Any = SimpleNamespace(message=lambda tokens: {"role": "assistant", "content": "a"})


class Plain:
    """Answers every completion with what `answer` returns."""

    def __init__(self, answer: Callable[[], Any] = lambda: Turn([USER], 1.0)) -> None:
        self.answer = answer

    def reset(self, row: Any, seed: int) -> Any:
        return [USER]

    def step(self, completion: Any) -> Any:
        return self.answer()


def episodes(
    make: Callable[[], Any] = Plain,
    *,
    count: int = 1,
    group: int = 1,
    length: int = 100,
    max_prompt_length: int = PROMPT,
    **options: Any,
) -> Episodes:
    calls = EnvironmentCalls(EnvironmentOptions(name="made_up", **options), make, "here")
    begun = [Episode({}, i, f"row {i}") for i in range(count)]
    settings = EpisodeSettings(calls, ENCODER, PARSER, max_prompt_length, length, 50)
    return Episodes(settings, begun, group)


def say(held: Episodes, tokens: int, *, conversation: int = 0, finished: bool = True) -> Continuation:
    ids = np.array([4] * (tokens - 1) + [STOP if finished else 4], np.int32)
    held.submit(conversation, ids, np.full(tokens, -0.5, np.float32), finished)
    (reply,) = held.replies(wait=True)
    return reply


class LateToEnd(Plain):
    """Its first episode awaits again when it is cancelled."""

    made = 0

    def __init__(self, method: str) -> None:
        super().__init__()
        LateToEnd.made += 1
        self.method, self.late = method, LateToEnd.made % 2 == 1

    async def _work(self, method: str) -> None:
        try:
            await asyncio.sleep(30 if self.late and method == self.method else 0)
        finally:
            await asyncio.sleep(30 if self.late and method == self.method else 0)

    async def reset(self, row: Any, seed: int) -> Any:
        await self._work("reset")
        return [USER]

    async def step(self, completion: Any) -> Any:
        await self._work("step")
        return Turn(reward=1.0, done=True)


@pytest.mark.parametrize("method", ["reset", "step"])
def test_a_coroutine_that_awaits_again_when_cancelled_is_left_behind(method: str) -> None:
    LateToEnd.made, began = 1, time.monotonic()  # one more is made to look at its methods
    held = episodes(lambda: LateToEnd(method), count=2, timeout=0.1)
    for conversation in range(len(held.running)):
        say(held, 2, conversation=conversation)
    held.end()
    assert time.monotonic() - began < 5
    late, other = sorted(held.episodes, key=lambda episode: episode.failure is None)
    assert f"{method} took longer than its timeout of 0.1 s" in str(late.failure)
    assert (other.failure, other.reward) == (None, 1.0)


class Exits(BaseException):
    """No Exception, as GeneratorExit and SystemExit."""


@pytest.mark.parametrize("error", [ValueError, SystemExit, GeneratorExit, asyncio.CancelledError, Exits])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_whatever_an_environment_raises_fails_its_episode(
    error: type[BaseException], asynchronous: bool
) -> None:
    def fails() -> Any:
        raise error("no such game")

    async def fails_later() -> Any:
        fails()

    def make() -> Any:
        environment: Any = Plain(fails_later if asynchronous else fails)
        environment.asynchronous = asynchronous
        if asynchronous:
            environment.reset = later
        return environment

    async def later(row: Any, seed: int) -> Any:
        return [USER]

    held = episodes(make)
    assert say(held, 2).tokens is None
    assert f"step raised {error.__name__}" in str(held.episodes[0].failure)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stopped])
def test_what_stops_the_run_is_no_failure_of_an_environment(error: type[BaseException]) -> None:
    def interrupted() -> None:
        raise error

    with pytest.raises(error):
        say(episodes(lambda: Plain(interrupted)), 2)


TURN = Turn([USER])
WRONG = {
    "np.bool_": TURN._replace(reward=np.bool_(True)),
    "bool": TURN._replace(reward=True),
    "an array of one truth": TURN._replace(reward=np.array(True)),
    "an array": TURN._replace(reward=np.array([1.0])),
    "a text": TURN._replace(reward="1"),
    "infinity": TURN._replace(reward=float("inf")),
    "beyond float32": TURN._replace(reward=3.5e38),
    "beyond float64": TURN._replace(reward=10**400),
    "a metric beyond float32": TURN._replace(metrics={"a": -3.5e38}),
    "a metric of NaN": TURN._replace(metrics={"a": np.float32("nan")}),
    "a metric of a truth": TURN._replace(metrics={"a": np.bool_(False)}),
    "no metrics": TURN._replace(metrics=None),  # type: ignore[arg-type]
    "a metric without a name": TURN._replace(metrics={1: 1.0}),  # type: ignore[dict-item]
    "done": TURN._replace(done=1),
    "a reply": TURN._replace(messages=[{"role": "assistant", "content": "b"}, USER]),
    "a tuple": ([USER], 1.0, False),
    "a message that is a tuple": TURN._replace(messages=[("user", "b")]),  # type: ignore[list-item]
    "a role that the template has not": TURN._replace(messages=[{"role": "system", "content": "b"}]),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_turn_fails_the_episode_or_ends_the_run(what: str) -> None:
    def environment() -> Any:
        return Plain(lambda: WRONG[what])

    held = episodes(environment)
    assert say(held, 2).tokens is None
    assert "step returned" in str(held.episodes[0].failure)
    with pytest.raises(RunError, match="step returned"):
        say(episodes(environment, on_error="stop"), 2)


@pytest.mark.parametrize("reward", [None, -0.0, 3.4e38, np.float16(2), np.array(2.0), Decimal("0.5"), 3])
def test_numbers_of_other_libraries_are_rewards(reward: Any) -> None:
    turn = checked_turn(TURN._replace(reward=reward, done=np.bool_(False)))
    assert turn.reward is None if reward is None else turn.reward == float(reward)
    assert turn.done is False


@pytest.mark.parametrize(
    ("messages", "said"), [([], "no messages"), ([USER, {"role": "assistant", "content": "b"}], "last")]
)
def test_reset_is_held_to_on_error_too(messages: Sequence[Any], said: str) -> None:
    def make() -> Any:
        environment: Any = Plain()
        environment.reset = lambda row, seed: messages
        return environment

    held = episodes(make)
    assert said in str(held.episodes[0].failure)
    with pytest.raises(RunError, match=said):
        episodes(make, on_error="stop")


def test_a_failure_hides_secrets_in_samples_too(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "canary-refused-17"
    monkeypatch.setenv("MY_API_KEY", secret)

    def fails() -> Any:
        raise PermissionError(f"401 for {secret}")

    for answer in (fails, lambda: TURN._replace(reward=secret)):
        held = episodes(lambda answer=answer: Plain(answer))
        say(held, 2)
        assert 10 * "*" in str(held.episodes[0].failure)
        assert secret not in str(held.episodes[0].failure)


def test_an_episode_is_finished_where_its_last_turn_was_not_cut() -> None:
    for finished in (True, False):
        held = episodes(lambda: Plain(lambda: Turn(reward=1.0, done=True)))
        assert say(held, 4, finished=finished) == Continuation(0, None)
        assert held.episodes[0].finished == held.samples().finished[0] == finished
        assert not held.episodes[0].cut

    held = episodes(lambda: Plain(lambda: Turn([USER], done=True)))
    assert say(held, 2).tokens is None
    assert [message["role"] for message in held.episodes[0].messages] == ["user", "assistant", "user"]
    assert len(held.episodes[0].tokens) == 2


@pytest.mark.parametrize(("length", "limit"), [(15, 2), (14, 1), (13, None), (12, None), (100, 50), (63, 50)])
def test_a_turn_has_the_tokens_that_are_left_and_one_at_least(length: int, limit: int | None) -> None:
    """After a turn of 10 tokens and 3 of the environment."""
    held = episodes(length=length)
    reply = say(held, 10)
    episode = held.episodes[0]
    assert (None if reply.tokens is None else reply.limit) == limit
    assert episode.cut is (limit is None)
    assert len(episode.tokens) == (10 if limit is None else 13)
    assert len(episode.messages) == (2 if limit is None else 3)


@pytest.mark.parametrize(
    ("said", "length", "limit"), [(10, 12, 2), (10, 11, 1), (10, 10, None), (2, 9, 1), (2, 8, None)]
)
def test_a_history_that_is_encoded_again_leaves_room_in_its_context_and_in_the_episode(
    said: int, length: int, limit: int | None
) -> None:
    """Its context has 8 tokens more than the prompt after a turn, however many the turn had."""
    held = episodes(length=length, history="encoded_again")
    reply = say(held, said)
    assert (None if reply.tokens is None else reply.limit) == limit
    episode = held.episodes[0]
    assert episode.cut is (limit is None)
    assert len(episode.tokens) == said
    if limit is not None:
        assert reply.replaces
        say(held, 1)
        assert [None if turn.context is None else len(turn.context) for turn in episode.turns] == [
            None,
            PROMPT + 8,
        ]


def test_an_episode_ends_with_its_last_turn_or_where_rewards_add_up_to_infinity() -> None:
    held = episodes(max_turns=2)
    assert say(held, 2).tokens is not None
    assert not held.episodes[0].cut
    assert say(held, 2).tokens is None
    assert held.episodes[0].cut
    assert [turn.message for turn in held.episodes[0].turns] == [0, 2]
    assert [(turn.start, turn.end) for turn in held.episodes[0].turns] == [(0, 2), (5, 7)]

    held = episodes(lambda: Plain(lambda: Turn([USER], 2e38)))
    assert say(held, 2).tokens is not None
    assert say(held, 2).tokens is None
    assert "add up to 4e+38" in str(held.episodes[0].failure)
    assert checked_turn(Turn([USER], -2e38), 2e38).reward == -2e38
    with pytest.raises(EpisodeError):
        checked_turn(Turn([USER], -2e38), -2e38)


@pytest.mark.parametrize(("seconds", "cut"), [(3.0, False), (3.5, True)])
def test_an_episode_ends_with_the_turn_after_max_seconds(
    seconds: float, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = episodes(max_seconds=3.0)
    held.episodes[0].began = 0.0
    monkeypatch.setattr("rlhf_core.environments.episodes.time", SimpleNamespace(monotonic=lambda: seconds))
    say(held, 2)
    assert held.episodes[0].cut is cut


@pytest.mark.parametrize(("longest", "fails"), [(PROMPT, False), (PROMPT - 1, True)])
def test_a_prompt_may_be_as_long_as_max_prompt_length(longest: int, fails: bool) -> None:
    held = episodes(max_prompt_length=longest)
    assert (held.episodes[0].failure is not None) is fails
    assert held.running == ([] if fails else [0])


def test_episodes_of_a_group_share_the_prompt_of_the_first_that_did_not_fail() -> None:
    words = iter([{"looked": "at"}, [], [USER], [USER], [{"role": "user", "content": "other"}], [USER]])

    def make() -> Any:
        environment: Any = Plain()
        said = next(words)
        environment.reset = lambda row, seed: said
        return environment

    held = episodes(make, count=5, group=3)
    assert [episode.failure is None for episode in held.episodes] == [False, True, True, True, False]
    assert held.episodes[2].prompt is held.episodes[1].prompt
    assert "different messages from the first" in str(held.episodes[4].failure)


def test_metrics_are_means_over_the_turns_that_have_them_and_then_over_episodes() -> None:
    turns = iter(
        [
            Turn([USER], 1.0, metrics={"a": 1.0}),
            Turn([USER], metrics={"a": 3.0, "b": 5.0}),
            Turn(done=True),
            Turn(done=True, metrics={"a": 8.0}),
        ]
    )
    held = episodes(lambda: Plain(lambda: next(turns)), count=2)
    for _ in range(3):
        say(held, 2)
    say(held, 2, conversation=1)
    measured = held.measure()
    assert (measured["episodes/a"], measured["episodes/b"]) == (5.0, 5.0)
    assert measured["episodes/turns"] == 2.0
    assert measured["episodes/observation_tokens"] == 3.0
    assert [episode.reward for episode in held.episodes][:1] == [1.0]
    assert np.isnan(held.episodes[1].reward)


def test_a_failed_episode_has_no_trained_token_and_counts_in_no_mean() -> None:
    answers = iter([Turn([USER], 1.0, metrics={"a": 1.0}), "no turn", Turn(done=True, metrics={"a": 7.0})])
    held = episodes(lambda: Plain(lambda: next(answers)), count=2)
    say(held, 2)
    say(held, 2)
    say(held, 3, conversation=1)
    held.end()
    samples = held.samples()
    assert samples.mask.sum(1).tolist() == [0, 3]
    assert samples.lengths.tolist() == [7, 3]
    measured = held.measure()
    assert (measured["episodes/failed"], measured["episodes/a"], measured["episodes/turns"]) == (
        1.0,
        7.0,
        1.0,
    )
    assert measured["episodes/cut_ratio"] == 0

    answers = iter(["no turn", Turn([USER])])
    held = episodes(lambda: Plain(lambda: next(answers)), count=2, max_turns=1)
    say(held, 2)
    say(held, 2, conversation=1)
    assert held.measure()["episodes/cut_ratio"] == 1.0


def test_an_episode_that_never_began_has_a_length_of_one() -> None:
    held = episodes(max_prompt_length=PROMPT - 1)
    samples = held.samples()
    assert samples.lengths.tolist() == [1]
    assert not samples.mask.any()
