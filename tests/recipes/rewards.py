"""The reward of the recipes, as a user writes one: how much of the reply is right, and 1 if all of it is."""

from __future__ import annotations

from collections.abc import Sequence


def right(completions: Sequence[str], word: Sequence[str], count: Sequence[int], **_: object) -> list[float]:
    return [grade(text, each, times) for text, each, times in zip(completions, word, count, strict=True)]


def grade(text: str, word: str, count: int) -> float:
    """1 for the right reply, else half the share of the places, of the longer of both, that are right."""
    said, asked = text.split(), [word] * count
    if said == asked:
        return 1.0
    same = sum(a == b for a, b in zip(said, asked, strict=False))
    return 0.5 * same / max(len(said), len(asked))
