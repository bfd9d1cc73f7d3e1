"""Calls in a job of several processes: the first makes them, and all have the same outcome."""

from __future__ import annotations

import numpy as np
import pytest

from tests.shared import processes

PROGRAM = """
import random, warnings
import numpy as np
from rlhf_core import RewardInputs
from rlhf_core.errors import RunError
from rlhf_core.rollouts import Reward, logged_metrics, score

me, calls = jax.process_index(), []
inputs = RewardInputs(["a"] * 3, ["x", "y", "z"], [[5]] * 3, {})

def chance(completions, log_metric):
    calls.append("chance")
    log_metric("luck", random.random())
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
print(table.tobytes().hex(), *(r.failures for r in rewards), logged_metrics(rewards))
assert calls == (["chance", "breaks", "mesh"] if me == 0 else ["mesh"]), calls
for ends in (Reward("breaks", 1.0, breaks), Reward("other", 1.0, Mesh(1)), Reward("first", 1.0, Mesh(0))):
    try:
        score([rewards[0], ends], inputs)
    except RunError as error:
        print(error)
"""


@pytest.mark.long
def test_two_processes_share_one_outcome():
    port = processes.free_port()
    running = [processes.start(PROGRAM, i, 2, port, devices=1) for i in range(2)]
    first, second = (
        [line for line in said.splitlines() if not line.startswith("[Gloo]")]
        for said in processes.finish(running, timeout=120)
    )
    assert first[0] == second[0]
    bits, *failures = first[0].split()
    table = np.frombuffer(bytes.fromhex(bits)).reshape(3, 3)
    assert 0 <= table[0, 0] < 1
    assert table[2, 0] == 1 / 3  # in float64
    assert np.isnan(table[1, 0])
    assert np.isnan(table[:, 1]).all()
    assert table[:, 2].tolist() == [0, 0, 0]
    assert failures[:4] == ["0", "1", "0", "{'rewards/chance/luck':"]  # a random number, the first process's
    elsewhere = "reward '{}' failed in another process; see that process's output"
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
