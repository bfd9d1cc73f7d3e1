"""Rewards that compare a completion with the row's `answer` column: 1 where it is right, else 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.rewards.numerals import Number, final_number, read_number
from rlhf_core.rewards.text import said
from rlhf_core.rewards.unreadable import UnreadableError, checked_by, missing


def _unreadable_texts(columns: Mapping[str, Sequence[Any]]) -> dict[int, str]:
    return {
        i: f"the answer {str(value)[:60]!r} is neither a text nor a number; leave it null where the reward does "
        "not apply"
        for i, value in enumerate(columns.get("answer", ()))
        if not missing(value) and not _is_text(value)
    }


def _is_text(value: Any) -> bool:
    try:
        return isinstance(said(value), str) and not isinstance(value, Mapping)
    except (LookupError, TypeError):
        return False


@checked_by(_unreadable_texts)
def exact_match(
    completions: Sequence[Any], answer: Sequence[Any], *, ignore_case: bool = False
) -> list[float | None]:
    """1 where the completion equals the row's `answer` column but for surrounding white space, else 0.

    A row whose answer is null is not scored (None). For chat data the last message's content is compared.

    Raises InputError for an answer that is neither a text, a number nor a list of messages.
    """

    def normal(value: Any) -> str:
        text = said(value).strip()
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
    r"""1 where the completion's final number equals the row's `answer` column, else 0.

    The answer is a number or text that is one, as in 72, "1,234", "$18", "3/4", "-7", "50%", or a solution that ends in
    "#### 72"; null: the row is not scored (None). In the completion the last \boxed{…} counts, else the last "#### x",
    else the last "answer is x", else the last number. Values are compared as exact fractions: 12.50 is 25/2, and
    0.33 is not 1/3. A percentage equals the number before its sign and the hundredth of it. A box that holds
    something other than one number, such as 2\sqrt{3}, is wrong: `math_verify` reads those.

    Raises InputError for answers that are not numbers.
    """

    def right(completion: Any, expected: Number) -> float:
        found = final_number(said(completion))
        return float(found is not None and found.equals(expected))

    unreadable = _unreadable_numbers({"answer": answer})
    numbers = [None if missing(value) else _number(value) for value in answer]
    values = [
        None if expected is None else right(completion, expected)
        for completion, expected in zip(completions, numbers, strict=True)
    ]
    if unreadable:
        raise UnreadableError("numeric_answer", unreadable, values)
    return values
