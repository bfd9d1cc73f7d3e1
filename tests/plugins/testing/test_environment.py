"""The kit for environments finds each defect, and only that; a good one has none."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import math
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rlhf_core import Turn
from rlhf_core.testing import check_environment

ROWS = [{"secret": 3, "hints": ["odd"]}, {"secret": 8, "hints": ["even", "a cube"]}]
SAYS = ["1", "5", "8"]


class Guess:
    """The policy guesses a number in three turns."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def reset(self, row: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        self.row, self.said = row, 0
        self.low = random.Random(seed).randint(0, 2)
        return [{"role": "user", "content": f"Guess a number above {self.low}: {', '.join(row['hints'])}"}]

    def step(self, completion: Mapping[str, Any]) -> Turn:
        self.said += 1
        right = completion["content"].strip() == str(self.row["secret"])
        return self.answer(right, right or self.said >= self.turns)

    def answer(self, right: bool, done: bool) -> Turn:
        return Turn([{"role": "user", "content": "No."}], float(right), done, {"tries": self.said})


class Tool:
    """The policy may call a tool, and ends the episode without a call."""

    tools: ClassVar[Sequence[Any]] = [
        {
            "type": "function",
            "function": {
                "name": "double",
                "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
            },
        }
    ]

    def reset(self, row: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "Double 4."}]

    def step(self, completion: Mapping[str, Any]) -> Turn:
        calls = completion.get("tool_calls", ())
        results = [{"role": "tool", "content": self.result(call["function"])} for call in calls]
        return Turn(results, done=not calls)

    def result(self, function: Mapping[str, Any]) -> str:
        x = function["arguments"].get("x")
        return str(2 * x) if function["name"] == "double" and isinstance(x, int) else "give x, an integer"


class Awaited(Guess):
    async def step(self, completion: Mapping[str, Any]) -> Turn:  # type: ignore[override]
        await asyncio.sleep(0)
        return Guess.step(self, completion)


class Loose(Guess):
    """The kit does not hold it again, nor in another process, which would take seconds."""

    deterministic = False


class Rude(Guess):
    """It answers as it likes, and says so."""

    deterministic = False

    def answer(self, right: bool, done: bool) -> Turn:
        return Turn([{"role": "user", "content": str(random.random())}], 0.0, done)


def make_guess(turns: int = 2) -> Guess:
    return Guess(turns)


@pytest.mark.parametrize(
    "environment",
    [
        Awaited,
        Rude,
        pytest.param(make_guess, marks=pytest.mark.long),
    ],
    ids=lambda x: x.__name__,
)
def test_a_good_one_passes(environment: Any) -> None:
    check_environment(environment, ROWS)


def test_one_row_completions_and_options() -> None:
    check_environment(Awaited, ROWS[:1], completions=SAYS, turns=4)
    with pytest.raises(AssertionError, match="the episode of row 0 is not over after 3 turns"):
        check_environment(Awaited, ROWS[:1], completions=SAYS[:2], turns=4, max_turns=3)


def test_a_sound_environment_passes(tmp_path: Path) -> None:
    file = tmp_path / "calc.py"
    file.write_text(
        "def add(a: int, b: int = 2) -> int:\n"
        '    """Add.\n\n    Args:\n        a: one\n        b: other\n    """\n    return a + b\n'
    )
    check_environment("tools", [{"prompt": "1 + 2?"}, {"prompt": "3 + 4?"}], tools=[f"{file}:add"])


def test_the_clock_and_random_numbers_are_left_as_they_were() -> None:
    random.seed(5)
    np.random.seed(5)
    zone, before = os.environ.get("TZ"), (time.time(), datetime.date.today())
    check_environment(Guess, ROWS)
    assert (random.random(), np.random.random()) == (
        random.Random(5).random(),
        np.random.RandomState(5).rand(),
    )
    assert os.environ.get("TZ") == zone
    assert 0 <= time.time() - before[0] < 60
    assert (datetime.date.today() - before[1]).days <= 1


class NoStep:
    def reset(self, row: Mapping[str, Any], seed: int) -> Any: ...


class NotAnEnvironment(Guess):
    def __init__(self, limit: int) -> None:
        super().__init__()


class BadTools(Tool):
    tools: ClassVar[Sequence[Any]] = ["double"]


ONE = Guess()


def the_same() -> Guess:
    return ONE


class TakesTheHint(Loose):
    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        row["hints"].append("more")
        return super().reset({**row, "hints": ["?"]}, seed)


class KeepsTheRow(Loose):
    def answer(self, right: bool, done: bool) -> Turn:
        self.row["tries"] = self.said  # type: ignore[index]
        return super().answer(right, done)


class Signs(Loose):
    def step(self, completion: Any) -> Turn:
        completion["seen"] = True
        return super().step(completion)


class ClassList(Guess):
    log: ClassVar[list[str]] = []

    def answer(self, right: bool, done: bool) -> Turn:
        self.log.append("said")
        return Turn([{"role": "user", "content": f"{len(self.log)} guesses."}], 0.0, done)


class DefaultList(Guess):
    def __init__(self, log: list[str] = []) -> None:  # noqa: B006
        super().__init__()
        self._log = log

    def answer(self, right: bool, done: bool) -> Turn:
        self._log.append("said")
        return super().answer(right, done)._replace(metrics={"guesses": len(self._log)})


COUNTER = itertools.count()


class ModuleCounter(Guess):
    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        super().reset(row, seed)
        return [{"role": "user", "content": f"Game {next(COUNTER)}"}]


class ClearedList(Guess):
    """What two episodes share shows only where both are held at once."""

    log: ClassVar[list[str]] = []

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        self.log.clear()
        return super().reset(row, seed)

    def answer(self, right: bool, done: bool) -> Turn:
        self.log.append("said")
        return Turn([{"role": "user", "content": "No."}], float(len(self.log)), done)


class GlobalSeed(Guess):
    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        random.seed(seed)
        return super().reset(row, seed)

    def answer(self, right: bool, done: bool) -> Turn:
        return Turn([{"role": "user", "content": "No."}], random.random(), done)


class RandomReset(Guess):
    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        super().reset(row, seed)
        return [{"role": "user", "content": f"Guess a number below {random.random()}"}]


class RandomGroup(RandomReset):
    deterministic = False

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        super().reset(row, seed)
        return [{"role": "user", "content": os.urandom(8).hex()}]


class NumpyStep(Guess):
    def answer(self, right: bool, done: bool) -> Turn:
        return super().answer(right, done)._replace(reward=float(np.random.rand()))


class Today(Guess):
    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        return [{"role": "system", "content": f"It is {datetime.date.today()}."}, *super().reset(row, seed)]


class Seconds(Guess):
    def answer(self, right: bool, done: bool) -> Turn:
        return super().answer(right, done)._replace(reward=float(int(time.time()) // 3600))


class Sets(Guess):
    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        super().reset(row, seed)
        return [{"role": "user", "content": " ".join(set("abcdefghijklmnopqrstuvwxyz"))}]


class Hashes(Guess):
    def answer(self, right: bool, done: bool) -> Turn:
        return Turn([{"role": "user", "content": "No."}], float(hash("a text")), done)


class FirstWord(Loose):
    def step(self, completion: Mapping[str, Any]) -> Turn:
        completion["content"].split()[0]
        return super().step(completion)


class Short(Loose):
    def step(self, completion: Mapping[str, Any]) -> Turn:
        if len(completion["content"]) > 1000:
            raise ValueError("too long")
        return super().step(completion)


class TrustsCalls(Tool):
    deterministic = False

    def result(self, function: Mapping[str, Any]) -> str:
        return str(2 * function["arguments"]["x"])


class TrustsParsing(Loose):
    def step(self, completion: Mapping[str, Any]) -> Turn:
        assert "call_errors" not in completion
        return super().step(completion)


PARTS = [{"role": "user", "content": [{"type": "image"}]}]


def resetting(reset: Callable[..., Any]) -> type[Guess]:
    return type(
        "Changed", (Guess,), {"reset": lambda self, row, seed: reset(Guess.reset(self, row, seed), row)}
    )


def answering(answer: Callable[..., Any]) -> type[Guess]:
    """An environment whose turns are `answer` of the turn of Guess."""
    methods = {"answer": lambda self, right, done: answer(Guess.answer(self, right, done))}
    return type("Changed", (Guess,), {**methods, "deterministic": False})


MUTANTS: list[tuple[str, Any, str]] = [
    ("component", NoStep, "makes NoStep, which has no step"),
    ("component", NotAnEnvironment, "limit: missing; it has no default"),
    ("component", BadTools, "`tools` has 'double'; a tool is a JSON schema"),
    ("component", the_same, "gives the same object twice; make a new one for each episode"),
    ("component", ONE, "it is an object of Guess; give the class"),
    (
        "reset",
        resetting(lambda said, row: said[0]["content"]),
        "for row 0 it returned str, not a list of messages",
    ),
    (
        "reset",
        resetting(lambda said, row: [{"content": "Guess."}]),
        "message 1 has no role (its keys: content)",
    ),
    (
        "reset",
        resetting(lambda said, row: [*said, {"role": "assistant", "content": "1"}]),
        "an assistant's message last",
    ),
    (
        "reset",
        resetting(lambda said, row: [{"role": "user", "content": row["question"]}]),
        "in row 0 it raised KeyError: 'question'",
    ),
    (
        "step",
        answering(lambda turn: (turn.messages, 0.0, turn.done)),
        "in turn 1 it returned tuple; it returns rlhf_core.Turn(",
    ),
    (
        "step",
        answering(lambda turn: turn._replace(reward=math.nan)),
        "in turn 1 it returned reward=nan; expected a finite number",
    ),
    (
        "step",
        answering(lambda turn: turn._replace(metrics={"mood": "bad"})),
        "returned metrics['mood']='bad'; expected a finite number",
    ),
    (
        "step",
        answering(lambda turn: Turn(done=turn.done)),
        "no messages and done=False: there is nothing to reply to",
    ),
    (
        "step",
        answering(lambda turn: turn._replace(messages=PARTS)),
        "message 1: part 1 of its content is of type 'image'",
    ),
    (
        "end",
        answering(lambda turn: turn._replace(done=False)),
        "the episode of row 0 is not over after 32 turns; return Turn(done=True)",
    ),
    ("inputs", TakesTheHint, "reset changes the row it was given; copy what you change"),
    ("inputs", KeepsTheRow, "step changes the row it was given"),
    ("inputs", Signs, "step changes the completion it was given; copy what you change"),
    ("apart", ClassList, "ClassList.log, of the class, changed meanwhile: keep what belongs to an episode"),
    ("apart", DefaultList, "a default of DefaultList.__init__, changed meanwhile"),
    ("apart", ModuleCounter, "COUNTER, of the module "),
    (
        "apart",
        ClearedList,
        "an episode changes while another one is open: turn 2 had reward=2.0, then reward=",
    ),
    ("apart", GlobalSeed, "They share state or global random numbers"),
    ("repeatable", RandomReset, "seed and completions, reset returned [{"),
    (
        "repeatable",
        RandomGroup,
        "the episodes of a group must begin alike, also with `deterministic = False`",
    ),
    ("repeatable", NumpyStep, "turn 1 had reward=0."),
    ("repeatable", Today, "read neither global random numbers nor a clock"),
    ("repeatable", Seconds, "if that is impossible, give the class `deterministic = False`"),
    ("repeatable", Sets, "in another process, reset returned [{"),
    ("repeatable", Hashes, "use hashlib instead of hash(): Python seeds them differently in each process"),
    (
        "odd completions",
        FirstWord,
        "an empty text: in turn 1 it raised IndexError: list index out of range (",
    ),
    ("odd completions", Short, "a very long text: in turn 1 it raised ValueError: too long"),
    ("odd completions", TrustsCalls, "a call of double without arguments: in turn 1 it raised KeyError: 'x'"),
    ("odd completions", TrustsParsing, "a malformed call: in turn 1 it raised AssertionError"),
]


SECOND = (Hashes,)
"""Of which another has the like: `Sets` goes otherwise in another process, too, which takes a second to start."""


@pytest.mark.parametrize(
    ("name", "environment", "words"),
    [pytest.param(*each, marks=pytest.mark.long) if each[1] in SECOND else each for each in MUTANTS],
    ids=[words[:40] for _, _, words in MUTANTS],
)
def test_the_defect_is_found(name: str, environment: Any, words: str, failures: Callable[..., Any]) -> None:
    found = failures(check_environment, environment, ROWS)
    assert set(found) == {name}, found
    assert words in found[name]


def test_a_call_of_every_tool_is_made_up() -> None:
    called: list[Any] = []

    class Listens(Tool):
        def result(self, function: Mapping[str, Any]) -> str:
            called.append(function)
            return super().result(function)

    check_environment(Listens, ROWS)
    assert called[0] == {"name": "double", "arguments": {"x": 1}}


class HoldsALock(Loose):
    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        self._lock = threading.Lock()
        return super().reset(row, seed)


def test_what_cannot_be_sent_is_a_warning() -> None:
    with pytest.warns(
        UserWarning, match="cannot be sent to a worker process, .*cannot pickle '_thread.lock' object"
    ):
        check_environment(HoldsALock, ROWS, timeout=5.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_environment(HoldsALock, ROWS)
        check_environment(Loose, ROWS, timeout=5.0)


def test_the_kit_needs_rows_and_completions(failures: Callable[..., Any]) -> None:
    assert failures(check_environment, Guess, []).keys() == {"component"}
    assert failures(check_environment, Guess, ROWS, completions=[]).keys() == {"component"}
