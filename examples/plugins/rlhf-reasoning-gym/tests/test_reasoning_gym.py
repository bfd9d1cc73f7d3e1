"""The environment on two tasks, with reasoning-gym where it is installed, else with a stand-in."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
from rlhf_reasoning_gym import AGAIN, ReasoningGym

from rlhf_core import InputError
from rlhf_core.testing import check_environment

INSTALLED = importlib.util.find_spec("reasoning_gym") is not None
ROWS = [
    {"task": "chain_sum", "seed": 7, "config": {"max_terms": 2}},
    {"task": "leg_counting", "seed": 8},
    {"task": "leg_counting"},
]


class Sums:
    """Sums of numbers, in the interface of reasoning-gym's datasets."""

    def __init__(self, seed: int, size: int, max_terms: int = 4) -> None:
        self.drawn, self.size, self.max_terms = random.Random(seed), size, max_terms

    def __getitem__(self, index: int) -> dict[str, Any]:
        terms = [self.drawn.randint(10, 99) for _ in range(self.max_terms)]
        return {"question": f"{' + '.join(map(str, terms))}?", "answer": str(sum(terms)), "metadata": {}}

    def score_answer(self, answer: str | None, entry: Mapping[str, Any]) -> float:
        assert answer is not None
        return 1.0 if int(answer) == int(entry["answer"]) else 0.01


class Legs(Sums):
    """It draws from the global random numbers, as some tasks do."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.drawn.seed(random.random())
        return super().__getitem__(index)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    if not INSTALLED:
        factory: Any = ModuleType("reasoning_gym.factory")
        factory.DATASETS = {"chain_sum": Sums, "leg_counting": Legs}
        factory.create_dataset = lambda name, **options: factory.DATASETS[name](**options)
        gym: Any = ModuleType("reasoning_gym")
        gym.factory = factory
        monkeypatch.setitem(sys.modules, "reasoning_gym", gym)
        monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("tries", [1, 3])
def test_the_kit(tries: int) -> None:
    check_environment(ReasoningGym, ROWS, completions=["<answer>3</answer>", "5"], tries=tries, timeout=5.0)
    check_environment(ReasoningGym, [{"number": 1}], task="chain_sum")


def test_a_right_answer_ends_the_episode() -> None:
    environment = ReasoningGym(tries=2)
    (message,) = environment.reset(ROWS[0], seed=1)
    assert "<answer>" in message["content"]
    turn = environment.step(
        said("<answer>0</answer> or <answer> " + environment.entry["answer"] + " </answer>")
    )
    assert turn == ((), 1.0, True, {"solved": 1.0, "tries": 1})


def test_a_wrong_answer_gets_another_try() -> None:
    environment = ReasoningGym(tries=2)
    environment.reset(ROWS[0], seed=1)
    turn = environment.step(said("<answer>-1</answer>"))
    assert (turn.messages[0]["content"], turn.reward, turn.done) == (AGAIN, None, False)
    turn = environment.step(said("I give up."))
    assert (turn.reward, turn.done, turn.metrics) == (0.0, True, {"solved": 0.0, "tries": 2})


def test_the_verifier_scores() -> None:
    environment = ReasoningGym()
    environment.reset(ROWS[0], seed=1)
    expected = environment.questions.score_answer(answer="-1", entry=environment.entry)
    assert environment.step(said("<answer>-1</answer>")).reward == expected < 1


def test_what_the_verifier_cannot_read_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = ReasoningGym()
    environment.reset(ROWS[0], seed=1)

    def fails(answer: str, entry: Mapping[str, Any]) -> float:
        raise ValueError(answer)

    monkeypatch.setattr(environment.questions, "score_answer", fails)
    assert environment.step(said("<answer>many</answer>")).reward == 0.0


def test_the_row_decides_the_question() -> None:
    def question(row: Mapping[str, Any], seed: int) -> Any:
        return ReasoningGym("chain_sum").reset(row, seed)

    assert question({"seed": 3}, 1) == question({"seed": 3}, 2) == question({}, 3) != question({}, 4)


def test_mistakes() -> None:
    with pytest.raises(InputError, match=r"has no task 'chain_sun'\. Did you mean 'chain_sum'\?"):
        ReasoningGym("chain_sun")
    with pytest.raises(InputError, match="has no task 'leg_countin'"):
        ReasoningGym().reset({"task": "leg_countin"}, 0)
    with pytest.raises(InputError, match="the row has no `task`; add one"):
        ReasoningGym().reset({}, 0)
    with pytest.raises(ValueError, match="tries: expected 1 or more, got 0"):
        ReasoningGym(tries=0)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InputError, match=r"needs reasoning-gym .*; type: pip install reasoning-gym"):
        ReasoningGym()
