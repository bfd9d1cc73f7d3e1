"""The reward `math_verify`: compare expressions mathematically, in worker processes."""

from __future__ import annotations

import importlib.util
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from rlhf_core import InputError
from rlhf_core.config.durations import Seconds
from rlhf_core.tokenizer.thoughts import without_thoughts
from rlhf_core.workers.pickling import ByName
from rlhf_core.workers.pool import DiedError, Pool, RaisedError, TooSlowError, cores
from rlhf_rewards.functions import completion_text, missing

MEMORY = 2 << 30
"""Bytes that a worker may use: an expression that needs more is no answer."""
SECONDS_TO_CHECK = 60.0
"""CPU time for parsing one answer of the data."""
PLAIN = re.compile(r"-?[0-9]+(\.[0-9]+)?")
"""Answers that can be parsed, without trying."""

_lock = threading.Lock()
_pools: list[Pool] = []


@dataclass(frozen=True)
class MathVerify:
    """Return 1 where the completion's final expression is mathematically equal to the row's `answer`, else 0.

    The package math-verify parses both, as LaTeX or plain text; the answer needs no dollar signs. Rows with a null
    answer are not scored (None). For chat data the last message's content is parsed. Thoughts, as between <think> and
    </think>, are not.

    seconds: CPU time per comparison; a completion that takes longer is wrong, as is one for which sympy needs more
    than 2 GiB. A power tower can keep sympy busy forever, in code that no thread or signal handler interrupts.
    Comparisons therefore run in worker processes, one per core, which live until the stage ends. Signals to this
    process's group do not reach them; a worker that is killed is replaced and its comparison repeated.

    Raises InputError if the package is missing, and for answers that cannot be parsed.
    """

    seconds: Annotated[Seconds, Field(gt=0)] = 5.0

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise InputError(
                "reward 'math_verify' needs the package math-verify, which is not installed: "
                "pip install 'rlhf-rewards[math]'"
            )

    def check(self, columns: Mapping[str, Sequence[Any]]) -> dict[int, str]:
        """Find the rows whose `answer` cannot be read: {row: what is wrong}."""
        answers = {
            i: str(answer) for i, answer in enumerate(columns.get("answer", ())) if not missing(answer)
        }
        hard = sorted({answer for answer in answers.values() if not PLAIN.fullmatch(answer)})
        calls = [(None, answer) for answer in hard]
        verdicts = dict(zip(hard, _pool().outcomes(calls, cpu_seconds=SECONDS_TO_CHECK), strict=True))
        return {
            i: _unreadable(answer)
            for i, answer in answers.items()
            if verdicts.get(answer, "readable") != "readable"
        }

    def __call__(self, completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
        pairs = [
            None if missing(expected) else (without_thoughts(completion_text(completion)), str(expected))
            for completion, expected in zip(completions, answer, strict=True)
        ]
        calls = list(dict.fromkeys(pair for pair in pairs if pair is not None))
        outcomes = _pool().outcomes(calls, cpu_seconds=self.seconds) if calls else []
        verdicts = dict(zip(calls, map(_verdict, calls, outcomes), strict=True))
        unreadable = [pair[1] for pair, verdict in verdicts.items() if verdict is None]
        if unreadable:
            raise InputError(
                *(f"reward 'math_verify': {_unreadable(answer)}" for answer in dict.fromkeys(unreadable))
            )
        return [None if pair is None else verdicts[pair] for pair in pairs]


def _pool() -> Pool:
    """Return the worker pool that all `math_verify` rewards of this process share."""
    with _lock:
        if not _pools or _pools[0].closed:
            judge = ByName("rlhf_rewards.math_process", "judge")  # importing it takes a second
            _pools[:] = [Pool(judge, cores(), memory=MEMORY)]
        return _pools[0]


def _verdict(pair: tuple[str, str], outcome: Any) -> float | None:
    """Return 1 or 0, None for an unreadable answer; raise errors that neither the completion nor the answer caused."""
    if isinstance(outcome, TooSlowError) or (
        isinstance(outcome, RaisedError) and outcome.type_name == "MemoryError"
    ):
        return 0.0
    if isinstance(outcome, DiedError):
        raise DiedError(f"{outcome}, whenever it compared {pair[0][-60:]!r} with {pair[1][:60]!r}")
    if isinstance(outcome, Exception):
        raise outcome
    return {"right": 1.0, "wrong": 0.0}.get(outcome)


def _unreadable(answer: str) -> str:
    return (
        f"the answer {answer[:60]!r} cannot be parsed as mathematics; leave it null where the reward does not "
        "apply"
    )
