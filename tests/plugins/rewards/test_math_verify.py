"""The reward `math_verify`: correct scores whatever happens to its worker processes."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from rlhf_rewards import MathVerify, math

from rlhf_core.errors import InputError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed: rlhf-rewards[math]"
)


@pytest.fixture(scope="module")
def reward() -> Any:
    return MathVerify()


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_mathematical_equality(reward: Any) -> None:
    right = [
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
        (r"so $\frac{\sqrt 2}{2}$", r"1/\sqrt{2}"),
        (chat(r"\boxed{(x+1)^2}"), "x^2 + 2x + 1"),
        (r"$\frac{1}{2}$", 0.5),
        ("The answer is 5", "$5$"),
    ]
    wrong = [(r"\boxed{x^2}", "x^3"), ("no idea", 3), ("", 3)]
    table = [*right, *wrong, ("5", None), ("5", float("nan"))]
    assert reward(*map(list, zip(*table, strict=True))) == [1] * 5 + [0] * 3 + [None] * 2
    with pytest.raises(InputError, match=r"math_verify.*leave it null"):
        reward(["5"], [""])


def test_an_unreadable_answer_is_found_before_training(reward: Any) -> None:
    assert list(reward.check({"answer": ["5", "", None, "x^2", ""]})) == [1, 4]


@pytest.mark.parametrize("answer", ["5", "-0.5", "1,234", r"\$18", "-$18", "１２", "½"])
def test_what_the_check_lets_pass_can_be_compared(reward: Any, answer: str) -> None:
    """Also where `numeric_answer` reads a number that math-verify does not."""
    if not reward.check({"answer": [answer]}):
        assert reward(["6"], [answer]) == [0]
        return
    with pytest.raises(InputError, match="cannot be parsed as mathematics"):
        reward(["6"], [answer])


def test_what_sympy_never_finishes_is_wrong_and_costs_the_others_nothing(reward: Any) -> None:
    hostile = r"\boxed{10^{10^{10}}}"
    assert MathVerify(seconds=1.0)([hostile, "4", hostile], [4, 4, 5]) == [0, 1, 0]


def test_the_workers_are_kept_and_many_comparisons_take_seconds(reward: Any) -> None:
    reward(["4", "5"], ["4", "5"])
    pool = math._pool()
    before = pool.processes
    hard = [rf"\frac{{{i}x^2+1}}{{\sqrt{{{i * i + 7}}}}}" for i in range(1, 101)]
    begin = time.perf_counter()
    assert reward([rf"\boxed{{{each}}}" for each in hard], hard) == [1] * 100
    assert time.perf_counter() - begin < 60  # one process per comparison would take minutes
    assert math._pool() is pool
    assert pool.processes[: len(before)] == before


def test_a_worker_that_is_killed_changes_no_verdict(reward: Any) -> None:
    pairs = [(rf"\boxed{{{i}+x}}", f"x+{i if i % 2 else i + 1}") for i in range(300)]
    reward(["4"], ["4"])

    def kills() -> None:
        killed: set[int] = set()
        for _ in range(20):
            time.sleep(0.1)
            for pid in set(math._pool().processes) - killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)  # the second kill hits it while it starts
            if len(killed) >= 4:
                break

    thread = threading.Thread(target=kills)
    thread.start()
    assert reward(*map(list, zip(*pairs, strict=True))) == [i % 2 for i in range(300)]
    thread.join()


def test_processes_that_die_each_time_are_an_error_and_not_a_wrong_answer(
    reward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dies:
        closed = False

        def outcomes(self, calls: Any, **limits: Any) -> list[Any]:
            return [math.DiedError("its process was ended by SIGKILL") for _ in calls]

    monkeypatch.setattr(math, "_pools", [Dies()])
    with pytest.raises(math.DiedError, match=r"ended by SIGKILL, whenever it compared '5' with '5'"):
        reward(["5"], ["5"])


PROGRAM = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)  # like a run, which stops after the update
from rlhf_rewards import MathVerify
reward = MathVerify()
assert reward(["4", "5"], ["4", "5"]) == [1, 1]
print("ready", flush=True)
right = reward([rf"\\boxed{{{i}+x}}" for i in range(600)], [f"x+{i}" for i in range(600)])
print(sum(right), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_whole_group_leave_right_answers_right(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as scorer:
        assert scorer.stdout is not None
        assert scorer.stdout.readline() == "ready\n"
        for _ in range(5):
            time.sleep(0.1)
            os.killpg(scorer.pid, number)
        assert scorer.stdout.readline() == "600.0\n"
    assert scorer.returncode == 0
