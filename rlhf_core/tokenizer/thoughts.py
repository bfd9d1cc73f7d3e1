"""Thoughts that models write as text: <think>…</think> and its variants."""

from __future__ import annotations

import re

_NAMES = ("think", "thinking", "thought", "reasoning")
_OPENING = rf"<(?:{'|'.join(_NAMES)})>|\[THINK\]"
_CLOSING = rf"</(?:{'|'.join(_NAMES)})>|\[/THINK\]"
_MARK = re.compile(f"(?P<opening>{_OPENING})|(?P<closing>{_CLOSING})")


def spoken_spans(text: str) -> list[tuple[int, int]]:
    """Return the spans of a text that are outside of thoughts.

    A thought that is never closed reaches to the end, and one that is closed but never opened, as chat templates open
    it in the prompt, from the beginning.
    """
    spans: list[tuple[int, int]] = []
    start: int | None = 0
    for mark in _MARK.finditer(text):
        if mark["opening"] and start is not None:
            spans.append((start, mark.start()))
            start = None
        elif mark["closing"]:
            if start is not None:
                spans.clear()
            start = mark.end()
    if start is not None:
        spans.append((start, len(text)))
    return spans


def without_thoughts(text: str) -> str:
    """Remove the thoughts from a text."""
    return "".join(text[start:end] for start, end in spoken_spans(text))
