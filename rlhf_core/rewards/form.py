"""Rewards for the form of a completion, whatever it says: its pattern, its length, its repetitions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from rlhf_core.rewards.text import said


@dataclass(frozen=True)
class Regex:
    r"""1 where the whole completion matches `pattern`, else 0; a dot matches a line break too.

    pattern: a regular expression of Python's `re`, such as "<think>.*</think>\\s*<answer>.*</answer>".
    For chat data the last message's content is matched.
    """

    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern: {self.pattern!r} is not a regular expression: {error}") from None

    def __call__(self, completions: Sequence[Any]) -> list[float]:
        pattern = re.compile(self.pattern, re.DOTALL)
        return [float(pattern.fullmatch(said(completion)) is not None) for completion in completions]


def length(
    completion_ids: Sequence[Sequence[int]], *, target: Annotated[int, Field(ge=1)] = 100
) -> list[float]:
    """-|tokens - target| / target, the stop token counted: 0 at `target`, -1 at none and at twice as many."""
    return [-abs(len(ids) - target) / target for ids in completion_ids]


@dataclass(frozen=True)
class SoftOverlong:
    """The soft overlong punishment of DAPO (Yu et al. 2025, equation 13), in tokens, the stop token counted.

    0 up to max_length - cache tokens, then (max_length - cache - tokens) / cache, which is -1 at max_length, and -1
    beyond.

    max_length: where the whole penalty is reached. cache: over how many tokens before it the penalty grows.
    """

    max_length: Annotated[int, Field(ge=1)]
    cache: Annotated[int, Field(ge=1)]

    def __post_init__(self) -> None:
        if self.cache > self.max_length:
            raise ValueError(
                f"cache={self.cache} is more than max_length={self.max_length}: the penalty would begin below 0 tokens"
            )

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        free = self.max_length - self.cache
        return [max(min(free - len(ids), 0) / self.cache, -1.0) for ids in completion_ids]


def repetition(
    completion_ids: Sequence[Sequence[int]],
    *,
    ngram: Annotated[int, Field(ge=1)] = 3,
    penalty: Annotated[float, Field(le=0)] = -1.0,
) -> list[float]:
    """penalty × (1 − different n-grams / n-grams) of the tokens, the stop token counted (Yeo et al. 2025).

    0 where no n-gram occurs twice, and for completions of fewer than `ngram` tokens; near `penalty` for one n-gram
    over and over.
    """

    def of(ids: Sequence[int]) -> float:
        grams = [tuple(ids[i : i + ngram]) for i in range(len(ids) - ngram + 1)]
        return -penalty * (len(set(grams)) / len(grams) - 1) if grams else 0.0

    return [of(ids) for ids in completion_ids]
