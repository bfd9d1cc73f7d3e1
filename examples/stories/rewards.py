"""Two rewards without a model: one for saying a word, one against repetition."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def mentions_once(completions: Sequence[str], *, word: str = "happy") -> list[float]:
    """Return 1 where `word` comes exactly once, else 0: repeating it earns nothing."""
    return [float(words(text).count(word.lower()) == 1) for text in completions]


def variety(completions: Sequence[str]) -> list[float]:
    """Return distinct pairs of neighbouring words / pairs: 1 without repetition, near 0 for a loop, 0 below two words.

    Of pairs, since among single words a longer text repeats more: that would reward brevity.
    """
    pairs = [list(pairwise(said)) for said in map(words, completions)]
    return [len({*each}) / max(len(each), 1) for each in pairs]
