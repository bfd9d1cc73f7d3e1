"""What `math_verify` runs in its worker processes, in which a power tower may keep sympy busy until it is ended."""

from __future__ import annotations

import logging
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn of its own limits being off


def judge(completion: str | None, answer: str) -> str:
    """Say "right", "wrong", or of the answer "unreadable"; without a completion, "readable" or "unreadable"."""
    expected = _read(answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
    if not expected:
        return "unreadable"
    if completion is None:
        return "readable"
    try:
        right = verify(expected, _read(completion), timeout_seconds=None)
    except Exception:  # whatever a policy writes that sympy cannot take is no right answer
        right = False
    return "right" if right else "wrong"


def _read(text: str) -> list[Any]:
    found: list[Any] = parse(text, parsing_timeout=None)
    return found
