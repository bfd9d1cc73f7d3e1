"""Calls that fail or take too long, and calls in a job of several processes."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from rlhf_core import REWARD, Registry, RewardInputs
from rlhf_core.components import load_file
from rlhf_core.errors import InputError, RunError
from rlhf_core.rollouts import Reward, WeightedReward, score
from rlhf_core.rollouts.rewards import make_rewards

processes = load_file(Path(__file__).parents[1] / "processes.py")
INPUTS = RewardInputs(["a"] * 3, ["x y", "x", ""], [[5, 6, 1], [5, 1], [1]], {})
SOON = 0.2  # seconds that the slow ones below are given


@pytest.fixture
def never():
    """An event that nobody sets until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def ones(completions):
    return [1.0] * len(completions)


def broken(completions):
    raise ConnectionError("no route")


async def endless(completions):
    await asyncio.sleep(60)


def test_an_asynchronous_function_is_cancelled_at_its_timeout():
    begin = time.perf_counter()
    with pytest.raises(RunError, match=r"^reward 'judge' took longer than its timeout of 0\.2 s$"):
        score([Reward("judge", 1.0, endless, timeout=SOON), Reward("ones", 1.0, ones)], INPUTS)
    assert time.perf_counter() - begin < 10


def test_a_plain_function_is_left_behind_at_its_timeout(never):
    seen = []

    def hangs(completions):
        seen.append(threading.current_thread())
        never.wait()
        return ones(completions)

    with pytest.raises(
        RunError, match=r"took longer than its timeout of 0\.2 s; its thread goes on in the background"
    ):
        score([Reward("slow", 1.0, hangs, timeout=SOON)], INPUTS)
    assert seen[0].daemon  # or Python would wait for it when it ends


def test_in_time_a_timeout_changes_nothing():
    async def later(completions):
        await asyncio.sleep(0)
        return [2.0] * len(completions)

    rewards = [
        Reward("plain", 1.0, ones, timeout=60),
        Reward("async", 1.0, later, timeout=60),
        Reward("both", 1.0, lambda completions: later(completions), timeout=60),
    ]
    assert score(rewards, INPUTS).tolist() == [[1, 2, 2]] * 3
    assert [reward.failures for reward in rewards] == [0, 0, 0]


def test_what_has_a_timeout_runs_at_the_same_time_as_what_is_asynchronous():
    met = threading.Barrier(3)  # passes only where three calls are under way at once

    def waits(completions):
        met.wait(timeout=30)
        return ones(completions)

    async def asks(completions):
        return await asyncio.to_thread(waits, completions)

    rewards = [
        Reward(name, 1.0, function, timeout=60)
        for name, function in (("a", waits), ("b", waits), ("c", asks))
    ]
    assert score(rewards, INPUTS).shape == (3, 3)


def test_a_function_without_timeout_costs_the_others_none_of_their_time():
    def blocks(completions):
        time.sleep(2 * SOON)
        return ones(completions)

    async def quick(completions):
        await asyncio.sleep(SOON / 10)
        return ones(completions)

    rewards = [Reward("quick", 1.0, quick, timeout=SOON), Reward("blocks", 1.0, blocks)]
    assert score(rewards, INPUTS).tolist() == [[1, 1]] * 3


def test_a_function_may_raise_a_timeout_error_of_its_own():
    async def refuses(completions):
        raise TimeoutError("the server said no")

    with pytest.raises(RunError, match="reward 'r' raised TimeoutError: the server said no"):
        score([Reward("r", 1.0, refuses, timeout=60)], INPUTS)


@pytest.mark.parametrize(
    ("function", "timeout", "said"),
    [
        (broken, None, "reward 'r' raised ConnectionError: no route"),
        (broken, 60, "reward 'r' raised ConnectionError: no route"),
        (endless, SOON, "reward 'r' took longer than its timeout of 0.2 s"),
    ],
)
def test_skipped_calls_leave_completions_unscored_and_are_counted(function, timeout, said):
    rewards = [Reward("r", 1.0, function, timeout, "skip"), Reward("ones", 1.0, ones)]
    with pytest.warns(UserWarning, match=said) as caught:
        table = score(rewards, INPUTS)
    assert len(caught) == 1
    assert np.isnan(table[:, 0]).all()
    assert table[:, 1].tolist() == [1, 1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        score(rewards, INPUTS)
    assert [reward.failures for reward in rewards] == [2, 0]


def test_where_every_call_fails_the_run_ends_and_says_which():
    rewards = [Reward("a", 1.0, broken, on_error="skip"), Reward("b", 1.0, endless, SOON, "skip")]
    with (
        pytest.warns(UserWarning, match="reward '[ab]'"),
        pytest.raises(
            RunError, match=r"nothing to learn from; reward 'a' raised ConnectionError.*; reward 'b' took"
        ),
    ):
        score(rewards, INPUTS)


@pytest.mark.parametrize("returned", [[1.0], 1.0, [1, 2, "x"], [0, 0, float("inf")]])
def test_values_that_are_no_rewards_are_never_skipped(returned):
    wrong = Reward("r", 1.0, lambda completions: returned, on_error="skip")
    with pytest.raises(RunError, match="reward 'r' returned"):
        score([wrong, Reward("ones", 1.0, ones)], INPUTS)


def test_bad_input_is_never_skipped():
    def refuses(completions):
        raise InputError("row 3 has no answer")

    with pytest.raises(InputError, match=r"^row 3 has no answer$"):
        score([Reward("r", 1.0, refuses, on_error="skip"), Reward("ones", 1.0, ones)], INPUTS)


class OnTheMesh:
    def setup(self, stage):
        pass

    def __call__(self, completions):
        return ones(completions)


def test_the_config_says_timeout_and_policy():
    registry = Registry()
    registry.add(REWARD, "ones", ones)
    registry.add(REWARD, "mesh", OnTheMesh())

    def made(**component):
        return make_rewards([WeightedReward(**component)], None, None, registry, "stage 'policy'")[0]

    assert (made(name="ones").timeout, made(name="ones").on_error) == (None, "stop")
    limited = made(name="ones", timeout=2.5, on_error="skip")
    assert (limited.timeout, limited.on_error) == (2.5, "skip")
    with pytest.raises(
        InputError, match=r"stage 'policy'.rewards: 'mesh' is an object with `setup`.*`timeout`"
    ):
        made(name="mesh", timeout=1.0)


PROGRAM = """
import random, warnings
import numpy as np
from rlhf_core import RewardInputs
from rlhf_core.errors import RunError
from rlhf_core.rollouts import Reward, score

me, calls = jax.process_index(), []
inputs = RewardInputs(["a"] * 3, ["x", "y", "z"], [[5]] * 3, {})

def chance(completions):
    calls.append("chance")
    return [random.random(), None, 1 / 3]

def breaks(completions):
    calls.append("breaks")
    raise OSError("gone")

class Mesh:
    def __init__(self, where): self.where = where
    def setup(self, stage): pass
    def __call__(self, completions):
        calls.append("mesh")
        if me == self.where:
            raise OSError("full")
        return [float(me)] * len(completions)

warnings.simplefilter("ignore")
rewards = [Reward("chance", 1.0, chance), Reward("breaks", 1.0, breaks, on_error="skip"), Reward("mesh", 1.0, Mesh(-1))]
table = score(rewards, inputs)
print(table.tobytes().hex(), *(r.failures for r in rewards))
assert calls == (["chance", "breaks", "mesh"] if me == 0 else ["mesh"]), calls
for ends in (Reward("breaks", 1.0, breaks), Reward("other", 1.0, Mesh(1)), Reward("first", 1.0, Mesh(0))):
    try:
        score([rewards[0], ends], inputs)
    except RunError as error:
        print(error)
"""


@pytest.mark.slow
def test_two_processes_share_one_outcome():
    port = processes.free_port()
    running = [processes.start(PROGRAM, i, 2, port, devices=1, stderr=subprocess.PIPE) for i in range(2)]
    first, second = (
        [line for line in said.splitlines() if not line.startswith("[Gloo]")]
        for said in processes.finish(running, timeout=120)
    )
    assert first[0] == second[0]
    bits, *failures = first[0].split()
    table = np.frombuffer(bytes.fromhex(bits)).reshape(3, 3)
    assert 0 <= table[0, 0] < 1
    assert table[2, 0] == 1 / 3  # not float32's
    assert np.isnan(table[1, 0])
    assert np.isnan(table[:, 1]).all()
    assert table[:, 2].tolist() == [0, 0, 0]
    assert failures == ["0", "1", "0"]
    elsewhere = "reward '{}' failed in another process, whose output says why"
    assert first[1:] == [
        "reward 'breaks' raised OSError: gone",
        elsewhere.format("other"),
        "reward 'first' raised OSError: full",
    ]
    assert second[1:] == [
        elsewhere.format("breaks"),
        "reward 'other' raised OSError: full",
        elsewhere.format("first"),
    ]
