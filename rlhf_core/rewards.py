"""Rewards that need no weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field


def length(
    completion_ids: Sequence[Sequence[int]], *, target: Annotated[int, Field(ge=1)] = 100
) -> list[float]:
    """-|tokens - target| / target, the stop token counted: 0 at `target`, -1 at none and at twice as many."""
    return [-abs(len(ids) - target) / target for ids in completion_ids]


def exact_match(
    completions: Sequence[Any], answer: Sequence[Any], *, ignore_case: bool = False
) -> list[float | None]:
    """1 where the completion equals the row's `answer` column but for surrounding white space, else 0.

    A row whose answer is null is not scored (None). For chat data the last message's content is compared.
    """

    def normal(value: Any) -> str:
        text = str(value[-1]["content"] if isinstance(value, list) else value).strip()
        return text.casefold() if ignore_case else text

    return [
        None if expected is None else float(normal(completion) == normal(expected))
        for completion, expected in zip(completions, answer, strict=True)
    ]
