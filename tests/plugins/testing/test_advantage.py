"""The kit for advantages finds each defect, and only that; the built-in ones have none."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rlhf_core import ADVANTAGE, AdvantageInputs, plugins
from rlhf_core.testing import check_advantage

CALLS = itertools.count()
OURS = [(name, {}) for name in plugins.load().registry.names(ADVANTAGE)] + [
    ("group", {"scale": "batch"}),
    ("group", {"scale": "none"}),
    ("reinforce_pp", {"baseline": "batch"}),
]


def centred(inputs: AdvantageInputs, unscored: float = 0.0) -> np.ndarray:
    rewards = np.asarray(inputs.rewards, np.float64)
    there = ~np.isnan(rewards)
    mean = np.where(there, rewards, 0).sum(-1, keepdims=True) / np.maximum(there.sum(-1, keepdims=True), 1)
    return np.where(there, rewards - mean, unscored).astype(np.float32)


@dataclass
class NotFrozen:
    def __call__(self, inputs: AdvantageInputs) -> np.ndarray:
        return centred(inputs)


@dataclass(frozen=True, eq=False)
class EqualToItselfOnly:
    def __call__(self, inputs: AdvantageInputs) -> np.ndarray:
        return centred(inputs)


def divided_by_zero(inputs: AdvantageInputs) -> np.ndarray:
    out = centred(inputs)
    with np.errstate(invalid="ignore"):
        return out / np.abs(out).max(-1, keepdims=True)


def first_is_best(inputs: AdvantageInputs) -> np.ndarray:
    out = centred(inputs)
    return np.where(out == 0, 0, out - 0.01 * np.arange(out.shape[1])).astype(np.float32)


def numpy_only(inputs: AdvantageInputs) -> np.ndarray:
    mine = inputs.rewards.copy()
    mine[np.isnan(mine)] = 0.0
    return centred(inputs)


def writes(inputs: AdvantageInputs) -> np.ndarray:
    if isinstance(inputs.rewards, np.ndarray):
        inputs.rewards[:] = 1.0 + inputs.rewards
    return centred(inputs)


MUTANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "not frozen": ("component", NotFrozen),
    "equal to itself only": ("hash", EqualToItselfOnly),
    "flat": ("output", lambda inputs: centred(inputs).reshape(-1)),
    "double": ("output", lambda inputs: centred(inputs).astype(np.float64)),
    "divided by zero": ("finite", divided_by_zero),
    "unscored is bad": ("unscored", lambda inputs: centred(inputs, -1.0)),
    "first is best": ("order", first_is_best),
    "low is high": ("direction", lambda inputs: -centred(inputs)),
    "nothing": ("direction", lambda inputs: np.zeros(np.shape(inputs.rewards), np.float32)),
    "NumPy alone": ("arrays", numpy_only),
    "writes": ("inputs", writes),
    "noisy": ("repeatable", lambda inputs: centred(inputs) * np.float32(1 + 1e-5 * (next(CALLS) % 2))),
}


@pytest.mark.parametrize(("name", "advantage"), MUTANTS.values(), ids=MUTANTS)
def test_the_defect_is_found(name: str, advantage: Any, failures: Any) -> None:
    assert set(found := failures(check_advantage, advantage)) == {name}, found


@pytest.mark.parametrize(("name", "options"), OURS)
def test_built_in_components_pass(name: str, options: dict[str, Any]) -> None:
    check_advantage(plugins.load().registry.get(ADVANTAGE, name, **options))


@dataclass(frozen=True)
class OfTheSecond:
    """Use the reward functions one by one."""

    def __call__(self, inputs: AdvantageInputs) -> Any:
        second = np.asarray(inputs.rewards_by_function, np.float64)[..., 1]
        centred = second - np.nanmean(second, axis=-1, keepdims=True)
        return np.nan_to_num(centred).astype(np.float32)


@dataclass(frozen=True)
class OfTheThird:
    def __call__(self, inputs: AdvantageInputs) -> Any:
        return np.nan_to_num(np.asarray(inputs.rewards_by_function, np.float32)[..., 2])


def test_an_advantage_may_read_several_functions(failures: Any) -> None:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert failures(check_advantage, OfTheSecond) == {}


def test_the_kit_s_number_of_functions_is_said(failures: Any) -> None:
    said = failures(check_advantage, OfTheThird)["output"]
    assert "IndexError" in said
    assert "the kit gives 2 reward functions" in said


def test_rewards_of_a_range_and_what_was_given_are_shown(failures: Any) -> None:
    """An advantage of logarithms is made for rewards that are not negative."""

    def of_logarithms(inputs: AdvantageInputs) -> Any:
        scored = np.isfinite(inputs.rewards)
        level = np.log1p(np.where(scored, inputs.rewards, 0.0))
        mean = np.where(scored, level, 0.0).sum(1, keepdims=True) / np.maximum(
            scored.sum(1, keepdims=True), 1
        )
        return np.where(scored, level - mean, 0.0).astype(np.float32)

    with np.errstate(invalid="ignore"):
        found = failures(check_advantage, of_logarithms)["finite"]
    assert "values are not finite" in found
    assert "\n    inputs = AdvantageInputs(rewards=array([[-2., 0.3]], dtype=float32)" in found
    assert "\n    found = array([[nan, nan]], dtype=float32)" in found
    assert failures(check_advantage, of_logarithms, values=(0.0, 5.0)) == {}


def test_rewards_of_a_set(failures: Any) -> None:
    """An advantage of right and wrong answers: (r − p) / √(p (1 − p)), p the share of right ones."""

    def of_answers(inputs: AdvantageInputs) -> Any:
        rewards = np.asarray(inputs.rewards)
        scored = ~np.isnan(rewards)
        if not np.isin(rewards[scored], (0, 1)).all():
            raise ValueError("rewards are 0 or 1")
        right = np.where(scored, rewards, 0).sum(1, keepdims=True) / np.maximum(
            scored.sum(1, keepdims=True), 1
        )
        scale = np.sqrt(np.maximum(right * (1 - right), 1e-6))
        return np.where(scored, (rewards - right) / scale, 0.0).astype(np.float32)

    assert "rewards are 0 or 1" in failures(check_advantage, of_answers, values=(0.0, 1.0))["output"]
    assert failures(check_advantage, of_answers, values={0, 1}) == {}
    assert "flip the sign" in failures(check_advantage, lambda x: -of_answers(x), values={0, 1})["direction"]
