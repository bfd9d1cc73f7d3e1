"""Report rows whose answers a reward cannot read: before training, and row by row during it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rlhf_core.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])


class UnreadableError(InputError):
    """Raised when some rows of a call cannot be scored; carries the values of the other rows.

    rows: {index in the call: what is wrong with its answer}. values: one per completion, None for these rows.
    """

    def __init__(self, reward: str, rows: Mapping[int, str], values: Sequence[float | None]) -> None:
        super().__init__(*(f"reward '{reward}': {text}" for text in dict.fromkeys(rows.values())))
        self.reward, self.rows, self.values = reward, dict(rows), list(values)

    def __reduce__(self) -> tuple[Any, ...]:
        return UnreadableError, (self.reward, self.rows, self.values)


def checked_by(check: Callable[[Mapping[str, Sequence[Any]]], Mapping[int, str]]) -> Callable[[F], F]:
    """Attach `check` to a reward function; it is called with the dataset's columns before training starts."""

    def decorate(function: F) -> F:
        function.check = check  # type: ignore[attr-defined]
        return function

    return decorate


def missing(answer: Any) -> bool:
    """Return whether a row has no answer; tables store a missing number as NaN."""
    return answer is None or (isinstance(answer, float) and answer != answer)
