"""The report of a stage with an environment: each turn under its role, whatever the files hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.shared import report_runs as runs

EVIL = runs.EVIL


def episode(reward: float | None, **changes: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": EVIL}}}
    return {
        "prompt": [{"role": "user", "content": f"What is 1 + 2? {EVIL}"}],
        "completion": [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": f"three {EVIL}"},
            {"role": "assistant", "content": "Then it is 3.", "call_errors": [f"no JSON {EVIL}"]},
        ],
        "reward": reward,
        "rewards": {"environment": reward},
        "length": 19,
        "finished": True,
        "turns": [{"tokens": 12, "reward": None}, {"tokens": 7, "reward": 0.25}],
        **changes,
    }


def sides(directory: Path, *files: list[Mapping[str, Any]]) -> Any:
    """Return the completions, before and after, of a run with these rollouts."""
    run = runs.make_policy_run(directory / "run")
    for path in (run / "policy/samples").iterdir():
        path.unlink()
    for number, rows in enumerate(files):
        runs.write(run / f"policy/samples/update-{number:06d}.jsonl", rows)
    return runs.completions(run)["sides"]


def marks(messages: list[dict[str, Any]]) -> list[Any]:
    """Return of each message its turn, "added", or None."""
    return [message.get("turn") or ("added" if message.get("added") else None) for message in messages]


def test_each_turn_stands_under_its_role(tmp_path: Path) -> None:
    (side,) = sides(tmp_path, [episode(1.0)], [episode(2.0)])
    assert side["asked"] == [{"role": "user", "content": f"What is 1 + 2? {EVIL}"}]
    first, tool, last = side["after"]["messages"]
    assert first["content"] == f"add({json.dumps({'a': 1, 'b': EVIL})})"
    assert [(one["turn"], one["tokens"], one["reward"], one["policy"]) for one in (first, last)] == [
        (1, 12, None, True),
        (2, 7, 0.25, True),
    ]
    assert tool == {"role": "tool", "content": f"three {EVIL}", "name": "add", "policy": False}
    assert last["errors"] == [f"no JSON {EVIL}"]


def test_the_prompt_is_told_where_prompts_differ(tmp_path: Path) -> None:
    other = episode(2.0, prompt=[{"role": "user", "content": "And 2 + 2?"}])
    found = sides(tmp_path, [episode(1.0)], [other])
    assert found[0]["after"]["asked"] == [{"role": "user", "content": "And 2 + 2?"}]


def test_a_failure_is_told(tmp_path: Path) -> None:
    found = sides(tmp_path, [episode(1.0), episode(None, failure=EVIL, turns=[], completion=[])])
    assert (found[0]["before"]["dropped"], found[0]["before"]["finish"]) == (EVIL, "failed")


YES = {"role": "assistant", "content": "Yes."}


@pytest.mark.parametrize(
    ("turns", "marked"),
    [
        ([{"tokens": 12}, {"tokens": 7}], [None] * 4),  # which of three the environment wrote is not known
        ([{"message": 1, "tokens": 12}, {"message": 3, "tokens": 7}], ["added", 1, None, 2]),
    ],
)
def test_messages_of_an_assistant_that_the_environment_added_are_told_apart(
    tmp_path: Path, turns: list[dict[str, Any]], marked: list[Any]
) -> None:
    row = episode(1.0, turns=turns)
    row["completion"] = [YES, *row["completion"]]
    assert marks(sides(tmp_path, [row])[0]["before"]["messages"]) == marked


def test_a_long_episode_is_cut(tmp_path: Path) -> None:
    said = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}] * 40
    row = episode(1.0, completion=said, turns=[{"tokens": 1, "reward": None}] * 40)
    messages = sides(tmp_path, [row])[0]["before"]["messages"]
    assert (len(messages), messages[-1]["content"]) == (61, "and 20 more messages")


DAMAGED: list[dict[str, Any]] = [
    {"turns": [None, 3]},
    {"turns": [{"tokens": "many", "reward": "high"}] * 2},
    {"turns": [{"message": [1]}, {"message": {}}]},
    {"completion": "a text"},
    {"completion": [None, 3, {"role": 5, "content": {"x": 1}, "tool_calls": 7, "call_errors": "x"}]},
    {"completion": [{"role": "assistant", "content": None, "tool_calls": [None, {"function": "add"}, {}]}]},
    {"prompt": None, "failure": ["x"], "columns": [1], "rewards": 3, "length": {}},
]


@pytest.mark.parametrize("changes", DAMAGED, ids=str)
def test_damaged_samples_do_not_end_the_report(changes: Mapping[str, Any], tmp_path: Path) -> None:
    assert len(sides(tmp_path, [episode(1.0, **changes), episode(2.0)])) == 5
