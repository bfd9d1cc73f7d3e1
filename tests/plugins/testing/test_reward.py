"""The kit for rewards finds each defect, and only that; our rewards have none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rlhf_core import REWARD, plugins
from rlhf_core.testing import check_reward

ROWS = [
    {"prompt": "1 + 1?", "completion": " The answer is 2", "answer": "2"},
    {"prompt": "2 + 3?", "completion": " \\boxed{6}", "answer": "5"},
    {"prompt": "9 - 9?", "completion": " 0", "answer": "0"},
]
OPTIONS: Mapping[str, dict[str, Any]] = {
    "length": {"target": 4},
    "regex": {"pattern": r"\d"},
    "soft_overlong": {"max_length": 8, "cache": 4},
}


def lengths(completions: Sequence[str]) -> list[float]:
    return [len(text) / 10 for text in completions]


class NoDataclass:
    def __call__(self, completions: Sequence[str]) -> list[float]:
        return lengths(completions)


def wants_a_column(completions: Sequence[str], solution: Sequence[str]) -> list[float]:
    return lengths(completions)


def less_the_mean(completions: Sequence[str]) -> list[float]:
    values = lengths(completions)
    return [x - sum(values) / len(values) for x in values]


def strips_in_place(completions: list[str]) -> list[float]:
    values = lengths(completions)
    completions[:] = [text.strip() for text in completions]
    return values


class ChecksByList:
    def check(self, columns: Mapping[str, Any]) -> Any:
        return ["the answer is not a number"]

    def __call__(self, completions: Sequence[str]) -> list[float]:
        return lengths(completions)


class ChecksRowsFromOne:
    def check(self, columns: Mapping[str, Any]) -> Any:
        return {4: "the last one"}

    def __call__(self, completions: Sequence[str]) -> list[float]:
        return lengths(completions)


MUTANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "no dataclass": ("component", NoDataclass),
    "wants a column": ("columns", wants_a_column),
    "checks by a list": ("check", ChecksByList()),
    "checks rows from one": ("check", ChecksRowsFromOne()),
    "one number": ("values", lambda completions: 1.0),
    "one less": ("values", lambda completions: lengths(completions)[1:]),
    "not a number": ("values", lambda completions: [float("nan") for _ in completions]),
    "texts": ("values", lambda completions: ["good" for _ in completions]),
    "first above last": (
        "order",
        lambda completions: [x + (completions[0] > completions[-1]) for x in lengths(completions)],
    ),
    "less the mean": ("split", less_the_mean),
    "first word": ("odd completions", lambda completions: [len(text.split()[0]) for text in completions]),
    "strips in place": ("inputs", strips_in_place),
    "noisy": ("repeatable", lambda completions: [x + 1e-7 * random.random() for x in lengths(completions)]),
}


@pytest.mark.parametrize(("name", "reward"), MUTANTS.values(), ids=MUTANTS)
def test_the_defect_is_found(name: str, reward: Any, failures: Any) -> None:
    assert set(found := failures(check_reward, reward)) == {name}, found


def test_groups_may_be_compared() -> None:
    def rank(completions: Sequence[str]) -> list[float]:
        halves = [completions[i : i + 2] for i in range(0, len(completions), 2)]
        return [float(text == max(half)) for half in halves for text in half]

    check_reward(rank, group=2)


def test_async_calls_of_any_column_share_an_event_loop_as_in_a_run() -> None:
    made: list[Any] = []

    async def reward(prompts: Sequence[str], **columns: Any) -> list[float]:
        made.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return [float(len(a)) for a in columns["answer"]]

    check_reward(reward, ROWS)
    assert len(made) > 3
    assert len(set(map(id, made))) == 1


def test_numbers_are_those_that_a_run_takes(failures: Any) -> None:
    def generator(completions: Sequence[str]) -> Any:
        return (np.float16(len(text)) for text in completions)

    def beyond(completions: Sequence[str]) -> Any:
        return [1e39 for _ in completions]

    def exits(completions: Sequence[str]) -> Any:
        raise SystemExit(3)

    check_reward(generator, ROWS)
    assert "returned 1e+39 for completion" in failures(check_reward, beyond)["values"]
    assert "raised SystemExit: 3" in failures(check_reward, exits)["values"]


ELSEWHERE = {"model", "http", "judge"}
"""Rewards that need a model or a service."""


@pytest.mark.parametrize("name", sorted({*plugins.load().registry.names(REWARD)} - ELSEWHERE))
def test_built_in_components_pass(name: str) -> None:
    check_reward(plugins.load().registry.get(REWARD, name, **OPTIONS.get(name, {})), ROWS)


def test_a_reward_model_has_none(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.make_model("score", scale=4.0).save(tmp_path)
    model = plugins.load().registry.get(REWARD, "model", model=str(tmp_path))
    check_reward(model, [{"prompt": "a b", "completion": x} for x in (" c", " d e f", " A")])
