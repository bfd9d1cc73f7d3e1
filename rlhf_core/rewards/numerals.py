"""The number that a text ends in."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

_DIGITS = (
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?"
    r"(?!\.?\d|[eE][-+]?\d)"  # all of it or nothing: 1e9999 is not 1
)
_NUMBER = (
    r"(?P<sign>(?<![A-Za-z0-9)\]}])[-+])?"  # after one of these it is a difference or a range
    r"(?<![A-Za-z0-9])(?<!\d\.)"
    r"(?:(?P<whole>\d+) +(?=\d+ ?/ ?\d))?"
    rf"(?P<top>{_DIGITS})(?: ?/ ?(?P<bottom>{_DIGITS}))?(?P<percent> ?%)?"
)
_UNIT = r"(?:\s+[A-Za-z°]+\.?)*"
NUMBER = re.compile(_NUMBER)
ALONE = re.compile(rf"\s*{_NUMBER}{_UNIT}\s*\.?\s*")
# A heading of the fourth level begins with the same four signs: the number must end its line.
HASHES = re.compile(rf"####\s*{_NUMBER}{_UNIT}[\s.*]*$", re.MULTILINE)
ANSWER_IS = re.compile(rf"answer[\s*_]*(?:is|:|=)[\s*_:=(\\\[{{]*{_NUMBER}", re.IGNORECASE)
BRACE = re.compile(r"(?P<box>\\boxed\s*)?\{|\}")
_PLAINER = tuple(
    (re.compile(pattern), plainer)
    for pattern, plainer in (
        ("−", "-"),
        (r"\\[,!]", ""),
        (r"\{,\}", ","),
        (r"\\[;: ]|\\quad|~", " "),
        (r"\\([$%#])", r"\1"),
        (r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r" \1 "),
        (r"(?<=\d)\s*\\([dt]?frac)", r" \\\1"),
        (r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2"),
        (r"(?<=[-+])\s*[$€£]", ""),
        (r"[$€£]", " "),
    )
)
"""LaTeX and currency signs to plain text, one after the other."""


class Number(NamedTuple):
    """A value, and whether a percent sign follows it."""

    value: Fraction
    percent: bool

    def equals(self, other: Number) -> bool:
        """The same number; a percentage is also what it is a hundredth of: 50% equals 50 and 1/2."""
        if self.percent == other.percent:
            return self.value == other.value
        share, plain = (self, other) if self.percent else (other, self)
        return plain.value in (share.value, share.value / 100)


def read_number(text: str) -> Number | None:
    """The number that a text is, in a box or after "####" if there is one; None where it is no number."""
    text = _plain(text)
    if (box := _last_box(text)) is not None:
        return _alone(box)
    if "####" in text:
        return _last(HASHES, text)
    return _alone(text)


def final_number(text: str) -> Number | None:
    r"""The number in the last \boxed{…}, else after the last "####", else after the last "answer is", else the last."""
    text = _plain(text)
    if (box := _last_box(text)) is not None:
        return _alone(box)
    for place in (HASHES, ANSWER_IS):
        if place.search(text):
            return _last(place, text)
    return _last(NUMBER, text)


def _plain(text: str) -> str:
    for pattern, plainer in _PLAINER:
        text = pattern.sub(plainer, text)
    return text


def _last_box(text: str) -> str | None:
    """What the closed box that begins last holds."""
    begun: list[int | None] = []  # where what the open braces hold begins; None: they are no box's
    start, end = -1, -1
    for brace in BRACE.finditer(text):
        if brace[0] != "}":
            begun.append(brace.end() if brace["box"] else None)
        elif begun and (inside := begun.pop()) is not None and inside > start:
            start, end = inside, brace.start()
    return text[start:end] if start >= 0 else None


def _alone(text: str) -> Number | None:
    match = ALONE.fullmatch(text.rpartition("=")[2])
    return _value(match) if match else None


def _last(place: re.Pattern[str], text: str) -> Number | None:
    matches = list(place.finditer(text))
    return _value(matches[-1]) if matches else None


def _value(match: re.Match[str]) -> Number | None:
    """None for what has digits but no value: a division by zero, or more digits than Python turns into a number."""
    whole, top, bottom = (
        (match[name] or nothing).replace(",", "")
        for name, nothing in (("whole", "0"), ("top", ""), ("bottom", "1"))
    )
    try:
        value = Fraction(whole) + Fraction(top) / Fraction(bottom)
    except (ValueError, ZeroDivisionError):
        return None
    return Number(-value if match["sign"] == "-" else value, match["percent"] is not None)
