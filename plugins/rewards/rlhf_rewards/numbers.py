"""Numbers in answers and completions: plain text, LaTeX, other scripts, currency signs and units.

math-verify, which reads expressions, reads two in five of the numbers in tests/plugins/rewards/numeral_cases.py
otherwise: 1 234 as 234, 5 million as 5, 2½ as 2. And it finds one in "it is not 7", "5 or 6" and 2√3.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

LONGEST = 400
"""Most characters that a number may have."""
UNITS = (
    "km/h|mph|km|cm|mm|nm|kg|mg|lbs|lb|oz|ft|in|ml|mL|ms|min|mins|hrs|hr|am|pm|AM|PM|kW|kWh|Hz|kHz|MHz|GHz|GB|MB|kB|KB|"
    "USD|EUR|GBP|dollars|cents|degrees|deg"
)
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

_RUN = re.compile(r"(?:\d|\.\d)(?:\d|[.,'_](?=\d)| (?=\d{3}(?!\d)))*")
_PLAIN = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_GROUPED = re.compile(r"\d{1,3}([,'_ ])\d{3}(?:\1\d{3})*(?:\.\d+)?|\d{1,2}(?:,\d\d)+,\d{3}(?:\.\d+)?")
_LISTED = re.compile(r"(?:(?:0|[1-9]\d*)(?:\.\d+)?,){2,}((?:0|[1-9]\d*)(?:\.\d+)?)")
_VERSION = re.compile(r"\d+(?:\.\d+){2,}")
_EXPONENT = re.compile(r"[eE][-+]?\d{1,3}(?!\.?\d)")
_MIXED = re.compile(r"(\d{1,9}|\d{1,3}(?:,\d{3})+) +(\d{1,9}) ?/ ?(\d{1,9})(?! ?/|[.,]?\d)")
_OVER = re.compile(r" ?/ ?(?=\d)")
_PERCENT = re.compile(r" ?%| ?per ?cent\b", re.IGNORECASE)
_SCALE = re.compile(rf" ({'|'.join(SCALES)})\b", re.IGNORECASE)
_ATTACHED = re.compile(rf"(?:{UNITS})(?![A-Za-z\d])")
_ORDINAL = re.compile(r"(?:st|nd|rd|th)(?![A-Za-z\d])")
_DEGREES = re.compile(r" ?°(?: ?[CFK](?![A-Za-z]))?")
_WORD = r"(?:[mgshlL](?![\w^])|[A-Za-z]{2,}[A-Za-z/.²³-]*)(?: ?\^\{?[23]\}?)?"
_UNIT_WORDS = re.compile(rf"(?:\s+{_WORD})*")
_FEW_WORDS = re.compile(rf"(?: {{1,2}}{_WORD}){{0,3}}")
_LETTER = r"(?![×÷])[A-Za-zªµº\u00c0-\u052f]"
"""A letter that formulas use; other scripts write numbers within words."""
_DIGIT = r"[\d²³¹⁰⁴-⁹)\]}%]"
"""The end of an operand."""
_NAME = re.compile(rf"{_LETTER}_?$")
_OPERAND = re.compile(rf"(?:{_DIGIT}|{_LETTER})$")
_PART_BEFORE_SIGN = re.compile(rf"(?:[+-]|[\^×·÷√±/][ \t]*|{_DIGIT}(?:[ \t]*|\*[ \t]*))$")
_PART_BEFORE = re.compile(
    r"(?:[\^×·÷√±∓≤≥][ \t]*|\\(?!boxed)[A-Za-z]+ *\{? *|[}^_][ \t{]*\{[ \t]*"
    rf"|{_DIGIT}(?:\*\*|:|[ \t]*[-+/*][ \t]*)|{_LETTER}[+/])$"
)
_PART_AFTER = re.compile(
    r"[²³¹⁰⁴-⁹⁻ⁿ‰√(]|_[^\W_]|[ \t]*[\^\\√∞]|\*{1,2}[\dA-Za-z(]|/[A-Za-z](?![A-Za-z])|[:/',]\d"
)
_AGAIN = re.compile(r"(?:\s*(?:,|;|\bor\b|\band\b|\bto\b)){1,2} *[-+]?\.?\d", re.IGNORECASE)
_OPERATOR = re.compile(r" *(?:[+×·÷√^]|\*(?=[ \d(])|-(?=[ \d(])|/(?=[ \d(]))[ (]*")
_EQUALS = re.compile(r" *(?:=|≈) *")

_DENIED = re.compile(r"(?:\b(?:not|never|nor)|n't) (?:[A-Za-z]+ ){0,2}$", re.IGNORECASE)
_HASHES = re.compile(r"####[^\S\n]*([^\n]*)")
_ANSWER_IS = re.compile(
    r"answer[\s*_]*(?:is|:|=)[\s*_:=(\[{]*(?:[A-Za-z] *(?:=|≈) *)?(?=[-+]?\s?\.?\d)", re.IGNORECASE
)


class Number(NamedTuple):
    """A value, and whether a percent sign follows it."""

    value: Fraction
    percent: bool

    def equals(self, other: Number) -> bool:
        """Return whether both are the same number; 50% equals 50 and 1/2."""
        if self.percent == other.percent:
            return self.value == other.value
        share, plain = (self, other) if self.percent else (other, self)
        return plain.value in (share.value, share.value / 100)


class _Place(NamedTuple):
    """A run of digits in a text: its span, its number if it is one, and whether to skip it as part of a word."""

    start: int
    end: int
    number: Number | None
    word: bool = False


def read_number(text: str) -> Number | None:
    r"""Parse a text as one number, from its last \boxed{…} or after "####" where it has one; None if it is none."""
    text = plain_text(text)
    box = last_box(text)
    if box is not None:
        return _parse_alone(box)
    if "####" in text:
        return _after_hashes(text)
    return _parse_alone(text)


def final_number(text: str) -> Number | None:
    r"""Parse the final number of a text.

    The number in the last \boxed{…}; else on the last line that has only a number after "####"; else the first one
    after the last "answer is" (or ":" or "=") followed by digits, where "answer is 5 + 3 = 8" gives the one after the
    last equals sign; else the last one in the text. None where that place holds something else, such as 2√3 or
    "5 or 6" after "answer is", and where the last one is denied, as in "it is not 7".
    """
    text = plain_text(text)
    box = last_box(text)
    if box is not None:
        return _parse_alone(box)
    number = _after_hashes(text)
    if number is not None:
        return number
    marker = [None, *_ANSWER_IS.finditer(text)][-1]
    if marker is not None:
        return _parse_claim(text, marker.end())
    for line in reversed(text.splitlines()):
        tail = line[max(line.find(" ", len(line) - 1000), 0) :] if len(line) > 1000 else line
        for part in (tail, line):
            places = [place for place in _places(part) if not place.word]
            if places:
                last = places[-1]
                denied = _DENIED.search(part[max(last.start - 25, 0) : last.start]) is not None
                return None if denied or _is_coefficient(part, last.end) else last.number
            if part is line:
                break
    return None


def _after_hashes(text: str) -> Number | None:
    """Parse the last line that has a number and nothing else after "####"; Markdown headings use the same signs."""
    number = None
    for line in _HASHES.finditer(text):
        line_number = _parse_alone(line[1].strip(" \t\r*"))
        number = number if line_number is None else line_number
    return number


def _parse_alone(text: str) -> Number | None:
    """Parse a text that is one number, perhaps with a unit; of an equation, the right side."""
    text = re.split("[=≈]", text)[-1].strip().rstrip(".").strip(" \t\r\n*()")
    text = re.sub(r"^([-+]) +", r"\1", text)
    place = next(_places(text), None)
    if place is None or text[: place.start].strip():
        return None
    unit = _UNIT_WORDS.match(text, place.end)
    return place.number if unit is not None and not text[unit.end() :].strip() else None


def _parse_claim(text: str, start: int) -> Number | None:
    """Parse the number at `start`, or the result of a calculation that starts there."""
    number, calculated = None, False
    for _ in range(100):
        place = next(_places(text, start), None)
        if place is None or place.word or text[start : place.start].strip(" +-("):
            return None
        number = place.number
        unit = _FEW_WORDS.match(text, place.end)
        assert unit is not None
        for end in (unit.end(), place.end):
            close = end + len(text[end : end + 9]) - len(text[end : end + 9].lstrip(") "))
            after = _EQUALS.match(text, close)
            if after is not None:
                start = after.end()
                calculated = False
                break
            after = _OPERATOR.match(text, close)
            if after is not None:
                start = after.end()
                calculated = True
                break
        else:
            hedged = any(_AGAIN.match(text, at) for at in _word_starts(text, place.end, unit.end()))
            return None if calculated or hedged or _is_coefficient(text, place.end) else number
    return None


def _is_coefficient(text: str, end: int) -> bool:
    """Check whether a lone letter follows the number that ends here, as in "5 x"; not a unit, an article or "I"."""
    return re.match(r" (?![mgshlLaI](?!\w))[A-Za-z](?!\w)", text[end : end + 3]) is not None


def _word_starts(text: str, start: int, end: int) -> list[int]:
    """Return the positions at which words between `start` and `end` start or end."""
    return [start, end, *(start + match.start() for match in re.finditer(" +", text[start:end]))]


def _places(text: str, start: int = 0) -> Iterator[_Place]:
    """Yield every run of digits, in order."""
    while (run := _RUN.search(text, start)) is not None:
        place = _place(text, run)
        yield place
        start = place.end


def _fraction(text: str, digits: str, end: int) -> tuple[Fraction | None, int]:
    """Read a number that ends at `end`, and what it is divided by; None where that is zero."""
    value, end = _with_exponent(text, digits, end)
    over = _OVER.match(text, end)
    below = None if over is None else _RUN.match(text, over.end())
    if below is None:
        return value, end
    bottom, end = _with_exponent(text, below[0], below.end())
    return (value / bottom if value is not None and bottom else None), end


def _place(text: str, run: re.Match[str]) -> _Place:
    """Read the number at a run of digits: its value, then a percent sign, a scale or a unit, then what is around it."""
    start, end = run.span()
    word = False
    value: Fraction | None
    mixed = _MIXED.match(text, start)
    if mixed is not None and " " not in run[0]:
        value = _mixed_fraction(mixed)
        end = mixed.end()
    else:
        digits = run[0]
        if " " in digits and not _GROUPED.fullmatch(digits):  # several numbers: the last one
            digits = digits.rpartition(" ")[2]
            start = end - len(digits)
        word = _VERSION.fullmatch(digits) is not None
        value, end = _fraction(text, digits, end)
    percent, scale = _PERCENT.match(text, end), _SCALE.match(text, end)
    if percent is not None:
        end = percent.end()
    elif scale is not None and value is not None:
        value *= SCALES[scale[1].lower()]
        end = scale.end()
    degrees = _DEGREES.match(text, end)
    if degrees is not None:
        end = degrees.end()
    begin, negative, before = _before(text, start)
    unit, after = _after(text, end)
    word = word or before == "word" or after == "word"
    if value is None or "part" in (before, after):
        return _Place(begin, max(end, unit), None, word)
    if negative:
        value = -value
    return _Place(begin, unit, Number(value, percent is not None), word)


def _mixed_fraction(mixed: re.Match[str]) -> Fraction | None:
    """Return the value of a whole number and a fraction, as in 2 1/2; None where that divides by zero."""
    whole, top, bottom = (int(part.replace(",", "")) for part in mixed.groups())
    if not bottom:
        return None
    return whole + Fraction(top, bottom)


def _with_exponent(text: str, digits: str, end: int) -> tuple[Fraction | None, int]:
    value = _value(digits)
    exponent = _EXPONENT.match(text, end)
    if exponent is None:
        return value, end
    return None if value is None else value * Fraction(10) ** int(exponent[0][1:]), exponent.end()


def _value(digits: str) -> Fraction | None:
    if len(digits) > LONGEST:
        return None
    if _PLAIN.fullmatch(digits):
        return Fraction(digits)
    if _GROUPED.fullmatch(digits):
        return Fraction(re.sub("[,'_ ]", "", digits))
    listed = _LISTED.fullmatch(digits)
    return None if listed is None else Fraction(listed[1])


def _before(text: str, start: int) -> tuple[int, bool, str]:
    """Return (start of the number with its sign, whether it is negative, what the text before it makes it).

    "": a number; "part": part of something larger; "word": digits of a name.
    """
    near = text[max(start - 25, 0) : start]
    if near[-1:] not in ("+", "-"):
        if _NAME.search(near):
            return start, False, "word"
        return start, False, "part" if _PART_BEFORE.search(near) else ""
    sign, near = near[-1], near[:-1]
    if _OPERAND.search(near):
        return start, False, "part" if sign == "+" else ""  # pages 3-5
    return start - 1, sign == "-", "part" if _PART_BEFORE_SIGN.search(near) else ""


def _after(text: str, end: int) -> tuple[int, str]:
    """Return (end of the number with an attached unit, what the text after it makes it), as in `_before`."""
    near = text[end : end + 24]
    if re.match(_LETTER, near) is None:
        return end, "part" if _PART_AFTER.match(near) else ""
    if _ORDINAL.match(near):
        return end, "word"
    unit = _ATTACHED.match(near)
    return (end, "part") if unit is None else (end + unit.end(), "")


_BRACE = re.compile(r"(?P<box>\\boxed\s*)?\{|\}")
_CHARACTERS = (
    dict.fromkeys("−‐‑‒–﹣－", "-")
    | dict.fromkeys("\u00a0\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " ")
    | dict.fromkeys("\u200b\u2060\ufeff", "")
    | dict.fromkeys("’＇", "'")
    | dict(zip("＋．，％／＝＄⁄∕∙⋅∗＊：", "+.,%/=$//··**:", strict=True))
)
_PLAINER = tuple(
    (re.compile(pattern), plainer)
    for pattern, plainer in (
        (r"\\(?:left|right|displaystyle|textstyle|big|Big|bigg|Bigg)(?![A-Za-z])", ""),
        (r"\\!", ""),
        (r"\{,\}", ","),
        (r"\\[,;: ]|\\q?quad(?![A-Za-z])|~|\\\\|\\[()\[\]]", " "),
        (r"\\([$%#&_])", r"\1"),
        (r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mathit|mbox|emph)\s*\{([^{}]*)\}", r" \1 "),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\(?:degree|circ)(?![A-Za-z])", "°"),
        (r"\\(?:cdot|times)(?![A-Za-z])", "×"),
        (r"\\approx(?![A-Za-z])", "≈"),
        (r"\\pm(?![A-Za-z])", "±"),
        (r"\\div(?![A-Za-z])", "÷"),
        (r"(?<=\d)\s*\\([dtc]?frac)", r" \\\1"),
        (r"\\[dtc]?frac\s*(\d)\s*(\d)(?!\d)", r"\1/\2"),
        (r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))", r"\1\2/\3\4"),
        (r"(?<=[-+])\s*[$€£¥₹]", ""),
        (r"[$€£¥₹]", " "),
    )
)
"""Replacements of LaTeX and currency signs, applied in this order."""


def plain_text(text: str) -> str:
    """Rewrite digits, signs, fractions and units in ASCII where ASCII has them."""
    if not text.isascii():
        text = re.sub(r"(?<=\d) *\0", " ", "".join(map(_character, text))).replace("\0", "")
    for pattern, plainer in _PLAINER:
        text = pattern.sub(plainer, text)
    return text


@lru_cache(4096)
def _character(c: str) -> str:
    if c in _CHARACTERS:
        return _CHARACTERS[c]
    if c.isdecimal():
        return str(unicodedata.decimal(c))
    shape = unicodedata.normalize("NFKC", c)
    if "⁄" in shape and len(shape) > 2:  # ½ is one letter
        return f"\0{shape.replace('⁄', '/')}"
    return c


def last_box(text: str) -> str | None:
    r"""Return the content of the closed \boxed{…} that starts last; None if no box is closed."""
    begun: list[int | None] = []  # where the content of each open brace starts; None: not a box
    start, end = -1, -1
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            begun.append(brace.end() if brace["box"] else None)
        elif begun and (inside := begun.pop()) is not None and inside > start:
            start = inside
            end = brace.start()
    return text[start:end] if start >= 0 else None
