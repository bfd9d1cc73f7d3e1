"""The built-in rewards: their formulas, numbers from papers, and invalid options."""

from __future__ import annotations

import importlib.util
import json
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rlhf_rewards import numeric_answer
from rlhf_rewards.numbers import Number, final_number, read_number

from rlhf_core import REWARD, Registry, installed_registry
from rlhf_core.errors import InputError
from rlhf_core.plugins import load_file

cases = load_file(Path(__file__).with_name("numeral_cases.py"))


@pytest.fixture(scope="module")
def registry() -> Registry:
    return installed_registry()


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (72, "so it is 72.", "so it is 73"),
        ("1,234", "1234", "234"),
        (1234, "that makes $1,234.00", "1,2345"),
        ("$18", "She makes $18 a day", "She makes $1.8 a day"),
        ("3/4", "0.75", "3"),
        (0.75, "three quarters, 3/4", "4/3"),
        ("12.50", "$12.5", "1250"),
        ("-7", "it fell to −7", "7"),
        ("-$7", "$-7", "10-7"),
        (0.1, "0.10", "0.1000001"),
        (1e16, "10000000000000000", "1e15"),
        ("7/4", "1 3/4 cups", "3/4"),
        ("so 48 + 24 = 72 clips\n#### 72", "#### 72", "#### 24"),
        (r"\boxed{\frac{3}{4}}", r"\boxed{\dfrac{3}{4}}", r"\boxed{\frac{4}{3}}"),
        (10, "答案是10", "10e1"),
        (5, "16-11=5", "v5 H2O5"),
    ],
)
def test_numbers_are_equal_as_numbers(answer: Any, right: str, wrong: str) -> None:
    assert numeric_answer([right, wrong, chat(right), chat(wrong)], [answer] * 4) == [1, 0, 1, 0]


def number(written: str | None) -> Number | None:
    """Parse a number as the table writes it."""
    if written is None:
        return None
    top, _, bottom = written.rstrip("%").partition("/")
    return Number(Fraction(top) / Fraction(bottom or 1), written.endswith("%"))


@pytest.mark.parametrize("text", cases.ALONE)
def test_what_is_a_number_alone(text: str) -> None:
    assert read_number(text) == number(cases.ALONE[text])
    assert final_number(rf"7 and \boxed{{{text}}} or 9") == number(cases.ALONE[text])


@pytest.mark.parametrize("text", cases.FINAL)
def test_what_number_a_text_ends_in(text: str) -> None:
    assert final_number(text) == number(cases.FINAL[text])


def test_a_percentage_equals_its_number_and_its_share() -> None:
    assert numeric_answer(["50%", "50", "0.5", "1/2", "5000%", r"\boxed{50\%}"], ["50%"] * 6) == [
        1,
        1,
        1,
        1,
        0,
        1,
    ]
    assert numeric_answer(["50%", "50 %", "50%"], [50, 0.5, 5]) == [1, 1, 0]


def test_no_answer_is_not_scored_and_a_wrong_kind_is_an_error() -> None:
    assert numeric_answer(["5", "5"], [None, float("nan")]) == [None, None]
    thoughts = [r"<think>\boxed{5}</think> The answer is 6.", r"\boxed{5}</think> 6", "6 <think> or 5"]
    assert numeric_answer(thoughts, [6] * 3) == [1, 1, 1]
    assert numeric_answer(["<think> it is 5", "<think>5</think>"], [5] * 2) == [0, 0]
    for answer in ("five", True, float("inf"), "", "3 or 4", "#### none"):
        with pytest.raises(InputError, match=r"numeric_answer.*is not a number; leave it null"):
            numeric_answer(["5"], [answer])


def test_hostile_completions_take_no_time() -> None:
    hostile = [
        "9" * 100_000,
        "1,111" * 30_000,
        r"\boxed{" * 20_000,
        r"\frac{" * 20_000,
        "#### 1" + " a" * 20_000,
    ]
    hostile += ["1 " * 50_000, "answer is " + "*" * 50_000, "1/" * 50_000, " " * 100_000]
    begin = time.perf_counter()
    numeric_answer(hostile, [1] * len(hostile))
    assert time.perf_counter() - begin < 5


@pytest.mark.data
def test_solutions_of_grade_school_problems(shared: Path) -> None:
    def rows(name: str) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (shared / "data" / name).read_text(encoding="utf-8").splitlines()
        ]

    problems = rows("math/gsm8k.test.jsonl")
    solutions = [row["meta"]["solution"] for row in problems]
    assert numeric_answer(solutions, [row["answer"] for row in problems]) == [1] * len(problems)
    assert numeric_answer([row["answer"] for row in problems], solutions) == [1] * len(problems)
    answers = {row["prompt"][0]["content"]: row["answer"] for row in problems}
    pairs = rows("prefs/gsm8k_solutions.jsonl")
    expected = [answers[row["prompt"][0]["content"]] for row in pairs]
    assert numeric_answer([row["chosen"] for row in pairs], expected) == [1] * len(pairs)
    assert numeric_answer([row["rejected"] for row in pairs], expected) == [0] * len(pairs)


def test_a_missing_package_is_said_before_anything_runs(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    expected = "needs the package math-verify, which is not installed: pip install 'rlhf-rewards[math]'"
    assert [message for _, message in registry.check(REWARD, "math_verify", {})] == [
        f"reward 'math_verify' {expected}"
    ]
    with pytest.raises(InputError, match="pip install"):
        registry.get(REWARD, "math_verify")


def test_a_pattern_matches_the_whole_completion(registry: Registry) -> None:
    reward = registry.get(REWARD, "regex", pattern=r"<think>.*</think>\s*<answer>.*</answer>")
    good = "<think>a\nb</think>\n<answer>4</answer>"
    assert reward([good, chat(good), good + " so", "<answer>4</answer>", ""]) == [1, 1, 0, 0, 0]


def test_soft_overlong_is_equation_13_of_dapo(registry: Registry) -> None:
    def equation(tokens: int, longest: int, cache: int) -> float:
        if tokens <= longest - cache:
            return 0.0
        return (longest - cache - tokens) / cache if tokens <= longest else -1.0

    lengths = [0, 50, 80, 81, 90, 99, 100, 101, 110]
    reward = registry.get(REWARD, "soft_overlong", max_length=100, cache=20)
    values = reward([[5] * n for n in lengths])
    np.testing.assert_allclose(values, [equation(n, 100, 20) for n in lengths], rtol=1e-12)
    assert [values[lengths.index(n)] for n in (50, 90, 110)] == [0, -0.5, -1]
    assert registry.get(REWARD, "soft_overlong", max_length=10, cache=10)([[], [5] * 5]) == [0, -0.5]


@pytest.mark.parametrize(
    ("ids", "ngram", "penalty", "value"),
    [
        ([5] * 5, 2, -1.0, -0.75),
        ([1, 2] * 3, 2, -1.0, -0.6),
        ([5] * 5, 2, -0.5, -0.375),
        ([1, 2, 3, 1, 2, 3], 2, -1.0, -0.4),
        ([1, 2, 3, 1, 2, 3], 3, -1.0, -0.25),
        ([1, 2, 3, 4], 2, -1.0, 0.0),
        ([5], 2, -1.0, 0.0),
        ([], 1, -1.0, 0.0),
    ],
)
def test_repetition(registry: Registry, ids: list[int], ngram: int, penalty: float, value: float) -> None:
    reward = registry.get(REWARD, "repetition", ngram=ngram, penalty=penalty)
    assert reward([ids]) == [pytest.approx(value, abs=1e-12)]


def test_length_and_exact_match(registry: Registry) -> None:
    assert registry.get(REWARD, "length", target=4)([[1] * n for n in (4, 0, 8, 6)]) == [0, -1, -1, -0.5]
    exact = registry.get(REWARD, "exact_match")
    assert exact([" four\n", "Four", chat("four"), "x"], ["four", "four", "four", None]) == [1, 0, 1, None]
    assert registry.get(REWARD, "exact_match", ignore_case=True)(["Four"], ["fOUR "]) == [1]
