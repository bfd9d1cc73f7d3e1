"""Rewards that compare a completion with the row's `answer` column: 1 where it is right, else 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_core.errors import InputError
from rlhf_core.rewards.numerals import Number, final_number, read_number
from rlhf_core.rewards.text import said


def exact_match(
    completions: Sequence[Any], answer: Sequence[Any], *, ignore_case: bool = False
) -> list[float | None]:
    """1 where the completion equals the row's `answer` column but for surrounding white space, else 0.

    A row whose answer is null is not scored (None). For chat data the last message's content is compared.
    """

    def normal(value: Any) -> str:
        text = said(value).strip()
        return text.casefold() if ignore_case else text

    return [
        None if expected is None else float(normal(completion) == normal(expected))
        for completion, expected in zip(completions, answer, strict=True)
    ]


def numeric_answer(completions: Sequence[Any], answer: Sequence[Any]) -> list[float | None]:
    r"""1 where the completion's final number equals the row's `answer` column, else 0.

    The answer is a number or text that is one, as in 72, "1,234", "$18", "3/4", "-7", "50%", or a solution that ends in
    "#### 72"; null: the row is not scored (None). In the completion the last \boxed{…} counts, else the last "#### x",
    else the last "answer is x", else the last number. Values are compared as exact fractions: 12.50 is 25/2, and
    0.33 is not 1/3. A percentage equals the number before its sign and the hundredth of it. A box that holds
    something other than one number, such as 2\sqrt{3}, is wrong: `math_verify` reads those.

    Raises InputError for an answer that is not a number.
    """

    def right(completion: Any, expected: Number) -> float:
        found = final_number(said(completion))
        return float(found is not None and found.equals(expected))

    numbers = [_expected(value) for value in answer]
    return [
        None if expected is None else right(completion, expected)
        for completion, expected in zip(completions, numbers, strict=True)
    ]


def _expected(answer: Any) -> Number | None:
    if answer is None or answer != answer:  # a table's missing number is NaN
        return None
    number = None if isinstance(answer, bool) else read_number(str(answer))
    if number is None:
        raise InputError(
            f"reward 'numeric_answer': the answer {str(answer)[:60]!r} is not a number; leave it null where the reward "
            "does not apply, or use the reward 'exact_match' or 'math_verify'"
        )
    return number
