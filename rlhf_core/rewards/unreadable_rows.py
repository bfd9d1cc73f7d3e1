"""Rows whose answers a reward cannot read: named before training, and one by one during it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rlhf_core.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])


class UnreadableError(InputError):
    """Some rows of a call cannot be scored, and the others have their values.

    rows: {index in the call: what is wrong with its answer}. values: one per completion, None at these rows.
    """

    def __init__(self, reward: str, rows: Mapping[int, str], values: Sequence[float | None]) -> None:
        super().__init__(*(f"reward '{reward}': {text}" for text in dict.fromkeys(rows.values())))
        self.reward, self.rows, self.values = reward, dict(rows), list(values)

    def __reduce__(self) -> tuple[Any, ...]:
        return UnreadableError, (self.reward, self.rows, self.values)


def checked_by(check: Callable[[Mapping[str, Sequence[Any]]], Mapping[int, str]]) -> Callable[[F], F]:
    """Give a reward function its `check`, which is called with the dataset's columns before anything is trained."""

    def decorate(function: F) -> F:
        function.check = check  # type: ignore[attr-defined]
        return function

    return decorate


def missing(answer: Any) -> bool:
    """Whether a row has no answer; a table's missing number is NaN."""
    return answer is None or (isinstance(answer, float) and answer != answer)
