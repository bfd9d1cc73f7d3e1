"""Compare expressions for `math_verify`, in worker processes that can be killed when sympy does not return."""

from __future__ import annotations

import logging
from typing import Any

from math_verify import parse, verify


def judge(completion: str | None, answer: str) -> str:
    """Return "right", "wrong", or "unreadable" for the answer; without a completion, "readable" or "unreadable"."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    expected = _parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
    if not expected:
        return "unreadable"
    if completion is None:
        return "readable"
    try:
        right = verify(expected, _parse(completion), timeout_seconds=None)
    except Exception:  # a completion that sympy cannot handle is wrong
        right = False
    return "right" if right else "wrong"


def _parse(text: str) -> list[Any]:
    expressions: list[Any] = parse(text, parsing_timeout=None)
    return expressions
