"""Two rewards that need no weights: what the policy is to say, and that it does not say it again and again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def mentions_once(completions: Sequence[str], *, word: str = "happy") -> list[float]:
    """1 where `word` comes exactly once, else 0: saying it again and again earns nothing."""
    return [float(words(text).count(word.lower()) == 1) for text in completions]


def variety(completions: Sequence[str]) -> list[float]:
    """Distinct pairs of neighbouring words / pairs: 1 where none comes twice, near 0 for a loop, 0 for a word or none.

    Of pairs, since among single words a longer text repeats more: that would reward brevity.
    """
    pairs = [list(pairwise(said)) for said in map(words, completions)]
    return [len({*each}) / max(len(each), 1) for each in pairs]
