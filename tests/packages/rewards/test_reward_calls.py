"""Calls that fail or take too long."""

from __future__ import annotations

import asyncio
import functools
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_core import REWARD, Registry, RewardInputs
from rlhf_core.errors import InputError, RunError
from rlhf_core.plugins import load_file
from rlhf_core.rollouts import Reward, WeightedReward, logged_metrics, open_rewards, score, set_up

INPUTS = RewardInputs(["a"] * 3, ["x y", "x", ""], [[5, 6, 1], [5, 1], [1]], {})
SOON = 0.2  # timeout in seconds of the slow functions below


def stage_with(registry):
    return SimpleNamespace(name="policy", registry=registry, inputs={})


FUNCTIONS = """
import os, re, time
from dataclasses import dataclass
from pathlib import Path

import numpy

SEEN = Path(__file__).with_name("pids")

def note():
    with SEEN.open("a") as file:
        print(os.getpid(), file=file)

def pids():
    return SEEN.read_text().split()

def backtracks(completions):
    note()
    return [float(bool(re.fullmatch("(a+)+b", "a" * 60))) for _ in completions]

def slow_once(completions):
    first = not SEEN.with_name("slow").exists()
    SEEN.with_name("slow").touch()
    time.sleep(60 * first)
    return [1.0] * len(completions)

def lengths(completions, *, by=1):
    return [by * len(text) for text in completions]

async def double(completions):
    return [4.0] * len(completions)

def returns_an_awaitable(completions):
    return double(completions)

@dataclass(frozen=True)
class Scaled:
    by: int
    def __call__(self, completions):
        return [self.by * len(text) for text in completions]

def arrays(completions):
    return numpy.array([1 / 3] * len(completions))

def meets(completions, *, name, directory):
    (Path(directory) / name).touch()
    end = time.monotonic() + 30
    while len(list(Path(directory).iterdir())) < 3:  # needs three calls at the same time
        assert time.monotonic() < end
        time.sleep(0.01)
    return [1.0] * len(completions)

def where(completions, number):
    time.sleep(0.1)
    return [os.getpid() * 10**6 + 1000 * i + len(completions) for i in number]

def one(completions):
    return [1.0]

def broken(completions):
    raise ConnectionError("no route")

def logs(completions, *, log_metric=None, by=1):
    log_metric("words", by * sum(len(text.split()) for text in completions))
    return [1.0] * len(completions)

def fails(completions):
    return [{"x y": 1, "x": 2}[text] if text else {}["gold"] for text in completions]
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory, close_workers):
    """Load a file of reward functions, like a user's."""
    file = tmp_path_factory.mktemp("rewards") / "mine.py"
    file.write_text(FUNCTIONS)
    return load_file(file)


def ones(completions):
    return [1.0] * len(completions)


def broken(completions):
    raise ConnectionError("no route")


async def endless(completions):
    await asyncio.sleep(60)


async def logs(completions, log_metric):
    for text in completions:
        log_metric("words", np.int64(len(text.split())))
    return [None] + [1.0] * (len(completions) - 1)


class Logs:
    def setup(self, stage):
        pass

    def __call__(self, completions, log_metric, **columns):
        assert set(columns) == {"prompts", "completion_ids"}
        log_metric("part/words", 7)
        return [0.0] * len(completions)


def unaware(completions, **columns):
    assert "log_metric" not in columns
    return [0.0] * len(completions)


def test_rewards_log_metrics_of_their_own(mine):
    """Averaged over the calls of `log_metric`; from worker processes too, and not those of a call before."""
    registry = Registry()
    registry.add(REWARD, "logs", mine.logs)
    by_ten = registry.get(REWARD, "logs", by=10)
    rewards = [
        Reward("plain", 1.0, by_ten),
        Reward("async", 1.0, logs),
        Reward("mesh", 1.0, Logs()),
        Reward("unaware", 1.0, unaware),
    ]
    expected = {"rewards/plain/words": 30.0, "rewards/async/words": 1.0, "rewards/mesh/part/words": 7.0}
    for _ in range(2):
        score(rewards, INPUTS)
        assert logged_metrics(rewards) == expected
    worker = Reward("worker", 1.0, by_ten, processes=2)
    score([worker], INPUTS._replace(prompts=["a", "b", "b"]))
    assert logged_metrics([worker]) == {"rewards/worker/words": 15.0}  # 20 and 10

    def reward(completions, log_metric):
        log_metric("x", 1.0)
        raise OSError("gone")

    rewards = [Reward("judge", 1.0, reward, on_error="skip"), Reward("ones", 1.0, ones)]
    with pytest.warns(UserWarning, match="reward 'judge' raised OSError: gone"):
        score(rewards, INPUTS)
    assert logged_metrics(rewards) == {}


async def late_to_end(completions):
    try:
        await asyncio.sleep(30)
    finally:
        await asyncio.sleep(30)


def test_an_asynchronous_function_that_awaits_again_when_cancelled_is_left_behind(close_workers):
    begin = time.perf_counter()
    stuck = Reward("stuck", 1.0, late_to_end, timeout=0.1, on_error="skip")
    with pytest.warns(UserWarning, match=r"'stuck' took longer than its timeout of 0\.1 s"):
        values = score(
            [stuck, Reward("ones", 1.0, ones), Reward("double", 1.0, doubles, timeout=1.0)], INPUTS
        )
    assert np.isnan(values[:, 0]).all()
    assert values[:, 1:].tolist() == [[1, 2]] * 3
    assert score([Reward("double", 1.0, doubles)], INPUTS).tolist() == [[2]] * 3
    close_workers()
    assert time.perf_counter() - begin < 5


async def doubles(completions):
    return [2.0] * len(completions)


def test_a_plain_function_is_ended_at_its_timeout_and_the_next_call_is_as_any_other(mine):
    begin = time.perf_counter()
    with pytest.raises(RunError, match=r"^reward 'slow' took longer than its timeout of 1 s$"):
        score([Reward("slow", 1.0, mine.backtracks, timeout=1.0)], INPUTS)
    assert time.perf_counter() - begin < 20  # alone, the regular expression takes days
    assert not [pid for pid in mine.pids() if Path(f"/proc/{pid}").exists()]

    reward = Reward("slow", 1.0, mine.slow_once, timeout=1.0, on_error="skip")
    with pytest.warns(UserWarning, match="'slow' took longer"):
        score([reward, Reward("ones", 1.0, ones)], INPUTS)
    assert score([reward], INPUTS)[:, 0].tolist() == [1, 1, 1]
    assert reward.failures == 1


def test_in_time_a_timeout_changes_nothing(mine):
    async def later(completions):
        await asyncio.sleep(0)
        return [2.0] * len(completions)

    rewards = [
        Reward("plain", 1.0, mine.lengths, timeout=60),
        Reward("async", 1.0, later, timeout=60),
        Reward("both", 1.0, mine.returns_an_awaitable, timeout=60),
        Reward("option", 1.0, functools.partial(mine.lengths, by=2), timeout=60),
        Reward("object", 1.0, mine.Scaled(3), timeout=60),
        Reward("arrays", 1.0, mine.arrays, timeout=60),
    ]
    assert score(rewards, INPUTS)[0].tolist() == [3, 2, 4, 6, 9, 1 / 3]
    assert [reward.failures for reward in rewards] == [0] * 6


def test_what_has_a_timeout_runs_at_the_same_time_as_what_is_asynchronous(mine, tmp_path):
    async def asks(completions):
        return await asyncio.to_thread(mine.meets, completions, name="c", directory=str(tmp_path))

    rewards = [
        Reward(name, 1.0, functools.partial(mine.meets, name=name, directory=str(tmp_path)), timeout=60)
        for name in "ab"
    ]
    assert score([*rewards, Reward("c", 1.0, asks, timeout=60)], INPUTS).shape == (3, 3)


def test_processes_share_a_call_in_order_and_never_split_a_prompt(mine):
    n = 12
    inputs = RewardInputs(
        [f"prompt {i // 3}" for i in range(n)],
        ["x" * i for i in range(n)],
        [[1]] * n,
        {"number": list(range(n))},
    )
    several = Reward("r", 1.0, mine.where, processes=2)
    values = score([several], inputs)[:, 0]
    pids, seen, numbers = values // 10**6, values % 1000, values // 1000 % 1000
    assert len(set(pids[:6])) == len(set(pids[6:])) == 1
    assert seen.tolist() == [6] * n  # completions of the part
    assert numbers.tolist() == list(range(n))
    again = score([several], inputs)[:, 0]
    assert set(again // 10**6) == set(pids)  # the same processes, either of which may take the first part
    assert (again % 10**6).tolist() == (values % 10**6).tolist()
    for processes, parts in ((3, [6] * 6 + [3] * 6), (5, [3] * 12)):
        found = score([Reward("r", 1.0, mine.where, processes=processes)], inputs)[:, 0]
        assert (found % 1000).tolist() == parts
    with pytest.raises(RunError, match="reward 'r' returned 1 value for 6 completions"):
        score([Reward("r", 1.0, mine.one, processes=2)], inputs)


def test_what_a_function_raises_in_its_worker_is_reported_as_elsewhere(mine):
    for reward in (Reward("r", 1.0, mine.fails, timeout=60), Reward("r", 1.0, mine.fails)):
        with pytest.raises(
            RunError, match=r"^reward 'r' raised KeyError: 'gold' \(.*mine\.py line \d+\) for completion 2$"
        ):
            score([reward], INPUTS)


def test_what_functions_raise_names_the_row_and_is_passed_on():
    inputs = INPUTS._replace(places=[f"prompts.jsonl row {i}" for i in (4, 4, 9)])

    def divides(completions):
        return [1 / len(text) for text in completions]

    with pytest.raises(RunError, match=r"raised ZeroDivisionError: .* for prompts\.jsonl row 9$"):
        score([Reward("r", 1.0, divides)], inputs)

    async def refuses(completions):
        raise TimeoutError("the server said no")

    with pytest.raises(RunError, match="reward 'r' raised TimeoutError: the server said no"):
        score([Reward("r", 1.0, refuses, timeout=60)], INPUTS)

    def refuses(completions):
        raise InputError("row 3 has no answer")

    with pytest.raises(InputError, match=r"^row 3 has no answer$"):
        score([Reward("r", 1.0, refuses, on_error="skip"), Reward("ones", 1.0, ones)], INPUTS)


def test_the_config_says_timeout_and_policy_where_a_function_can_have_them():
    registry = Registry()
    registry.add(REWARD, "local", lambda completions: ones(completions))
    for limit in ({"timeout": 1.0}, {"processes": 2}):
        with pytest.raises(
            InputError, match=r"'local' has `\w+`, so it runs in another process.*file\.py:fun"
        ):
            open_rewards([WeightedReward(name="local", **limit)], stage_with(registry))

    registry = Registry()
    registry.add(REWARD, "ones", ones)
    registry.add(REWARD, "mesh", OnTheMesh())

    def made(**component):
        return open_rewards([WeightedReward(**component)], stage_with(registry))[0]

    assert (made(name="ones").timeout, made(name="ones").on_error) == (None, "stop")
    limited = made(name="ones", timeout=2.5, on_error="skip")
    assert (limited.timeout, limited.on_error) == (2.5, "skip")
    with pytest.raises(
        InputError, match=r"stage 'policy'.rewards: 'mesh' is an object with `setup`.*`timeout`"
    ):
        made(name="mesh", timeout=1.0)


def test_clients_and_locks_made_in_one_call_work_in_the_next(close_workers):
    made = {}

    async def judge(completions):
        loop = asyncio.get_running_loop()
        if not made:
            made["lock"], made["task"] = asyncio.Lock(), loop.create_task(asyncio.sleep(3600))
            made["future"] = loop.create_future()
            loop.call_later(0.05, made["future"].set_result, None)
            await made["lock"].acquire()
            loop.call_later(0.1, made["lock"].release)
        else:
            await asyncio.wait_for(made["future"], 10)
            await asyncio.wait_for(made["lock"].acquire(), 10)  # bound to the loop of the first call
            made["lock"].release()
            assert not made["task"].done()
        return ones(completions)

    reward = Reward("judge", 1.0, judge, timeout=60)
    for _ in range(3):
        assert score([reward], INPUTS)[:, 0].tolist() == [1, 1, 1]
    close_workers()
    assert made["task"].cancelled()


def test_rows_that_a_check_rejected_are_not_scored():
    places = [f"p.jsonl row {i}" for i in (2, 2, 7, 7)]
    inputs = RewardInputs(["a"] * 4, ["5", "6", "5", "7"], [[1]] * 4, {"answer": ["5", "5", "", ""]}, places)

    def right(completions, answer):
        assert "" not in answer
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    table = score([Reward("right", 1.0, right, unreadable={"p.jsonl row 7"})], inputs)
    np.testing.assert_array_equal(table[:, 0], [1, 0, np.nan, np.nan])


def test_a_function_without_timeout_costs_the_others_none_of_their_time():
    def blocks(completions):
        time.sleep(2 * SOON)
        return ones(completions)

    async def quick(completions):
        await asyncio.sleep(SOON / 10)
        return ones(completions)

    rewards = [Reward("quick", 1.0, quick, timeout=SOON), Reward("blocks", 1.0, blocks)]
    assert score(rewards, INPUTS).tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_function_that_exits_is_one_that_failed(error):
    """asyncio raises these in the event loop too, which other calls use. In this thread, Ctrl-C ends the run."""

    def exits(completions):
        raise error

    async def exits_in_a_task(completions):
        await asyncio.gather(asyncio.sleep(0), later(completions))

    async def later(completions):
        exits(completions)

    for function in (exits, exits_in_a_task) if isinstance(error, SystemExit) else (exits_in_a_task,):
        with pytest.raises(
            RunError, match=rf"^reward 'r' raised {type(error).__name__}\b.* \(.*test_reward_calls"
        ):
            score([Reward("r", 1.0, function)], INPUTS)
        assert score([Reward("r", 1.0, ones)], INPUTS)[0] == [1.0]


@pytest.mark.parametrize(
    ("function", "timeout", "said"),
    [
        (broken, None, "reward 'r' raised ConnectionError: no route"),
        (broken, 60, "reward 'r' raised ConnectionError: no route"),
        (endless, SOON, "reward 'r' took longer than its timeout of 0.2 s"),
    ],
)
def test_skipped_calls_leave_completions_unscored_and_are_counted(function, timeout, said, mine):
    function = mine.broken if timeout == 60 else function  # workers import this large module
    rewards = [Reward("r", 1.0, function, timeout, "skip"), Reward("ones", 1.0, ones)]
    with pytest.warns(UserWarning, match=said) as caught:
        table = score(rewards, INPUTS)
    assert len(caught) == 1
    assert np.isnan(table[:, 0]).all()
    assert table[:, 1].tolist() == [1, 1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned once
        score(rewards, INPUTS)
    assert [reward.failures for reward in rewards] == [2, 0]


def test_where_every_call_fails_the_run_ends_and_says_which():
    rewards = [Reward("a", 1.0, broken, on_error="skip"), Reward("b", 1.0, endless, SOON, "skip")]
    with (
        pytest.warns(UserWarning, match="reward '[ab]'"),
        pytest.raises(
            RunError, match=r"nothing to learn; reward 'a' raised ConnectionError.*; reward 'b' took"
        ),
    ):
        score(rewards, INPUTS)


MISLEADING = """
import os, time

class Kills:
    def __reduce__(self):
        return os._exit, (7,)

class Waits:
    def __float__(self):
        time.sleep(1000)

class Talks:
    def __repr__(self):
        return "x" * 10_000

def kills(completions):
    return [Kills()] * len(completions)

def waits(completions):
    return [Waits()] * len(completions)

def talks(completions):
    return [Talks()] * len(completions)

def huge(completions):
    return [10**400] * len(completions)

def text(completions):
    return "1" * len(completions)
"""


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_values_that_misbehave_stay_in_the_call_that_made_them(tmp_path, timeout):
    (tmp_path / "misleading.py").write_text(MISLEADING)
    functions = load_file(tmp_path / "misleading.py")
    for name, said in {
        "kills": r"returned <.*Kills object .*> for completion 0; expected a number or None",
        "talks": r"returned x{200}… \(10,000 characters\) for completion 0",
        "huge": r"returned 10{199}… \(401 characters\) for completion 0",
        "text": "returned str; it must return a list of 3 numbers",
    }.items():
        with pytest.raises(RunError, match=said) as raised:
            score([Reward("r", 1.0, getattr(functions, name), timeout=timeout)], INPUTS)
        assert len(str(raised.value)) < 400
    if timeout is not None:
        with pytest.raises(RunError, match="longer than its timeout"):
            score([Reward("r", 1.0, functions.waits, timeout=SOON)], INPUTS)


@pytest.mark.parametrize(
    "returned", [[1.0], 1.0, [1, 2, "x"], [0, 0, float("inf")], [0, 0, -1e39], {0, 1, 2}]
)
def test_values_that_are_no_rewards_are_never_skipped(returned):
    wrong = Reward("r", 1.0, lambda completions: returned, on_error="skip")
    with pytest.raises(RunError, match="reward 'r' returned"):
        score([wrong, Reward("ones", 1.0, ones)], INPUTS)


class OnTheMesh:
    def setup(self, stage):
        pass

    def __call__(self, completions):
        return ones(completions)


@dataclass
class Asks:
    """Waits for something that it opens first, and leaves out single completions itself."""

    on_error: str = "stop"
    opened: list = field(default_factory=list)
    checked: list = field(default_factory=list)

    def check(self, columns, stage):
        self.checked.append(stage.name)
        return {}

    def setup(self, stage):
        self.opened.append(stage.name)

    async def __call__(self, completions):
        await asyncio.sleep(0)
        return [float(bool(self.opened))] * len(completions)


@pytest.mark.parametrize("is_main", [True, False])
def test_an_asynchronous_object_is_set_up_where_it_is_called(is_main, close_workers):
    """On no mesh: it may have a timeout, and only the first process opens what it waits for."""
    registry = Registry()
    registry.add(REWARD, "asks", Asks)
    stage = SimpleNamespace(**vars(stage_with(registry)), mesh=None, is_main=is_main)
    (reward,) = open_rewards([WeightedReward(name="asks", timeout=5.0, on_error="skip")], stage)
    assert (reward.function.on_error, reward.collective) == ("skip", False)
    prompts = SimpleNamespace(columns={}, where=str)
    set_up([reward], prompts, stage)
    set_up([reward], prompts, stage, "eval_data")
    assert reward.function.opened == ["policy"] * is_main
    assert reward.function.checked == ["policy", "policy"]
    if is_main:
        assert score([reward], INPUTS)[:, 0].tolist() == [1.0] * 3
    close_workers()
