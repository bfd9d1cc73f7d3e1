"""The score that a judge states in free text.

What is read is the last place that states a score: `<score>7</score>`, JSON such as `{"score": 7}` at the end of the
answer, or a line such as "Score: 7", "**Score (0-10):** 7/10" or "I give it a score of 7.". Anything that could be
meant otherwise, such as "Score: 7-8" or "not a score of 9", has no score.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_core.tokenizer.thoughts import without_thoughts

NUMBER = r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?"
"""A number, once `plain_signs` has made its sign ASCII."""
_SIGNS = str.maketrans(
    dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-") | {"：": ":", "—": " - "}
)

_FENCED = re.compile(r"^[ \t]*```([^\n`]*)\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_QUOTED_LINE = re.compile(r"^[ \t]*>.*$", re.MULTILINE)
_TEXT_BLOCKS = ("", "json", "text", "txt", "markdown", "md")
"""What code blocks that may hold the answer itself are called."""
_TAGGED = re.compile(r"<((?:\w{1,30}_)?score)>(.{0,200}?)</\1>", re.DOTALL | re.IGNORECASE)
_MARKUP = re.compile(r"\*+|`+|^[ \t]*#+|(?<!\w)_+|_+(?!\w)", re.MULTILINE)
_LABEL = re.compile(r"(?<![A-Za-z0-9])(?<![A-Za-z0-9]-)score(?!-?[A-Za-z0-9]|_\w)", re.IGNORECASE)
_OTHER_SCORE = re.compile(
    r"\b(?:max(?:imum)?|min(?:imum)?|(?:high|low)est|best|worst|possible|perfect|full|passing|threshold)\s*$",
    re.IGNORECASE,
)
"""What comes before the name of another score than the one that is given."""
_DENIAL = re.compile(
    r"\b(?:not|no|never|nor|neither|none|without|cannot|hardly|unless|if|would|could|might|may|should|than|instead|"
    r"at least|at most)\b|n['’]t\b",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s)")

_RANGE = rf"(?P<low>{NUMBER})\s*(?:-|to)\s*(?P<high>{NUMBER})"
_BOUNDS = re.compile(rf"(?:\bof\s+)?{_RANGE}|\bof\s+(?P<top>{NUMBER})|/\s*(?P<over>{NUMBER})")
_BRACKET = r"[(\[][^()\[\]]{0,80}[)\]]"
_SCALE_WORDS = (
    rf"\s+(?:out\s+of\s+{NUMBER}|(?:on\s+(?:a|the)\s+scale\s+)?(?:of|from)\s+{NUMBER}\s*(?:-|to)\s*{NUMBER})"
)
_STATED = re.compile(
    rf"""
    ["']?
    (?P<about>(?:{_SCALE_WORDS}|\s+[^\W\d_]+(?=\W)){{0,8}}?)
    (?P<bracket>\s*{_BRACKET})?
    (?P<separator>["']?\s*(?:[:=]{{1,2}}|\||->|=>|→)\s*|\s+-\s+|\s+(?:is|of|equals)\s+|\s+)
    (?P<opened>(?:[("'\[<]|\ban?\s)?\s*\[?)\s*
    (?P<number>{NUMBER})
    (?P<over>\s*(?:/|\s(?:out\s+)?of\s)\s*(?P<top>{NUMBER}))?
    (?P<percent>\s*%)?
    """,
    re.VERBOSE,
)
_NOTE = re.compile(
    rf"\s*[(\[]\s*(?:(?:out\s+)?of\s+{NUMBER}|(?:[a-z]+:?\s+){{0,5}}{NUMBER}\s*(?:-|to)\s*{NUMBER})\s*[)\]]",
    re.IGNORECASE,
)
"""The scale, named after the number."""
MOST_LABELS, LONGEST_LINE = 64, 1000
"""Places that are tried, and characters of a line that are read on either side of a label."""
_UNIT = re.compile(r"\s*(?:points?|pts|stars?)\b", re.IGNORECASE)
_END = re.compile(r"""(?!\.\.)[\])>}"'|]*(?:\s*$|[.!,;)\]}"'|>]+(?:\s|$)|\s+(?=[|({\[])|\s+-\s)""")
_REASON = re.compile(r"\s+(?:because|since|as|for|due|based|given|with)\b", re.IGNORECASE)
_SECOND_THOUGHT = re.compile(
    r"\W*(?:or|to|and|maybe|perhaps|possibly|no|not|wait|actually|rather|if)\b", re.IGNORECASE
)


class Statement(NamedTuple):
    """A place that states a score: where it is, and the score as text, None if it has none that is clear.

    marked: whether it is in a form that nothing else has.
    """

    at: int
    number: str | None
    marked: bool = False


def plain_signs(text: str) -> str:
    """Write minus signs, dashes and colons in ASCII."""
    return text.translate(_SIGNS)


def as_number(text: str) -> float | None:
    """Read a text that is one number; None if it is anything else, or not finite."""
    text = plain_signs(text.strip())
    if re.fullmatch(NUMBER, text) is None:
        return None
    number = float(text.replace(",", ""))
    return number if math.isfinite(number) else None


def stated_score(answer: str, top: float = math.inf) -> str | None:
    """Return the score that an answer states, as it is written there; None if it states none, or none that is clear.

    top: the largest score, if there is a scale: "7/10" is 7 where it is 10 or not known, and unclear where it is
    another number; "70%" is 70 where it is 100, and unclear elsewhere.
    """
    text = plain_signs(without_thoughts(answer))
    statements = _statements(_QUOTED_LINE.sub("", _FENCED.sub("\n", text)), top)
    *_, last_block = [None, *_FENCED.finditer(text)]
    ends_in_block = last_block is not None and not text[last_block.end() :].strip()
    if not statements and ends_in_block and last_block[1].strip().lower() in _TEXT_BLOCKS:
        statements = _statements(last_block[2], top)
    if not statements:
        return None
    last = statements[-1]
    agree = all(each.number == last.number for each in statements if each.marked)
    return last.number if agree else None


def _statements(text: str, top: float) -> list[Statement]:
    """List the marked statements of a text, and the last one of its lines, in the order of the text."""
    statements = []
    for tagged in _TAGGED.finditer(text):
        statements.append(
            Statement(tagged.start(), _read_after_label(f": {tagged[2].strip()}", top), marked=True)
        )
    text = _TAGGED.sub(lambda tagged: " " * len(tagged[0]), text)
    start = text.find("{")
    if start >= 0 and text.rstrip().endswith("}"):
        found, number = _read_json(text[start:], top)
        if found:
            statements.append(Statement(start, number, marked=True))
            text = text[:start]
    text = _MARKUP.sub(lambda mark: " " * len(mark[0]), text)
    for label in reversed([*_LABEL.finditer(text)][-MOST_LABELS:]):
        statement = _read_label(text, label, top)
        if statement is not None:
            statements.append(statement)
            break
    return sorted(statements, key=lambda each: each.at)


def _read_json(text: str, top: float) -> tuple[bool, str | None]:
    """Return (whether a text is a JSON object with a score, the score)."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False, None
    scores = [item for key, item in value.items() if key.casefold() == "score"]
    if not scores:
        return False, None
    score: Any = scores[0]
    if len(scores) > 1 or isinstance(score, bool | Mapping | list | None):
        return True, None
    return True, _read_after_label(f": {score}", top)


def _read_label(text: str, label: re.Match[str], top: float) -> Statement | None:
    """Read the line of a label, "score"; None if it states nothing."""
    *_, before = text[max(label.start() - LONGEST_LINE, 0) : label.start()].split("\n")
    line, _, below = text[label.end() : label.end() + LONGEST_LINE].partition("\n")
    if line.strip() in ("", ":", "="):
        following = below.strip().partition("\n")[0]
        if re.match(r"[\[(]?[-+.]?\d", following) is not None:
            line = f": {following}"
    has_digit = any(map(str.isdigit, line))
    if not has_digit and re.match(r"[\"'>]?\s*[:=|]", line) is None:
        return None
    if _OTHER_SCORE.search(before) is not None:
        return None
    *_, clause = _SENTENCE_END.split(before)
    is_key = line.startswith(('"', "'"))
    is_quoted = clause.strip() != "" and before.endswith(('"', "'", "“", "‘")) and not is_key
    is_cut = before.endswith("<") or (is_key and "}" not in text[label.end() :])
    several = _LABEL.search(clause) is not None and any(map(str.isdigit, clause))
    if is_quoted or is_cut or several or _DENIAL.search(clause) is not None:
        return Statement(label.start(), None)
    return Statement(label.start(), _read_after_label(line, top))


def _read_after_label(line: str, top: float) -> str | None:
    """Read what follows the word "score" up to the end of its line."""
    # In runs of blanks the patterns would take more than linear time.
    line = re.sub(r"\s+", " ", line)
    stated = _STATED.match(line)
    if stated is None or _DENIAL.search(stated["about"]) is not None:
        return None
    separator, number = stated["separator"], stated["number"]
    if not separator.strip() and number.startswith(("-", "+")):
        return None
    notes, rest = _without_notes(line[stated.end() :])
    if not _is_complete(separator, rest):
        return None
    named = [stated["about"], stated["bracket"] or "", stated["over"] or "", *notes]
    bounds = [bound for part in named for bound in _bounds(part)]
    if stated["percent"] and top != 100:
        return None
    return number if _fits(as_number(number), bounds, top) else None


def _without_notes(rest: str) -> tuple[list[str], str]:
    """Take the scale and the unit off what follows a number, in either order: (what was taken, the rest)."""
    notes = []
    for pattern in (_NOTE, _UNIT, _NOTE):
        found = pattern.match(rest)
        if found is not None:
            notes.append(found[0])
            rest = rest[found.end() :]
    return notes, rest


def _is_complete(separator: str, rest: str) -> bool:
    """Whether a statement ends before `rest`, which has no other number and takes nothing back."""
    if any(map(str.isdigit, rest)) or _SECOND_THOUGHT.match(rest) is not None:
        return False
    is_labelled = re.match(r"[\"']?\s*[:=|\-→]", separator) is not None
    return _END.match(rest) is not None or (is_labelled and _REASON.match(rest) is not None)


def _fits(number: float | None, bounds: Sequence[tuple[float, float]], top: float) -> bool:
    """Whether a number lies within the scales that are named with it, and these end at `top`, if that is known."""
    if number is None or not all(low <= number <= high for low, high in bounds):
        return False
    return math.isinf(top) or all(high == top for _, high in bounds)


def _bounds(text: str) -> Iterator[tuple[float, float]]:
    """Yield the scales that a text names, such as "(0-10)" or "out of 10"."""
    for found in _BOUNDS.finditer(text):
        low = found["low"]
        high = found["high"] or found["top"] or found["over"]
        yield -math.inf if low is None else float(low.replace(",", "")), float(high.replace(",", ""))
