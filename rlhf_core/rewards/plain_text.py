"""Rewrite numbers in LaTeX, in other scripts and with currency signs as plain characters."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

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
            start, end = inside, brace.start()
    return text[start:end] if start >= 0 else None
