"""`rlhf check` of a GRPO stage tells what its rewards would do, without a device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MINE = """
def last(completions, *, target=3):
    return [len(c[-1]["content"]) - target for c in completions]

class Asks:
    def reset(self, row, seed):
        return row["prompt"]

    async def step(self, completion):
        raise AssertionError("a check does not call it")

def kept(environment_rewards):
    return environment_rewards
"""


@pytest.fixture
def check(place: Any, rlhf: Callable[..., Any]) -> Any:
    """What a check says of rewards, and of more settings, where the answer of one row is no number."""
    place.write("mine.py", MINE)
    rows = [
        {"prompt": [{"role": "user", "content": "Mia"}], "answer": "four" if i == 3 else "4", "target": 3}
        for i in range(6)
    ]
    place.write("prompts.jsonl", "\n".join(map(json.dumps, rows)))

    def check(rewards: str, more: str = "") -> str:
        place.settings("policy.toml", f'rewards = [{rewards}]\nchat_template = "plain"\n{more}')
        ended = rlhf("check", "policy.toml")
        assert ended.code == 0, ended.message
        return " ".join((ended.out + ended.warned).split())

    return check


def test_rows_without_a_value_that_a_reward_needs_are_counted(check: Any) -> None:
    rows = [json.loads(line) for line in Path("prompts.jsonl").read_text().splitlines()]
    rows[4]["answer"] = None
    del rows[1]["answer"]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    told = check('{ name = "exact_match" }')
    assert "reward 'exact_match': 2 of 6 rows have no 'answer'; the first is" in told
    assert "prompts.jsonl row 2" in told


def test_what_an_environment_will_give_is_not_missing_from_the_rows(check: Any) -> None:
    told = check('{ name = "mine.py:kept", check = false }', 'environment = { name = "mine.py:Asks" }')
    assert "environment_rewards" not in told


def test_what_is_worth_knowing_is_a_line(check: Any) -> None:
    told = check('{ name = "mine.py:last", target = 4 }, { name = "numeric_answer", on_error = "skip" }')
    used = "warning: reward 'mine.py:last': its option target = 4 is used, and the column 'target' is not"
    assert used in told
    assert "row 4: reward 'numeric_answer': the answer 'four' is not a number" in told
