"""Score completions by their text, their length, or a comparison with the row's `answer` column."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from rlhf_core import REWARD, InputError, Registry, hookimpl
from rlhf_core.tokenizer.thoughts import without_thoughts
from rlhf_rewards.numbers import Number, final_number, read_number


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
            raise ValueError(f"pattern: '{self.pattern}' is not a regular expression: {error}") from None

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


def missing(answer: Any) -> bool:
    """Return whether a row has no answer; tables store a missing number as NaN."""
    return answer is None or (isinstance(answer, float) and answer != answer)


def exact_match(
    completions: Sequence[Any], answer: Sequence[Any], *, ignore_case: bool = False
) -> list[float | None]:
    """Return 1 where the completion equals the row's `answer` up to surrounding white space, else 0.

    Rows with a null answer are not scored (None). For chat data the last message's content is compared.

    Raises InputError for an answer that is not text, a number or a list of messages.
    """

    def normal(value: Any) -> str:
        text = completion_text(value).strip()
        return text.casefold() if ignore_case else text

    _require_readable("exact_match", _unreadable_texts(answer))
    return [
        None if missing(expected) else float(normal(completion) == normal(expected))
        for completion, expected in zip(completions, answer, strict=True)
    ]


def numeric_answer(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""Return 1 where the completion's final number equals the row's `answer` column, else 0.

    The answer is a number or its text, such as 72, "1,234", "$18", "3/4", "-7", "50%", or a solution that ends in
    "#### 72"; rows with a null answer are not scored (None). The completion's number is in its last \boxed{…}, else
    after its last "####", else after its last "answer is", else the last one. Values are compared as exact fractions:
    12.50 is 25/2, and 0.33 is not 1/3. A percentage equals the number before its sign and a hundredth of that number.
    A box with anything but one number, such as 2\sqrt{3}, is wrong: `math_verify` reads those. Thoughts, as between
    <think> and </think>, are not read.

    Raises InputError for answers that are not numbers.
    """

    def right(completion: Any, expected: Number) -> float:
        number = final_number(without_thoughts(completion_text(completion)))
        return float(number is not None and number.equals(expected))

    _require_readable("numeric_answer", _unreadable_numbers(answer))
    numbers = [None if missing(value) else _number(value) for value in answer]
    return [
        None if expected is None else right(completion, expected)
        for completion, expected in zip(completions, numbers, strict=True)
    ]


def _unreadable_texts(answers: Sequence[Any]) -> dict[int, str]:
    return {
        i: f"the answer {str(value)[:60]!r} is neither text nor a number; leave it null where the reward does "
        "not apply"
        for i, value in enumerate(answers)
        if not missing(value) and not _is_text(value)
    }


def _is_text(value: Any) -> bool:
    try:
        return isinstance(completion_text(value), str) and not isinstance(value, Mapping)
    except (LookupError, TypeError):
        return False


def _unreadable_numbers(answers: Sequence[Any]) -> dict[int, str]:
    return {
        i: f"the answer {str(value)[:60]!r} is not a number; leave it null where the reward does not apply, or use the "
        "reward 'exact_match' or 'math_verify'"
        for i, value in enumerate(answers)
        if not missing(value) and _number(value) is None
    }


def _number(answer: Any) -> Number | None:
    return None if isinstance(answer, bool) else read_number(str(answer))


def _require_readable(reward: str, unreadable: Mapping[int, str]) -> None:
    if unreadable:
        raise InputError(*(f"reward '{reward}': {text}" for text in dict.fromkeys(unreadable.values())))


# Called with the dataset's columns before training; names rows that cannot be scored. To mypy, functions
# have no attributes.
exact_match.check = lambda columns: _unreadable_texts(columns["answer"])  # type: ignore[attr-defined]
numeric_answer.check = lambda columns: _unreadable_numbers(columns["answer"])  # type: ignore[attr-defined]


@hookimpl
def rlhf_register(registry: Registry) -> None:
    registry.add(REWARD, "exact_match", exact_match)
    registry.add(REWARD, "numeric_answer", numeric_answer)
    registry.add(REWARD, "math_verify", "rlhf_rewards.math:MathVerify")
    registry.add(REWARD, "regex", Regex)
    registry.add(REWARD, "length", length)
    registry.add(REWARD, "soft_overlong", SoftOverlong)
    registry.add(REWARD, "repetition", repetition)
