"""Call an environment's methods: directly, on the event loop, or in worker processes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.contracts import LARGEST_REWARD, Turn
from rlhf_core.data.columns import message_problem
from rlhf_core.environments.worker_call import call_environment
from rlhf_core.errors import InputError, Stopped
from rlhf_core.hidden import scrub
from rlhf_core.tokenizer.options import with_joined_parts
from rlhf_core.workers import (
    Pool,
    UnsendableError,
    awaited,
    describe_failure,
    outcome_of,
    start_async,
)
from rlhf_core.workers.pickling import dumps

if TYPE_CHECKING:
    from rlhf_core.contracts import Environment
    from rlhf_core.environments.options import EnvironmentOptions

METHODS = ("reset", "step")
OWN_METRICS = ("turns", "failed", "cut_ratio", "observation_tokens")
"""Metrics that `Episodes.measure` computes, as episodes/NAME."""


class EpisodeError(Exception):
    """An episode cannot continue. The text says which call failed, and how."""


class EnvironmentCalls:
    """Makes a stage's environments and calls them.

    quick: whether a call returns its value, instead of a future: methods that are neither async nor limited in time.
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
                    f"{where}.{why}: calls then run in another process, to which the environment is sent: "
                    f"{error}; make its methods async, keep what it holds picklable, or leave out `{why}`"
                ) from error

    def call(self, environment: Any, method: str, *arguments: Any) -> Any:
        """Call a method: its value if `quick`, else a future of (the environment afterwards, the value)."""
        if self.in_workers:
            if self._pool is None or self._pool.closed:
                self._pool = Pool(call_environment, self.options.processes or 1)
            state = environment if isinstance(environment, bytes) else dumps(environment)
            return self._pool.submit(state, method, arguments, seconds=self.options.timeout)
        if self.asynchronous:
            return start_async(_awaited(environment, method, arguments), self.options.timeout)
        return getattr(environment, method)(*arguments)

    def wait_for(self, environment: Any, method: str, *arguments: Any) -> tuple[Any, Any]:
        """Call a method and wait for it: (the environment afterwards, the value).

        Raises EpisodeError for what the method raises, and InputError as it raises that.
        """
        call = attempt(partial(self.call, environment, method, *arguments))
        result = outcome_of(call) if isinstance(call, Future) else call
        if isinstance(result, InputError):
            raise result
        if isinstance(result, BaseException):
            raise EpisodeError(self._how(result)) from result
        return (environment, result) if self.quick else result

    def explain(self, method: str, error: BaseException) -> str:
        """Describe a call that raised."""
        return scrub(f"environment '{self.name}': {method} {self._how(error)}")

    def _how(self, error: BaseException) -> str:
        if isinstance(error, EpisodeError):
            return str(error)
        return describe_failure(error, self.options.timeout)


async def _awaited(environment: Any, method: str, arguments: Sequence[Any]) -> tuple[Any, Any]:
    return environment, await awaited(getattr(environment, method)(*arguments))


def attempt(call: Callable[[], Any]) -> Any:
    """Make a call; return its value or, as a value, what it raised, such as exit()."""
    try:
        return call()
    except (KeyboardInterrupt, Stopped):  # the run's
        raise
    except BaseException as error:
        return error


def checked_messages(value: Any, method: str) -> list[dict[str, Any]]:
    """Return an environment's messages as plain dictionaries. Raises EpisodeError where they are not messages."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise EpisodeError(
            f'returned {type(value).__name__}, not a list of messages such as [{{"role": "user", "content": "…"}}]'
        )
    if value and (problem := message_problem(value)):
        raise EpisodeError(f"returned a list of messages that {problem}")
    messages = [dict(with_joined_parts(message)) for message in value]
    if method == "reset" and not messages:
        raise EpisodeError("returned no messages; an episode begins with at least one")
    if messages and messages[-1]["role"] == "assistant":
        raise EpisodeError("returned an assistant's message last; the last one is to be replied to")
    if method == "step" and any(message["role"] == "assistant" for message in messages):
        raise EpisodeError("returned an assistant's message; after `reset` only the policy writes these")
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
    if not isinstance(value.metrics, Mapping) or not all(isinstance(name, str) for name in value.metrics):
        raise EpisodeError(
            f"returned metrics={_shown(value.metrics)}; a dict of names and numbers is expected"
        )
    if taken := [name for name in OWN_METRICS if name in value.metrics]:
        raise EpisodeError(
            f"returned metrics['{taken[0]}'], but episodes/{taken[0]} is measured for every environment; give "
            "another name"
        )
    reward = None if value.reward is None else _number("reward", value.reward)
    if reward is not None and abs(earlier + reward) > LARGEST_REWARD:
        raise EpisodeError(
            f"returned reward={reward:g}, with which the episode's rewards add up to {earlier + reward:g}; "
            f"float32 holds numbers up to {LARGEST_REWARD:.3g}"
        )
    metrics = {scrub(name): _number(f"metrics['{name}']", number) for name, number in value.metrics.items()}
    if not isinstance(value.done, bool) and not _is_truth(value.done):
        raise EpisodeError(f"returned done={_shown(value.done)}; True or False is expected")
    messages = checked_messages(value.messages, "step")
    if not messages and not value.done:
        raise EpisodeError("returned no messages and done=False: there is nothing to reply to")
    return Turn(messages, reward, bool(value.done), metrics)


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
        raise EpisodeError(f"returned {name}={_shown(value)}; a finite number is expected{beyond}")
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
