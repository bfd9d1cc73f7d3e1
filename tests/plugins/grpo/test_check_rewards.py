"""`rlhf check` of a GRPO stage tells what its rewards would do, without a device; other words: tests/mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_rows_without_a_value_that_a_reward_needs_are_counted(place: Any, rlhf: Callable[..., Any]) -> None:
    answers = [{"answer": "4"}, {}, {"answer": "4"}, {"answer": "4"}, {"answer": None}, {"answer": "4"}]
    place.rows("prompts.jsonl", *({"prompt": "Mia", **answer} for answer in answers))
    place.settings("policy.toml", 'rewards = ["exact_match"]')
    ended = rlhf("check", "policy.toml")
    assert ended.code == 0, ended.message
    told = " ".join((ended.out + ended.warned).split())
    assert "reward 'exact_match': 3 of 7 rows have no 'answer'; the first is" in told
    assert "prompts.jsonl row 1" in told
