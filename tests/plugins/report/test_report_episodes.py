"""The report of a stage with an environment: each turn under its role, and nothing of it can break the page."""

from __future__ import annotations

import json
import re
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


def page_of(directory: Path, *files: list[Mapping[str, Any]]) -> Any:
    run = runs.make_policy_run(directory / "run")
    for path in (run / "policy/samples").iterdir():
        path.unlink()
    for number, rows in enumerate(files):
        runs.write(run / f"policy/samples/update-{number:06d}.jsonl", rows)
    return runs.page(run)


def words(page: Any) -> str:
    return " ".join(page.text.split())


def test_each_turn_stands_under_its_role(tmp_path: Path) -> None:
    page = page_of(tmp_path, [episode(1.0)], [episode(2.0)])
    assert f"user: What is 1 + 2? {EVIL}" in words(page)
    turns = f'assistant turn 1 12 tokens add({{"a": 1, "b": "{EVIL}"}}) tool add three {EVIL} assistant turn 2 7 tokens'
    assert f"{turns} reward 0.25 Then it is 3.malformed call: no JSON {EVIL}" in words(page)
    assert "the other messages are the environment's, and are not trained on" in words(page)
    roles = [attributes.get("class") for tag, attributes in page.elements if tag == "li"]
    assert roles[:6] == ["policy", None, "policy"] * 2
    assert json.dumps({"a": 1, "b": EVIL}) in "".join(re.findall(r"add\((.*?)\)\s*tool add", words(page))[0])


def test_the_prompt_is_part_of_the_conversation_where_prompts_differ(tmp_path: Path) -> None:
    other = episode(2.0, prompt=[{"role": "user", "content": "And 2 + 2?"}])
    page = page_of(tmp_path, [episode(1.0)], [other])
    assert "user And 2 + 2? assistant turn 1 12 tokens" in words(page)


def test_a_failure_is_marked_and_no_markup(tmp_path: Path) -> None:
    told = f"rows.jsonl row 1: environment 'x': step raised KeyError {EVIL}"
    page = page_of(tmp_path, [episode(1.0), episode(None, failure=told, turns=[], completion=[])])
    assert f"environment 'x': step raised KeyError {EVIL} user What is" in words(page)
    assert "message failed" in [a.get("class") for a in page.of("p")]
    assert len(page.of("script")) == 3
    assert page.of("img") == []


def test_other_completions_are_no_conversations(tmp_path: Path) -> None:
    row = episode(1.0)
    del row["turns"]
    page = page_of(tmp_path, [row])
    assert page.of("ol") == []
    assert "are not trained on" not in page.text
    assert "assistant: Then it is 3." in page.text


def test_messages_of_an_assistant_that_the_environment_added_are_not_numbered(tmp_path: Path) -> None:
    row = episode(1.0)
    row["completion"] = [{"role": "assistant", "content": "Yes."}, *row["completion"]]
    page = page_of(tmp_path, [row])
    assert "turn 1" not in words(page)


def test_turns_of_the_policy_are_told_apart_from_messages_that_the_environment_wrote_for_it(
    tmp_path: Path,
) -> None:
    row = episode(1.0, turns=[{"message": 1, "tokens": 12}, {"message": 3, "tokens": 7, "reward": 0.25}])
    row["completion"] = [{"role": "assistant", "content": "Yes."}, *row["completion"]]
    told = words(page_of(tmp_path, [row]))
    assert "assistant written by the environment Yes. assistant turn 1 12 tokens add(" in told
    assert "assistant turn 2 7 tokens reward 0.25 Then it is 3." in told


def test_a_long_episode_is_cut(tmp_path: Path) -> None:
    said = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}] * 40
    row = episode(1.0, completion=said, turns=[{"tokens": 1, "reward": None}] * 40)
    page = page_of(tmp_path, [row])
    assert "and 21 more messages" in words(page)  # of 81


DAMAGED: list[dict[str, Any]] = [
    {"turns": [None, 3]},
    {"turns": [{"tokens": "many", "reward": "high"}] * 2},
    {"completion": "a text"},
    {"completion": [None, 3, {"role": 5, "content": {"x": 1}, "tool_calls": 7, "call_errors": "x"}]},
    {"completion": [{"role": "assistant", "content": None, "tool_calls": [None, {"function": "add"}, {}]}]},
    {"prompt": None, "failure": ["x"]},
]


@pytest.mark.parametrize("changes", DAMAGED, ids=str)
def test_damaged_samples_do_not_end_the_report(changes: Mapping[str, Any], tmp_path: Path) -> None:
    page = page_of(tmp_path, [episode(1.0, **changes), episode(2.0)])
    assert len(page.of("ol")) == 5
