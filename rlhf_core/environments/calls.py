"""Call an environment's methods: at once, on the event loop, or in worker processes."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.contracts import Turn
from rlhf_core.data.conversations import message_problem
from rlhf_core.environments.worker_call import call_environment
from rlhf_core.errors import InputError, error_line
from rlhf_core.tokenizer.content_parts import with_joined_parts
from rlhf_core.workers import DiedError, Pool, RaisedError, TooSlowError, UnsendableError, start_async
from rlhf_core.workers.pickling import dumps

if TYPE_CHECKING:
    from rlhf_core.contracts import Environment
    from rlhf_core.environments.options import EnvironmentOptions

HERE = str(Path(__file__).parent.parent)
METHODS = ("reset", "step")
OWN_METRICS = ("turns", "failed", "cut_ratio", "observation_tokens")
"""Metrics that `Episodes.measure` computes, as episodes/NAME."""


class EpisodeError(Exception):
    """An episode cannot go on. The text says which call failed, and how."""


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
            return start_async(self._awaited(environment, method, arguments))
        return getattr(environment, method)(*arguments)

    async def _awaited(self, environment: Any, method: str, arguments: Sequence[Any]) -> tuple[Any, Any]:
        try:
            async with asyncio.timeout(self.options.timeout) as limit:
                value = getattr(environment, method)(*arguments)
                while inspect.isawaitable(value):
                    value = await value
        except TimeoutError as error:
            if not limit.expired():  # the method's own
                raise
            raise TooSlowError from error
        return environment, value

    def explain(self, method: str, error: BaseException) -> str:
        """Describe a call that raised."""
        if isinstance(error, TooSlowError):
            how = f"took longer than its timeout of {self.options.timeout:g} s"
        elif isinstance(error, DiedError):
            how = f"could not be called: {error}"
        elif isinstance(error, RaisedError | EpisodeError):
            how = str(error)
        else:
            how = error_line(error, HERE)
        return f"environment '{self.name}': {method} {how}"


def checked_messages(value: Any, method: str) -> list[dict[str, Any]]:
    """Return an environment's messages as plain dictionaries. Raises EpisodeError where they are not messages."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise EpisodeError(
            f'returned {type(value).__name__}, not a list of messages such as [{{"role": "user", "content": "…"}}]'
        )
    if value and (problem := message_problem(value)):
        raise EpisodeError(f"returned messages of which the list {problem}")
    messages = [dict(with_joined_parts(message)) for message in value]
    if method == "reset" and not messages:
        raise EpisodeError("returned no messages; an episode begins with at least one")
    if messages and messages[-1]["role"] == "assistant":
        raise EpisodeError("returned an assistant's message last; the last one is to be replied to")
    try:
        json.dumps(messages)
    except (TypeError, ValueError) as error:
        raise EpisodeError(f"returned messages with a value that JSON cannot hold: {error}") from error
    return messages


def checked_turn(value: Any) -> Turn:
    """Return what `step` returned. Raises EpisodeError for anything but a `Turn` of finite numbers."""
    if not isinstance(value, Turn):
        raise EpisodeError(
            f"returned {type(value).__name__}; it returns rlhf_core.Turn(messages=[…], reward=…, done=…)"
        )
    numbers = {"reward": value.reward, **{f"metrics['{name}']": x for name, x in dict(value.metrics).items()}}
    if taken := [name for name in OWN_METRICS if name in value.metrics]:
        raise EpisodeError(
            f"returned metrics['{taken[0]}'], but episodes/{taken[0]} is measured for every environment; give "
            "another name"
        )
    for name, number in numbers.items():
        if number is None and name == "reward":
            continue
        # NumPy's and JAX's scalars are numbers, too; a truth value is one by mistake.
        text = isinstance(number, str | bytes | bool)
        try:
            finite = not text and abs(float(number)) < float("inf")  # type: ignore[arg-type]  # float() is tried
        except (TypeError, ValueError):
            finite = False
        if not finite:
            raise EpisodeError(f"returned {name}={number!r}; a finite number is expected")
    if not isinstance(value.done, bool) and str(getattr(value.done, "dtype", "")) != "bool":
        raise EpisodeError(f"returned done={value.done!r}; True or False is expected")
    messages = checked_messages(value.messages, "step")
    if not messages and not value.done:
        raise EpisodeError("returned no messages and done=False: there is nothing to reply to")
    reward = None if value.reward is None else float(value.reward)
    return Turn(messages, reward, bool(value.done), {name: float(x) for name, x in value.metrics.items()})


def outcome(call: Any) -> Any:
    """Return the value of a call, or the exception that it raised, as a value."""
    try:
        return call.result() if isinstance(call, Future) else call
    except (
        Exception,
        SystemExit,
    ) as error:  # code that calls exit() fails, as it would in a process of its own
        return error


def plain_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each metric over the turns that have it."""
    names = dict.fromkeys(name for each in metrics for name in each)
    return {
        name: sum(each[name] for each in metrics if name in each) / sum(name in each for each in metrics)
        for name in names
    }
