"""Check environments."""

from __future__ import annotations

import copy
import inspect
import os
import random
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from rlhf_core import plugins
from rlhf_core.contracts import ENVIRONMENT, Turn
from rlhf_core.environments import (
    EnvironmentCalls,
    EnvironmentOptions,
    EpisodeError,
    call_environment,
    checked_messages,
    checked_turn,
)
from rlhf_core.errors import InputError, RunError, error_line
from rlhf_core.plugins.component import make_entry
from rlhf_core.workers.pickling import UnsendableError, dumps
from rlhf_core.workers.pool import CORE, DiedError, Pool, RaisedError
from rlhf_testing.findings import KITS, Broken, Findings

Message = Mapping[str, Any]
SENTENCES = ("The answer is 4.", "50", "I guess 25, or is it 75?", "yes", "No idea.")
ODD: Mapping[str, Message] = {
    "an empty text": {"content": ""},
    "white space": {"content": " \n"},
    "a very long text": {"content": "a b " * 25_000},
    "unusual characters": {"content": "é 漢 🙂 \u200b {[(<\\ 1e999 -0 ½ <|im_end|>"},
    "a malformed call": {
        "content": '<tool_call>{"name": "add", "argum',
        "call_errors": ["the call is not JSON: it ends within a text"],
    },
}
"""Completions that policies write sooner or later, as the parser of calls gives them."""
MADE_UP = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}
"""Arguments by their type in a JSON schema."""
YEAR = 365.25 * 86_400
FAR_ZONE = "KIT-24:17:31"
"""A time zone in which it is never the same date as in a real one."""


def check_environment(
    environment: Any,
    rows: Sequence[Mapping[str, Any]],
    *,
    completions: Sequence[str | Message] | None = None,
    max_turns: int = 32,
    timeout: float | None = None,
    **options: Any,
) -> None:
    """Raise AssertionError that lists every property that `environment` breaks.

    environment: a class, a function that makes one, or a name as in a stage, such as "rooms.py:Rooms".
    rows: rows of data that episodes begin with; at least one, preferably two that differ.
    completions: what the policy says, turn after turn, repeated from the start after the last: texts, or messages
        with `tool_calls`. Default: a call of each tool with made-up arguments, then sentences and numbers.
    max_turns: turns after which an episode must be over. timeout: seconds, as in a stage: warns where the environment
        is not async and cannot be sent to the worker process that the limit needs. options: the environment's own.

    component: it can be registered; makes a new object for each episode, with `reset` and `step`; `tools` are schemas.
    reset: it returns messages, the last of them one to reply to.
    step: it returns a `Turn` of messages and finite numbers, and messages unless the episode is over.
    end: every episode ends.
    inputs: neither the row nor a completion is changed.
    apart: episodes share no state, one after the other or held in turns.
    repeatable: the same row, seed and completions give the same again, with other global random numbers, another clock,
        and in another process where it can be sent to one; of an environment with `deterministic = False`, only what
        `reset` returns within one group.
    odd completions: empty, very long and unusual texts, and calls with mistakes, have an answer, too.
    """
    __tracebackhide__ = True
    findings = Findings("environment", environment)
    with findings.property("component"):
        calls = _open(environment, options, timeout)
        lines = _lines(completions, calls.tools)
        if not rows:
            raise ValueError("check_environment needs at least one row")
    findings.stop_if_broken()
    held: list[_Episode] = []
    for number in range(len(rows)):
        with _moment(0):
            with findings.property("reset"):
                held.append(_Episode(calls, rows, number))
            findings.stop_if_broken()
            with findings.property("step"):
                held[-1].play(lines, max_turns)
            findings.stop_if_broken()
    with findings.property("end"):
        for number, episode in enumerate(held):
            if not episode.over:
                raise Broken(
                    f"the episode of row {number} is not over after {max_turns} turns; return Turn(done=True) in the "
                    "end, or give the kit `completions` that end an episode",
                    **episode.shown,
                )
    with findings.property("inputs"):
        for episode in held:
            if episode.changed:
                changed = " and ".join(dict.fromkeys(episode.changed))
                raise Broken(f"{changed} it was given; copy what you change", **episode.shown)
    if timeout is not None:
        _warn_unsendable(calls, held[0])
    _check_repetition(findings, calls, rows, held, lines)
    with findings.property("odd completions"):
        _answer_odd_completions(calls, rows)
    findings.end()


def _open(environment: Any, options: Mapping[str, Any], timeout: float | None) -> EnvironmentCalls:
    """Make the calls of an environment, in this process. Raises Broken for one that a stage would refuse."""
    made: Callable[[], Any]
    try:
        if isinstance(environment, str):
            registry = plugins.load().registry
            name = environment
            made = partial(registry.get, ENVIRONMENT, name, **options)
        elif inspect.isclass(environment) or inspect.isroutine(environment):
            name = environment.__name__
            entry = make_entry(ENVIRONMENT, name, environment, "its author")
            made = partial(entry.make, options)
        else:
            raise Broken(
                f"it is an object of {type(environment).__name__}; give the class, or a function that makes an "
                "object, since each episode has one of its own"
            )
        calls = EnvironmentCalls(EnvironmentOptions(name=name), made, "environment")
    except InputError as error:
        raise Broken("; ".join(error.problems)) from error
    if calls.make() is calls.make():
        raise Broken("it gives the same object twice; make a new one for each episode")
    for tool in calls.tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Broken(
                f"`tools` has {tool!r:.80}; a tool is a JSON schema, "
                '{"type": "function", "function": {"name": …, "description": …, "parameters": …}}'
            )
    return calls


def _lines(completions: Sequence[str | Message] | None, tools: Sequence[Any]) -> list[Message]:
    """Return what the policy says, as messages."""
    if isinstance(completions, str):
        raise ValueError(
            f"completions is the text {completions!r}; give a list of texts or messages, one per turn"
        )
    if completions is not None:
        said = [{"content": each} if isinstance(each, str) else dict(each) for each in completions]
    else:
        said = [{"content": "", "tool_calls": [_made_up_call(tool["function"])]} for tool in tools]
        said += [{"content": sentence} for sentence in SENTENCES]
    if not said:
        raise ValueError("check_environment needs at least one completion")
    return [{"role": "assistant", **message} for message in said]


def _made_up_call(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters") or {}
    arguments = {
        name: schema["enum"][0] if schema.get("enum") else MADE_UP.get(str(schema.get("type")), "a")
        for name, schema in dict(parameters.get("properties") or {}).items()
    }
    return _call(function["name"], arguments)


def _call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}


class _Episode:
    """One episode, begun with a row: its first messages, its turns, and what it changed of what it was given."""

    def __init__(self, calls: EnvironmentCalls, rows: Sequence[Mapping[str, Any]], number: int) -> None:
        self.calls, self.environment = calls, calls.make()
        self.turns: list[Turn] = []
        self.changed: list[str] = []
        self.over = False
        self.row = dict(rows[number])
        self.shown: dict[str, Any] = {"row": self.row, "seed": number, "completions": []}
        self.given = copy.deepcopy(self.row)
        messages = self._call("reset", f"row {number}", self.given, number)
        try:
            self.first = checked_messages(messages, "reset")
        except EpisodeError as error:
            raise Broken(f"for row {number} it {error}", **self.shown) from error

    def step(self, completion: Message) -> Turn:
        """Give the environment a completion. Raises Broken for what it raises, or returns that is no turn."""
        place = f"turn {len(self.turns) + 1}"
        message = copy.deepcopy(dict(completion))
        self.shown["completions"].append(completion)
        value = self._call("step", place, message)
        if message != completion:
            self.changed.append("step changes the completion")
        try:
            turn = checked_turn(value)
        except EpisodeError as error:
            raise Broken(f"in {place} it {error}", **self.shown) from error
        self.turns.append(turn)
        self.over = turn.done
        return turn

    def play(self, lines: Sequence[Message], most: int) -> _Episode:
        """Take turns until the episode is over, at most `most`."""
        while not self.over and len(self.turns) < most:
            self.step(lines[len(self.turns) % len(lines)])
        return self

    def _call(self, method: str, place: str, *arguments: Any) -> Any:
        try:
            value = self.calls.wait_for(self.environment, method, *arguments)[1]
        except (EpisodeError, InputError) as error:
            what = str(error) if isinstance(error, EpisodeError) else error_line(error, KITS, CORE)
            raise Broken(f"in {place} it {what}", **self.shown) from error
        if self.given != self.row and not self.changed:
            self.changed.append(f"{method} changes the row")
        return value


def _check_repetition(
    findings: Findings,
    calls: EnvironmentCalls,
    rows: Sequence[Mapping[str, Any]],
    held: Sequence[_Episode],
    lines: Sequence[Message],
) -> None:
    """Check `apart` and `repeatable`: hold the episodes again, in turns with others, and at another moment."""

    def again(number: int) -> _Episode:
        most = len(held[number].turns) if calls.deterministic else 0
        return _Episode(calls, rows, number).play(lines, most)

    findings.tried += ["apart", "repeatable"]
    shared = _shared_values(held[0].environment)
    for number, before in enumerate(held):
        with _moment(0):
            after = again(number)
        difference = _difference(before, after, calls.deterministic)
        if not difference:
            continue
        changed = _changed_names(shared, _shared_values(held[0].environment))
        if changed:
            with findings.property("apart"):
                raise Broken(
                    f"an earlier episode affects the next one: {difference}; {' and '.join(changed)}, "
                    "changed meanwhile: keep what belongs to an episode in `self`, set by __init__ or reset",
                    **after.shown,
                )
        else:
            with findings.property("repeatable"):
                raise Broken(_unrepeatable(number, difference, calls.deterministic), **after.shown)
        return
    if not calls.deterministic:
        return
    with findings.property("repeatable"):
        for number, before in enumerate(held):
            with _moment(1):
                after = again(number)
            difference = _difference(before, after, True)
            if difference:
                raise Broken(_unrepeatable(number, difference, True), **after.shown)
        if not calls.asynchronous:
            _require_same_elsewhere(calls, rows, held, lines)
    if "repeatable" in findings.failures:
        return
    with findings.property("apart"), _moment(0):
        _require_same_in_turns(calls, rows, held[0], lines, shared)


def _require_same_in_turns(
    calls: EnvironmentCalls,
    rows: Sequence[Mapping[str, Any]],
    alone: _Episode,
    lines: Sequence[Message],
    shared: Mapping[str, str],
) -> None:
    """Raise Broken where the first row's episode goes otherwise than alone while another one is held in turns with it.

    shared: what all episodes shared, and the values that it had.
    """
    first = _Episode(calls, rows, 0)
    second = _Episode(calls, rows, len(rows) - 1)
    turned = [*lines[1:], *lines[:1]]
    for turn in range(len(alone.turns)):
        if not first.over:
            first.step(lines[turn % len(lines)])
        if not second.over:
            second.step(turned[turn % len(turned)])
    difference = _difference(alone, first, True)
    if difference:
        changed = _changed_names(shared, _shared_values(first.environment))
        which = f" ({' and '.join(changed)} changed)" if changed else ""
        raise Broken(
            f"an episode changes while another one is open: {difference}. They share state{which} or global "
            "random numbers; keep what belongs to an episode in `self`",
            **first.shown,
        )


def _require_same_elsewhere(
    calls: EnvironmentCalls,
    rows: Sequence[Mapping[str, Any]],
    held: Sequence[_Episode],
    lines: Sequence[Message],
) -> None:
    """Raise Broken where episodes go otherwise in another process, whose Python orders sets of texts otherwise."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    pool = Pool(call_environment, 1)
    try:
        with mock.patch.dict(os.environ, PYTHONHASHSEED=seed):
            elsewhere = [
                _hold_elsewhere(pool, dumps(calls.make()), row, number, lines, len(held[number].turns))
                for number, row in enumerate(rows)
            ]
    except (UnsendableError, RaisedError, DiedError, InputError, RunError):
        return  # it cannot be held in another process
    finally:
        pool.close()
    for number, (first, turns) in enumerate(elsewhere):
        difference = _first_difference(held[number].first, held[number].turns, first, turns)
        if difference:
            raise Broken(
                f"in another process, {difference}; iterate over sorted(…) instead of a set, and use hashlib instead "
                "of hash(): Python seeds them differently in each process",
                **held[number].shown,
            )


def _hold_elsewhere(
    pool: Pool, state: bytes, row: Mapping[str, Any], number: int, lines: Sequence[Message], most: int
) -> tuple[list[dict[str, Any]], list[Turn]]:
    """Hold an episode in the process of a pool: its first messages and its turns."""
    state, messages = pool.submit(state, "reset", (dict(row), number)).result()
    turns: list[Turn] = []
    while len(turns) < most and not (turns and turns[-1].done):
        state, turn = pool.submit(state, "step", (dict(lines[len(turns) % len(lines)]),)).result()
        turns.append(checked_turn(turn))
    return checked_messages(messages, "reset"), turns


def _unrepeatable(number: int, difference: str, deterministic: bool) -> str:
    text = f"with the same row {number} and the same seed and completions, {difference}; "
    if not deterministic or difference.startswith("reset"):
        return text + (
            "draw from random.Random(seed), and read neither global random numbers nor a clock: the episodes of a "
            "group must begin alike, also with `deterministic = False`"
        )
    return text + (
        "draw from random.Random(seed), and read neither global random numbers nor a clock, so that a killed run "
        "continues with the same bits; if that is impossible, give the class `deterministic = False`"
    )


def _difference(before: _Episode, after: _Episode, deterministic: bool) -> str | None:
    """Describe the first difference between two episodes that should be equal; None without one."""
    turns = (before.turns, after.turns) if deterministic else ([], [])
    return _first_difference(before.first, turns[0], after.first, turns[1])


def _first_difference(first: Any, turns: Sequence[Turn], other: Any, others: Sequence[Turn]) -> str | None:
    if first != other:
        return f"reset returned {first!r:.120}, then {other!r:.120}"
    for number, (before, after) in enumerate(zip(turns, others, strict=False), 1):
        for name, value, changed in zip(Turn._fields, before, after, strict=True):
            if value != changed:
                return f"turn {number} had {name}={value!r:.120}, then {name}={changed!r:.120}"
    return None if len(turns) == len(others) else f"the episode had {len(turns)} turns, then {len(others)}"


def _answer_odd_completions(calls: EnvironmentCalls, rows: Sequence[Mapping[str, Any]]) -> None:
    odd = {name: {"role": "assistant", **message} for name, message in ODD.items()}
    mistakes = {"a call of an unknown tool": _call("qzx", {})}
    for tool in calls.tools:
        name = tool["function"]["name"]
        mistakes[f"a call of {name} without arguments"] = _call(name, {})
        mistakes[f"a call of {name} with an unknown argument"] = _call(name, {"qzx": None})
    for what, call in mistakes.items():
        odd[what] = {"role": "assistant", "content": "", "tool_calls": [call]}
    problems: dict[str, Broken] = {}
    for what, message in odd.items():
        try:
            _Episode(calls, rows, 0).step(message)
        except Broken as broken:
            problems[what] = broken
    if problems:
        said = "; ".join(f"{what}: {broken}" for what, broken in problems.items())
        first = next(iter(problems.values()))
        raise Broken(f"{said}. Answer it, or end the episode: an error leaves the episode out", **first.shown)


def _warn_unsendable(calls: EnvironmentCalls, episode: _Episode) -> None:
    if calls.asynchronous:
        return
    try:
        dumps(episode.environment)
    except UnsendableError as error:
        warnings.warn(
            f"the environment cannot be sent to a worker process, which `timeout` and `processes` need: {error}; make "
            "its methods async, or keep what it holds picklable",
            stacklevel=3,
        )


@contextmanager
def _moment(number: int) -> Iterator[None]:
    """Run the block with global random numbers of this moment, and unless it is 0 with another clock and time zone."""
    states = (random.getstate(), np.random.get_state())
    zone = os.environ.get("TZ")
    clock, clock_ns = time.time, time.time_ns

    def in_a_year() -> float:
        return clock() + YEAR

    def in_a_year_ns() -> int:
        return clock_ns() + int(YEAR * 1e9)

    random.seed(number)
    np.random.seed(number)
    try:
        if not number:
            yield
            return
        _set_zone(FAR_ZONE)
        with mock.patch.object(time, "time", in_a_year), mock.patch.object(time, "time_ns", in_a_year_ns):
            yield
    finally:
        if number:
            _set_zone(zone)
        random.setstate(states[0])
        np.random.set_state(states[1])


def _set_zone(zone: str | None) -> None:
    if not hasattr(time, "tzset"):  # on Windows
        return
    if zone is None:
        os.environ.pop("TZ", None)
    else:
        os.environ["TZ"] = zone
    time.tzset()


def _shared_values(environment: Any) -> dict[str, str]:
    """Describe what all episodes share: {name: value} of class and module attributes and of mutable defaults."""
    cls = type(environment)
    spaces: list[tuple[str, Mapping[str, Any]]] = [
        (f"{base.__qualname__}.{{}}, of the class", vars(base)) for base in cls.__mro__[:-1]
    ]
    module = sys.modules.get(cls.__module__)
    spaces.append((f"{{}}, of the module {cls.__module__}", {} if module is None else vars(module)))
    values = {}
    for words, space in spaces:
        for name, value in list(space.items()):
            if isinstance(value, types.FunctionType):
                defaults = value.__defaults__, value.__kwdefaults__
                values[f"a default of {value.__qualname__}"] = repr(defaults)
            elif not name.startswith("__") and not isinstance(value, type | types.ModuleType):
                values[words.format(name)] = repr(value)
    return values


def _changed_names(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return [name for name in after if after[name] != before.get(name)]
