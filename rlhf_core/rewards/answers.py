"""Score completions by their text, their length, or a comparison with the row's `answer` column."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from rlhf_core.rewards.plain_text import last_box, plain_text
from rlhf_core.rewards.unreadable_rows import UnreadableError, checked_by, missing


def completion_text(completion: Any) -> str:
    """Return a completion's text; for a message list, the last message's content."""
    return str(completion[-1]["content"] if isinstance(completion, list) else completion)


@dataclass(frozen=True)
class Regex:
    r"""Return 1 where the whole completion matches `pattern`, else 0; a dot also matches a line break.

    pattern: a regular expression of Python's `re`, such as "<think>.*</think>\\s*<answer>.*</answer>".
    For chat data the last message's content is matched.
    """

    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern: {self.pattern!r} is not a regular expression: {error}") from None

    def __call__(self, completions: Sequence[Any]) -> list[float]:
        pattern = re.compile(self.pattern, re.DOTALL)
        return [
            float(pattern.fullmatch(completion_text(completion)) is not None) for completion in completions
        ]


def length(
    completion_ids: Sequence[Sequence[int]], *, target: Annotated[int, Field(ge=1)] = 100
) -> list[float]:
    """Return -|tokens - target| / target, stop token included: 0 at `target`, -1 at 0 and at 2 × target tokens."""
    return [-abs(len(ids) - target) / target for ids in completion_ids]


@dataclass(frozen=True)
class SoftOverlong:
    """Penalize long completions with DAPO's soft overlong punishment (Yu et al. 2025, equation 13).

    0 up to max_length - cache tokens, stop token included; then (max_length - cache - tokens) / cache, which reaches
    -1 at max_length; -1 beyond.

    max_length: tokens at which the penalty is full. cache: tokens before max_length over which the penalty grows.
    """

    max_length: Annotated[int, Field(ge=1)]
    cache: Annotated[int, Field(ge=1)]

    def __post_init__(self) -> None:
        if self.cache > self.max_length:
            raise ValueError(
                f"cache={self.cache} is more than max_length={self.max_length}: the penalty would begin below 0 tokens"
            )

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        free = self.max_length - self.cache
        return [max(min(free - len(ids), 0) / self.cache, -1.0) for ids in completion_ids]


def repetition(
    completion_ids: Sequence[Sequence[int]],
    *,
    ngram: Annotated[int, Field(ge=1)] = 3,
    penalty: Annotated[float, Field(le=0)] = -1.0,
) -> list[float]:
    """Return penalty × (1 − distinct n-grams / n-grams) of the tokens, stop token included (Yeo et al. 2025).

    0 where no n-gram repeats, and for completions shorter than `ngram` tokens; close to `penalty` where one n-gram
    fills the completion.
    """

    def repetition_penalty(ids: Sequence[int]) -> float:
        grams = [tuple(ids[i : i + ngram]) for i in range(len(ids) - ngram + 1)]
        return -penalty * (len(set(grams)) / len(grams) - 1) if grams else 0.0

    return [repetition_penalty(ids) for ids in completion_ids]


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
_COMMAND = re.compile(r"\\(?!boxed)[A-Za-z]+ *\{? *$")
_AGAIN = re.compile(r"(?:\s*(?:,|;|\bor\b|\band\b|\bto\b)){1,2} *[-+]?\.?\d", re.IGNORECASE)
_OPERATOR = re.compile(r" *(?:[+×·÷√^]|\*(?=[ \d(])|-(?=[ \d(])|/(?=[ \d(]))[ (]*")
_EQUALS = re.compile(r" *(?:=|≈) *")

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
    if (box := last_box(text)) is not None:
        return _parse_alone(box)
    if "####" in text:
        return _after_hashes(text)
    return _parse_alone(text)


def final_number(text: str) -> Number | None:
    r"""Parse the final number of a text.

    The number in the last \boxed{…}; else on the last line that has only a number after "####"; else the first one
    after the last "answer is" (or ":" or "=") followed by digits, where "answer is 5 + 3 = 8" gives the one after the
    last equals sign; else the last one in the text. None where that place holds something else, such as 2√3 or
    "5 or 6" after "answer is".
    """
    text = plain_text(text)
    if (box := last_box(text)) is not None:
        return _parse_alone(box)
    if (number := _after_hashes(text)) is not None:
        return number
    marker = None
    for marker in _ANSWER_IS.finditer(text):  # noqa: B007
        pass
    if marker is not None:
        return _parse_claim(text, marker.end())
    for line in reversed(text.splitlines()):
        tail = line[max(line.find(" ", len(line) - 1000), 0) :] if len(line) > 1000 else line
        for part in (tail, line):
            places = [place for place in _places(part) if not place.word]
            if places:
                return None if _is_coefficient(part, places[-1].end) else places[-1].number
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
            if (after := _EQUALS.match(text, close)) is not None:
                start, calculated = after.end(), False
                break
            if (after := _OPERATOR.match(text, close)) is not None:
                start, calculated = after.end(), True
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


def _place(text: str, run: re.Match[str]) -> _Place:
    start, end = run.span()
    word, percent = False, False
    value: Fraction | None
    if (mixed := _MIXED.match(text, start)) is not None and " " not in run[0]:
        whole, top, bottom = (int(part.replace(",", "")) for part in mixed.groups())
        value, end = (whole + Fraction(top, bottom) if bottom else None), mixed.end()
    else:
        digits = run[0]
        if " " in digits and not _GROUPED.fullmatch(digits):  # several numbers: the last one
            digits = digits.rpartition(" ")[2]
            start = end - len(digits)
        word = _VERSION.fullmatch(digits) is not None
        value, end = _with_exponent(text, digits, end)
        if (over := _OVER.match(text, end)) is not None and (
            below := _RUN.match(text, over.end())
        ) is not None:
            bottom_value, end = _with_exponent(text, below[0], below.end())
            value = value / bottom_value if value is not None and bottom_value else None
    if (sign := _PERCENT.match(text, end)) is not None:
        percent, end = True, sign.end()
    elif (scale := _SCALE.match(text, end)) is not None and value is not None:
        value, end = value * SCALES[scale[1].lower()], scale.end()
    if (degrees := _DEGREES.match(text, end)) is not None:
        end = degrees.end()
    begin, negative, before = _before(text, start)
    unit, after = _after(text, end)
    word = word or before == "word" or after == "word"
    if value is None or "part" in (before, after):
        return _Place(begin, max(end, unit), None, word)
    return _Place(begin, unit, Number(-value if negative else value, percent), word)


def _with_exponent(text: str, digits: str, end: int) -> tuple[Fraction | None, int]:
    value = _value(digits)
    if (exponent := _EXPONENT.match(text, end)) is None:
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
    sign = text[start - 1] if start and text[start - 1] in "+-" else ""
    at = start - len(sign)
    near = text[max(at - 24, 0) : at]
    touching, last = near[-1:], near.rstrip(" \t")[-1:]
    if sign:
        if _operand(touching) or _letter(touching):
            return start, False, "part" if sign == "+" else ""  # pages 3-5
        factor = last == "*" and _operand(near.rstrip(" \t")[-2:-1])
        broken = touching in ("+", "-") or _operand(last) or factor or (last and last in "^×·÷√±/")
        return at, sign == "-", "part" if broken else ""
    if _letter(touching):
        return start, False, "word"
    if touching == "_" and _letter(near[-2:-1]):
        return start, False, "word"
    if last and last in "^×·÷√±∓≤≥":
        return start, False, "part"
    if _COMMAND.search(near) or (last == "{" and near.rstrip(" \t{")[-1:] in ("}", "^", "_")):
        return start, False, "part"
    if last and last in "+-/*:":
        earlier = near.rstrip(" \t")[:-1]
        if last == "*" and earlier.endswith("*"):  # 10**3, but not a word in bold
            return start, False, "part" if touching == "*" and _operand(earlier[-2:-1]) else ""
        operand = _operand(earlier[-1:] if last == ":" else earlier.rstrip(" \t")[-1:])
        if last == ":":
            operand = operand and touching == ":"
        elif last != "-":
            operand = operand or (touching == last and last in "+/" and _letter(earlier[-1:]))
        return start, False, "part" if operand else ""
    return start, False, ""


def _after(text: str, end: int) -> tuple[int, str]:
    """Return (end of the number with an attached unit, what the text after it makes it), as in `_before`."""
    near = text[end : end + 24]
    touching = near[:1]
    if _letter(touching):
        if _ORDINAL.match(near):
            return end, "word"
        unit = _ATTACHED.match(near)
        return (end + unit.end(), "") if unit is not None else (end, "part")
    if touching and (touching in "²³¹⁰⁴⁵⁶⁷⁸⁹⁻ⁿ‰√(_" and not (touching == "_" and not near[1:2].isalnum())):
        return end, "part"
    following = near.lstrip(" \t")
    if following[:1] in ("^", "\\", "√", "∞") and following[:1]:
        return end, "part"
    if re.match(r"\*{1,2}[\dA-Za-z(]|:\d|/[A-Za-z](?![A-Za-z])|/\d|'\d|,\d", near):
        return end, "part"
    return end, ""


def _operand(c: str) -> bool:
    return c.isdigit() or (c != "" and c in ")]}%")


def _letter(c: str) -> bool:
    """Return whether `c` is a letter that formulas use; other scripts write numbers within words."""
    return c.isalpha() and c < "\u0530"


def _unreadable_texts(columns: Mapping[str, Sequence[Any]]) -> dict[int, str]:
    return {
        i: f"the answer {str(value)[:60]!r} is neither a text nor a number; leave it null where the reward does "
        "not apply"
        for i, value in enumerate(columns.get("answer", ()))
        if not missing(value) and not _is_text(value)
    }


def _is_text(value: Any) -> bool:
    try:
        return isinstance(completion_text(value), str) and not isinstance(value, Mapping)
    except (LookupError, TypeError):
        return False


@checked_by(_unreadable_texts)
def exact_match(
    completions: Sequence[Any], answer: Sequence[Any], *, ignore_case: bool = False
) -> list[float | None]:
    """Return 1 where the completion equals the row's `answer` up to surrounding white space, else 0.

    Rows with a null answer are not scored (None). For chat data the last message's content is compared.

    Raises InputError for an answer that is neither a text, a number nor a list of messages.
    """

    def normal(value: Any) -> str:
        text = completion_text(value).strip()
        return text.casefold() if ignore_case else text

    unreadable = _unreadable_texts({"answer": answer})
    values = [
        None if missing(expected) or i in unreadable else float(normal(completion) == normal(expected))
        for i, (completion, expected) in enumerate(zip(completions, answer, strict=True))
    ]
    if unreadable:
        raise UnreadableError("exact_match", unreadable, values)
    return values


def _unreadable_numbers(columns: Mapping[str, Sequence[Any]]) -> dict[int, str]:
    return {
        i: f"the answer {str(value)[:60]!r} is not a number; leave it null where the reward does not apply, or use the "
        "reward 'exact_match' or 'math_verify'"
        for i, value in enumerate(columns.get("answer", ()))
        if not missing(value) and _number(value) is None
    }


def _number(answer: Any) -> Number | None:
    return None if isinstance(answer, bool) else read_number(str(answer))


@checked_by(_unreadable_numbers)
def numeric_answer(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""Return 1 where the completion's final number equals the row's `answer` column, else 0.

    The answer is a number or its text, such as 72, "1,234", "$18", "3/4", "-7", "50%", or a solution that ends in
    "#### 72"; rows with a null answer are not scored (None). The completion's number is in its last \boxed{…}, else
    after its last "####", else after its last "answer is", else the last one. Values are compared as exact fractions:
    12.50 is 25/2, and 0.33 is not 1/3. A percentage equals the number before its sign and a hundredth of that number.
    A box with anything but one number, such as 2\sqrt{3}, is wrong: `math_verify` reads those.

    Raises InputError for answers that are not numbers.
    """

    def right(completion: Any, expected: Number) -> float:
        number = final_number(completion_text(completion))
        return float(number is not None and number.equals(expected))

    unreadable = _unreadable_numbers({"answer": answer})
    numbers = [None if missing(value) else _number(value) for value in answer]
    values = [
        None if expected is None else right(completion, expected)
        for completion, expected in zip(completions, numbers, strict=True)
    ]
    if unreadable:
        raise UnreadableError("numeric_answer", unreadable, values)
    return values
