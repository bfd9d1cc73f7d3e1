"""The environment of a stage: its options, calls of its methods, and what these may return."""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from rlhf_core.config import Component
from rlhf_core.config.durations import Seconds
from rlhf_core.contracts import LARGEST_REWARD, Turn
from rlhf_core.data.columns import message_problem
from rlhf_core.errors import InputError
from rlhf_core.hidden import scrub
from rlhf_core.tokenizer.options import with_joined_parts
from rlhf_core.workers.event_loop import awaited, call_now, outcome_of, run_async, start_async
from rlhf_core.workers.pickling import UnsendableError, dumps
from rlhf_core.workers.pool import Pool, describe_failure

if TYPE_CHECKING:
    from rlhf_core.contracts import Environment
    from rlhf_core.environments.conversation import ConversationEncoder

METHODS = ("reset", "step")
OWN_METRICS = ("turns", "failed", "cut_ratio", "observation_tokens")
"""Metrics that `Episodes.measure` computes, as episodes/NAME."""


ANSWER_TOKENS = 64
"""What an episode has room for at least after each turn, unless `max_tokens` says otherwise."""
SECONDS = 60.0
"""How long a call may take that has no `timeout`."""
MADE_UP = {"role": "assistant", "content": "The answer is 4."}


class EnvironmentOptions(Component):
    """Name an environment in a config: `environment: Annotated[EnvironmentOptions, ENVIRONMENT] | None`."""

    name: str = Field(
        default="tools", description="the environment; `tools`: functions that the policy may call"
    )
    max_turns: int = Field(default=8, ge=1, description="completions per episode")
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens per episode after its first prompt, the environment's included; none: max_turns × "
        "(sampling.max_completion_length + the same again, 64 or more, for an answer)",
    )
    max_seconds: float | None = Field(
        default=None,
        gt=0,
        description="wall time per episode, in seconds; the current turn is its last; none: no limit",
    )
    timeout: Seconds | None = Field(
        default=None, gt=0, description="seconds per call of `reset` or `step`; none: no limit"
    )
    processes: int | None = Field(
        default=None, ge=1, description="worker processes shared by the calls; none: run in this process"
    )
    on_error: Literal["skip", "stop"] = Field(
        default="skip",
        description="what to do when an episode fails or takes too long: drop and report it, or end the run",
    )
    weight: float = Field(default=1.0, description="weight of the episode's reward in the sum of rewards")
    history: Literal["kept", "encoded_again"] = Field(
        default="kept",
        description="what a turn continues: the tokens so far, or the conversation encoded again by the chat "
        "template, for templates that rewrite earlier turns; every turn is then a separate training row",
    )
    check: bool = Field(
        default=True, description="whether `rlhf check` begins an episode and takes one made-up turn"
    )

    def length(self, max_completion_length: int) -> int:
        """Return the most tokens of an episode after its first prompt."""
        answers = max(max_completion_length, ANSWER_TOKENS)
        return self.max_tokens or self.max_turns * (max_completion_length + answers)


class EpisodeError(Exception):
    """An episode cannot continue. The text says which call failed, and how."""


class EnvironmentCalls:
    """Makes a stage's environments and calls them.

    quick: whether a call is done when it returns: of methods that are neither async nor limited in time.
    Raises InputError for an object without `reset` or `step`, and for one that a worker process cannot import.
    """

    def __init__(self, options: EnvironmentOptions, make: Callable[[], Environment], where: str) -> None:
        self.options, self.make, self.where = options, make, where
        self.name = Path(options.name).name
        first = make()
        missing = [method for method in METHODS if not callable(getattr(first, method, None))]
        if missing:
            raise InputError(
                f"{where}.name: '{self.name}' makes {type(first).__name__}, which has no "
                f"{' and no '.join(missing)}; an environment has reset(row, seed) -> [message] and "
                "step(completion) -> Turn"
            )
        coroutines = any(inspect.iscoroutinefunction(getattr(first, method)) for method in METHODS)
        self.asynchronous = coroutines or bool(getattr(first, "asynchronous", False))
        self.deterministic = bool(getattr(first, "deterministic", True))
        limited = options.timeout is not None or options.processes is not None
        self.in_workers = limited and not self.asynchronous
        self.quick = not (self.asynchronous or self.in_workers)
        self.tools: list[Any] = list(getattr(first, "tools", None) or [])
        self._pool: Pool | None = None
        if self.in_workers:
            try:
                dumps(first)
            except UnsendableError as error:
                why = "timeout" if options.processes is None else "processes"
                raise InputError(
                    f"{where}.{why}: calls would run in another process, to which the environment is sent: "
                    f"{error}; make its methods async, keep what it holds picklable, or leave out `{why}`"
                ) from error

    def call(self, environment: Any, method: str, *arguments: Any) -> Future[tuple[Any, Any]]:
        """Call a method: a future of (the environment afterwards, the value), which is done already if `quick`."""
        return call_now(self._call, environment, method, arguments)

    def _call(self, environment: Any, method: str, arguments: Sequence[Any]) -> Any:
        if self.in_workers:
            if self._pool is None or self._pool.closed:
                self._pool = Pool(call_environment, self.options.processes or 1)
            state = environment if isinstance(environment, bytes) else dumps(environment)
            return self._pool.submit(state, method, arguments, seconds=self.options.timeout)
        if self.asynchronous:
            return start_async(_awaited(environment, method, arguments), self.options.timeout)
        return environment, getattr(environment, method)(*arguments)

    def wait_for(self, environment: Any, method: str, *arguments: Any) -> tuple[Any, Any]:
        """Call a method and wait for it: (the environment afterwards, the value).

        Raises EpisodeError for what the method raises, and InputError as it raises that.
        """
        result = outcome_of(self.call(environment, method, *arguments))
        if isinstance(result, InputError):
            raise result
        if isinstance(result, BaseException):
            raise EpisodeError(self._how(result)) from result
        return result

    def explain(self, method: str, error: BaseException) -> str:
        """Describe a call that raised."""
        return scrub(f"environment '{self.name}': {method} {self._how(error)}")

    def _how(self, error: BaseException) -> str:
        if isinstance(error, EpisodeError):
            return str(error)
        return describe_failure(error, self.options.timeout)


def call_environment(state: bytes, method: str, arguments: tuple[Any, ...]) -> tuple[bytes, Any]:
    """Call `method` of a pickled environment: (its state afterwards, what the method returned)."""
    environment = pickle.loads(state)
    value = getattr(environment, method)(*arguments)
    if inspect.isawaitable(value):
        value = run_async(awaited(value))  # on the loop of the calls before
    return dumps(environment), value


async def _awaited(environment: Any, method: str, arguments: Sequence[Any]) -> tuple[Any, Any]:
    return environment, await awaited(getattr(environment, method)(*arguments))


def checked_messages(value: Any, method: str) -> list[dict[str, Any]]:
    """Return an environment's messages as plain dictionaries. Raises EpisodeError where they are not messages."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise EpisodeError(
            f'returned {type(value).__name__}, not a list of messages such as [{{"role": "user", "content": "…"}}]'
        )
    problem = message_problem(value) if value else None
    if problem:
        raise EpisodeError(f"returned a list of messages that {problem}")
    messages = [dict(with_joined_parts(message)) for message in value]
    if method == "reset" and not messages:
        raise EpisodeError("returned no messages; an episode begins with at least one")
    if messages and messages[-1]["role"] == "assistant":
        raise EpisodeError("returned an assistant's message last; the last message must be one to reply to")
    if method == "step" and any(message["role"] == "assistant" for message in messages):
        raise EpisodeError("returned an assistant's message; after `reset`, only the policy writes them")
    try:
        json.dumps(messages)
    except (TypeError, ValueError, RecursionError) as error:
        raise EpisodeError(f"returned messages with a value that JSON cannot hold: {error}") from error
    return messages


def checked_turn(value: Any, earlier: float = 0.0) -> Turn:
    """Return what `step` returned, in Python's types. Raises EpisodeError for anything but a `Turn` of finite numbers.

    earlier: the sum of the rewards of the episode's earlier turns.
    """
    if not isinstance(value, Turn):
        raise EpisodeError(
            f"returned {type(value).__name__}; it returns rlhf_core.Turn(messages=[…], reward=…, done=…)"
        )
    _require_names(value.metrics)
    reward = None if value.reward is None else _number("reward", value.reward)
    if reward is not None and abs(earlier + reward) > LARGEST_REWARD:
        raise EpisodeError(
            f"returned reward={reward:g}, with which the episode's rewards add up to {earlier + reward:g}; "
            f"float32 holds numbers up to {LARGEST_REWARD:.3g}"
        )
    metrics = {scrub(name): _number(f"metrics['{name}']", number) for name, number in value.metrics.items()}
    if not isinstance(value.done, bool) and not _is_truth(value.done):
        raise EpisodeError(f"returned done={_shown(value.done)}; expected True or False")
    messages = checked_messages(value.messages, "step")
    if not messages and not value.done:
        raise EpisodeError("returned no messages and done=False: there is nothing to reply to")
    return Turn(messages, reward, bool(value.done), metrics)


def _require_names(metrics: Any) -> None:
    """Raise EpisodeError for metrics that are no dict, and for a name that every environment's metrics have."""
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise EpisodeError(f"returned metrics={_shown(metrics)}; expected a dict of names and numbers")
    taken = [name for name in OWN_METRICS if name in metrics]
    if taken:
        raise EpisodeError(
            f"returned metrics['{taken[0]}'], but episodes/{taken[0]} is reported for every environment; "
            "choose another name"
        )


def _number(name: str, value: Any) -> float:
    """Return a number that an environment gave, of Python, NumPy or JAX; a truth value is one by mistake."""
    try:
        if isinstance(value, str | bytes | bytearray | bool) or _is_truth(value) or np.ndim(value):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = np.nan
    if not abs(number) <= LARGEST_REWARD:
        beyond = f", at most {LARGEST_REWARD:.3g} as in float32" if np.isfinite(number) else ""
        raise EpisodeError(f"returned {name}={_shown(value)}; expected a finite number{beyond}")
    return number


def _shown(value: Any) -> str:
    return scrub(repr(value))[:80]


def _is_truth(value: Any) -> bool:
    return np.ndim(value) == 0 and str(getattr(value, "dtype", "")).endswith("bool")


def plain_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each metric over the turns that have it."""
    names = dict.fromkeys(name for each in metrics for name in each)
    return {
        name: sum(each[name] for each in metrics if name in each) / sum(name in each for each in metrics)
        for name in names
    }


def try_episode(
    calls: EnvironmentCalls,
    encoder: ConversationEncoder,
    row: Mapping[str, Any],
    place: str,
    max_prompt_length: int,
) -> str:
    """Begin an episode with a row and answer its prompt with a made-up completion; return a line about it.

    Calls are made in a separate process where the environment can be pickled.
    Raises InputError for what the methods raise, or return that is no messages and no turn.
    """
    try:
        limited = calls.options.replace(timeout=calls.options.timeout or SECONDS)
        probe = EnvironmentCalls(limited, calls.make, calls.where)
    except InputError:  # it cannot be sent to another process
        probe = calls
    method, answered = "reset", ""
    try:
        environment, value = probe.wait_for(probe.make(), "reset", dict(row), 0)
        messages = checked_messages(value, "reset")
        prompt = encoder.prompt(messages, tools=calls.tools)
        if len(prompt) > max_prompt_length:
            raise InputError(
                f"{place}: reset returned a prompt of {len(prompt):,} tokens, more than "
                f"max_prompt_length={max_prompt_length:,}; raise it"
            )
        method = "step"
        _, value = probe.wait_for(environment, "step", dict(MADE_UP))
        turn = checked_turn(value)
        if not turn.done:
            reply = [*messages, MADE_UP]
            added = [dict(message) for message in turn.messages]
            answer = encoder.observation(reply, added, ended_by=None, tools=calls.tools)
            answered = f"; the answer to a made-up completion has {len(answer):,}"
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{place}: {probe.explain(method, error)}") from error
    return f"{place} begins with {len(prompt):,} tokens{answered}"
