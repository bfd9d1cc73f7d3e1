"""The reward `math_verify`: mathematical equality, judged in worker processes."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from rlhf_core.errors import InputError
from rlhf_core.rewards.answers import read_number, said
from rlhf_core.rewards.unreadable_rows import UnreadableError, missing
from rlhf_core.workers import ByName, DiedError, Pool, RaisedError, TooSlowError, cores

MEMORY = 2 << 30
"""Bytes that a worker may have: what takes more is no answer."""
SECONDS_TO_CHECK = 60.0
"""CPU time in which an answer of the data must be read."""

_lock = threading.Lock()
_kept: list[Pool] = []


@dataclass(frozen=True)
class MathVerify:
    """1 where the completion's final expression is mathematically equal to the row's `answer`, else 0.

    Both are read by the package math-verify, LaTeX or plain; the answer needs no dollar signs. A row whose answer is
    null is not scored (None). For chat data the last message's content is read.

    seconds: CPU time that one comparison may take; beyond it the completion is wrong, as it is where sympy needs more
    than 2 GiB. A power tower can keep sympy busy for ever, in code that no thread or signal handler interrupts:
    comparisons therefore run in worker processes, as many at once as there are cores, which are kept until the stage
    ends. Signals to this process's group do not reach them; a worker that is killed is replaced, and its comparison
    repeated.

    Raises InputError where the package is missing, and for answers that cannot be read.
    """

    seconds: Annotated[float, Field(gt=0)] = 5.0

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise InputError(
                "reward 'math_verify' needs the package math-verify, which is not installed: "
                "pip install 'rlhf-core[math]'"
            )

    def check(self, columns: Mapping[str, Sequence[Any]]) -> dict[int, str]:
        """Find the rows whose `answer` cannot be read: {row: what is wrong}."""
        answers = {
            i: str(answer) for i, answer in enumerate(columns.get("answer", ())) if not missing(answer)
        }
        hard = sorted({answer for answer in answers.values() if read_number(answer) is None})
        calls = [(None, answer) for answer in hard]
        verdicts = dict(zip(hard, _pool().outcomes(calls, cpu_seconds=SECONDS_TO_CHECK), strict=True))
        return {
            i: _unreadable(answer)
            for i, answer in answers.items()
            if verdicts.get(answer, "readable") != "readable"
        }

    def __call__(self, completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
        pairs = [
            None if missing(expected) else (said(completion), str(expected))
            for completion, expected in zip(completions, answer, strict=True)
        ]
        calls = list(dict.fromkeys(pair for pair in pairs if pair is not None))
        outcomes = _pool().outcomes(calls, cpu_seconds=self.seconds) if calls else []
        verdicts = dict(zip(calls, map(_verdict, calls, outcomes), strict=True))
        unreadable = {
            i: _unreadable(pair[1])
            for i, pair in enumerate(pairs)
            if pair is not None and verdicts[pair] is None
        }
        values = [None if pair is None else verdicts[pair] for pair in pairs]
        if unreadable:
            raise UnreadableError("math_verify", unreadable, values)
        return values


def _pool() -> Pool:
    """The worker processes, of all such rewards of this process."""
    with _lock:
        if not _kept or _kept[0].closed:
            judge = ByName("rlhf_core.rewards.math_process", "judge")  # importing it takes a second
            _kept[:] = [Pool(judge, cores(), memory=MEMORY)]
        return _kept[0]


def _verdict(pair: tuple[str, str], outcome: Any) -> float | None:
    """1 or 0; None where the answer is unreadable. Raises what is neither the completion's nor the answer's fault."""
    if isinstance(outcome, TooSlowError) or (
        isinstance(outcome, RaisedError) and outcome.type_name == "MemoryError"
    ):
        return 0.0
    if isinstance(outcome, DiedError):
        raise DiedError(f"{outcome}, each time that it compared {pair[0][-60:]!r} with {pair[1][:60]!r}")
    if isinstance(outcome, Exception):
        raise outcome
    return {"right": 1.0, "wrong": 0.0}.get(outcome)


def _unreadable(answer: str) -> str:
    return (
        f"the answer {answer[:60]!r} is not mathematics that can be read; leave it null where the reward does not "
        "apply"
    )
