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
from rlhf_core.environments import EnvironmentCalls, EnvironmentOptions, Episode, Episodes
from rlhf_core.environments.calls import EpisodeError, attempt, checked_turn
from rlhf_core.errors import RunError, Stopped
from rlhf_core.hidden import HIDDEN, remember

PROMPT, ADDED, STOP = 5, 3, 1
"""Tokens of a prompt, and of what an environment adds; the id that ends a completion."""
USER = {"role": "user", "content": "and then?"}
ENCODER: Any = SimpleNamespace(
    prompt=lambda messages, tools: np.arange(PROMPT + 4 * (len(messages) - 1), dtype=np.int32),
    observation=lambda messages, added, ended_by, tools: np.full(ADDED, 7, np.int32),
    problem=lambda tools, roles, encoded_again: "the template has no 'system'" * ("system" in roles) or None,
)
PARSER: Any = SimpleNamespace(text=lambda tokens: {"role": "assistant", "content": "a"})


class Plain:
    """Answers every completion with what `answer` returns."""

    def __init__(self, answer: Callable[[], Any] = lambda: Turn([USER], 1.0)) -> None:
        self.answer = answer

    def reset(self, row: Any, seed: int) -> Any:
        return [USER]

    def step(self, completion: Any) -> Any:
        return self.answer()


def episodes(
    make: Callable[[], Any] = Plain, *, count: int = 1, length: int = 100, **options: Any
) -> Episodes:
    calls = EnvironmentCalls(EnvironmentOptions(name="made_up", **options), make, "here")
    begun = [Episode({}, i, f"row {i}") for i in range(count)]
    limits = {"max_prompt_length": PROMPT, "length": length, "turn_length": 50}
    return Episodes(calls, ENCODER, PARSER, begun, group=1, **limits)


def say(held: Episodes, tokens: int, *, conversation: int = 0, finished: bool = True) -> Continuation:
    ids = np.array([4] * (tokens - 1) + [STOP if finished else 4], np.int32)
    held.submit(conversation, ids, np.full(tokens, -0.5, np.float32), finished)
    (reply,) = held.replies(wait=True)
    return reply


class LateToEnd(Plain):
    """Its second episode awaits again when it is cancelled."""

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


class Blocks(LateToEnd):
    async def _work(self, method: str) -> None:
        if self.late and method == self.method:
            time.sleep(1.5)  # on purpose


def test_a_coroutine_that_blocks_the_loop_costs_its_own_episode() -> None:
    """Calls that have not begun run on another loop."""
    LateToEnd.made, began = 0, time.monotonic()
    held = episodes(lambda: Blocks("reset"), count=2, timeout=0.1)
    assert time.monotonic() - began < 1.4
    assert sorted(episode.failure is None for episode in held.episodes) == [False, True]


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
        attempt(interrupted)


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


def test_rewards_of_turns_that_add_up_to_infinity_fail_the_episode() -> None:
    held = episodes(lambda: Plain(lambda: Turn([USER], 2e38)))
    assert say(held, 2).tokens is not None
    assert say(held, 2).tokens is None
    assert "add up to 4e+38" in str(held.episodes[0].failure)
    assert checked_turn(Turn([USER], -2e38), 2e38).reward == -2e38
    with pytest.raises(EpisodeError):
        checked_turn(Turn([USER], -2e38), -2e38)


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


def test_a_failure_hides_secrets_in_samples_too() -> None:
    secret = remember("canary-refused-17")

    def fails() -> Any:
        raise PermissionError(f"401 for {secret}")

    for answer in (fails, lambda: TURN._replace(reward=secret)):
        held = episodes(lambda answer=answer: Plain(answer))
        say(held, 2)
        assert HIDDEN in str(held.episodes[0].failure)
        assert secret not in str(held.episodes[0].failure)
