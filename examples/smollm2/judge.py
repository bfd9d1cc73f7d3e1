"""Judge completions of the tasks strictly: right or wrong.

This is the measure of success, and it stays a measure: no trainer and no reward imports it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ANSWER = re.compile(r"(?s).*\bThe answer is (-?\d+)\.?")
_SENTENCE = re.compile(r"[A-Z][^.!?\n]*[.!?]")
_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")


def judge_answer(row: Mapping[str, Any], text: str) -> dict[str, bool]:
    """Judge an answer: it ends with "The answer is N", and N is right."""
    match = _ANSWER.fullmatch(text.strip())
    return {"form": match is not None, "number": match is not None and int(match[1]) == int(row["answer"])}


def judge_sentence(row: Mapping[str, Any], text: str) -> dict[str, bool]:
    """Judge a sentence: it is one, as long as asked for, with the words needed and without the one that is banned.

    Words are whole and without case: "boats" is neither the needed nor the banned "boat".
    """
    words = [word.lower() for word in _WORD.findall(text)]
    return {
        "sentence": _SENTENCE.fullmatch(text.strip()) is not None,
        "length": row["least"] <= len(words) <= row["limit"],
        "needed": all(word in words for word in row["needed"]),
        "banned": row["banned"] not in words,
    }


def judge(row: Mapping[str, Any], text: str, *, finished: bool) -> dict[str, bool]:
    """Judge a completion of a row of the tasks: what holds, by name. It succeeds if all of it does.

    finished: whether it ended by itself, rather than at the longest length allowed.
    """
    verdict = judge_answer(row, text) if "answer" in row else judge_sentence(row, text)
    return {**verdict, "finished": finished}
