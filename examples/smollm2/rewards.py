"""Reward completions of the tasks in degrees, so that a group of wrong ones still has better and worse.

What counts in the end is `judge.py`, which is strict, and which training never sees.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

Messages = Sequence[Mapping[str, str]]


def sentence(
    completions: Sequence[Messages],
    needed: Sequence[Sequence[str]],
    banned: Sequence[str],
    least: Sequence[int],
    limit: Sequence[int],
    *,
    shuffled: bool = False,
) -> list[float]:
    """Give a quarter for each of form, length, needed words and banned word, and 1 more for all of them.

    shuffled: deal the values out at random: a control, from which nothing can be learned.
    """
    values = [
        _sentence(messages[-1]["content"], *row)
        for messages, *row in zip(completions, needed, banned, least, limit, strict=True)
    ]
    return dealt_out(values) if shuffled else values


def _sentence(text: str, needed: Sequence[str], banned: str, least: int, limit: int) -> float:
    text = text.strip()
    words = [word.strip(".,;:!?\"'()*").lower() for word in text.split()]
    ends = [place for place, letter in enumerate(text) if letter in ".!?"]
    parts = [
        float(text[:1].isupper() and ends == [len(text) - 1] and "\n" not in text),
        min(1.0, len(words) / least, limit / max(len(words), 1)),
        sum(word in words for word in needed) / len(needed),
        float(banned not in words),
    ]
    return sum(parts) / len(parts) + float(min(parts) == 1.0)


def answer(completions: Sequence[Messages], answer: Sequence[str], *, shuffled: bool = False) -> list[float]:
    """Give 1 for the right number at the end, 0.2 for a wrong one there, and 0.1 for the right one elsewhere.

    shuffled: as for `sentence`.
    """
    values = [
        _answer(messages[-1]["content"], right) for messages, right in zip(completions, answer, strict=True)
    ]
    return dealt_out(values) if shuffled else values


def _answer(text: str, right: str) -> float:
    before, said, number = text.strip().removesuffix(".").rpartition("The answer is ")
    if said and number.isdecimal():
        return 1.0 if number == right else 0.2
    return 0.1 if right in re.findall(r"\d+", before + number) else 0.0


def dealt_out(values: list[float]) -> list[float]:
    """Return the values in an order that they alone decide."""
    return random.Random(repr(values)).sample(values, len(values))
