"""Calling reward functions: by what they ask for, checked for what they return."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core import REWARD, RewardInputs
from rlhf_core.errors import InputError, RunError

if TYPE_CHECKING:
    from rlhf_core import Registry, Stage
    from rlhf_grpo.config import WeightedReward

OWN = ("prompts", "completions", "completion_ids")


@dataclass
class Reward:
    """A reward function with its label in the metrics and its weight in the sum."""

    label: str
    weight: float
    function: Any
    warned: bool = False

    def wants(self) -> tuple[set[str], set[str], bool]:
        """(parameters it needs, parameters it takes, whether it takes any column)."""
        parameters = inspect.signature(self.function).parameters.values()
        named = [
            p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name != "self"
        ]
        needs = {p.name for p in named if p.default is p.empty}
        return needs, {p.name for p in named}, any(p.kind is p.VAR_KEYWORD for p in parameters)

    def check_columns(self, columns: Sequence[str], where: str) -> list[str]:
        """Problems: columns that the function needs and the data lacks."""
        missing = sorted(self.wants()[0] - set(OWN) - set(columns))
        return [
            f"{where}: reward '{self.label}' needs the column '{name}', which the prompts do not have; they have "
            f"{', '.join(sorted(columns)) or 'no columns beside the prompt'}"
            for name in missing
        ]

    async def call(self, inputs: RewardInputs) -> np.ndarray:
        """float64 [N]; NaN where the function does not apply. Raises RunError where it returns something else."""
        _, takes, any_column = self.wants()
        offered = {**inputs.columns, **{name: getattr(inputs, name) for name in OWN}}
        values = self.function(**{k: v for k, v in offered.items() if any_column or k in takes})
        if inspect.isawaitable(values):
            values = await values
        return self.checked(values, len(inputs.completions))

    def checked(self, values: Any, expected: int) -> np.ndarray:
        try:
            given = list(values)
        except TypeError:
            raise RunError(
                f"reward '{self.label}' returned {type(values).__name__}; it must return a list of {expected} numbers, "
                "one a completion"
            ) from None
        if len(given) != expected:
            raise RunError(
                f"reward '{self.label}' returned {len(given)} values for {expected} completions; it must return one "
                "each, None where it does not apply"
            )
        out = np.empty(expected, np.float64)
        for i, value in enumerate(given):
            try:
                out[i] = np.nan if value is None else float(value)
            except (TypeError, ValueError):
                raise RunError(
                    f"reward '{self.label}' returned {value!r} for completion {i}; a number or None is expected"
                ) from None
        if np.isinf(out).any():
            raise RunError(
                f"reward '{self.label}' returned {out[np.isinf(out)][0]} for completion {int(np.isinf(out).argmax())}; "
                "rewards must be finite, None where the function does not apply"
            )
        undefined = sum(value is not None and np.isnan(x) for value, x in zip(given, out, strict=True))
        if undefined and not self.warned:
            self.warned = True
            warnings.warn(
                f"reward '{self.label}' returned NaN for {undefined} of {expected} completions: taken as None, "
                "'does not apply'",
                stacklevel=2,
            )
        return out


def make_rewards(
    components: Sequence[WeightedReward],
    given: Sequence[Any] | None,
    weights: Sequence[float] | None,
    registry: Registry,
    where: str,
) -> list[Reward]:
    """The rewards a config names and a caller hands over (callables, registered names, reward model directories).

    Raises InputError where there is none, two share a label, or weights do not match.
    """
    rewards: list[Reward] = []
    for component in components:
        function = registry.get(REWARD, component.name, **component.options)
        rewards.append(Reward(component.label or _label(component.name), component.weight, function))
    for function in given or ():
        if isinstance(function, str):
            is_name = function in registry.names(REWARD) or ":" in function
            made = (
                registry.get(REWARD, function) if is_name else registry.get(REWARD, "model", model=function)
            )
            rewards.append(Reward(_label(function), 1.0, made))
        else:
            label = getattr(function, "__name__", type(function).__name__)
            rewards.append(Reward(label, 1.0, function))
    if not rewards:
        raise InputError(f"{where}.rewards: missing; name at least one reward function or reward model")
    labels = [reward.label for reward in rewards]
    for label in labels:
        if labels.count(label) > 1:
            raise InputError(f"{where}.rewards: two rewards are called '{label}'; give one of them a `label`")
    if weights is not None:
        if len(weights) != len(rewards):
            raise InputError(f"{where}.reward_weights: {len(weights)} weights for {len(rewards)} rewards")
        for reward, weight in zip(rewards, weights, strict=True):
            reward.weight = weight
    return rewards


def check_columns(rewards: Sequence[Reward], columns: Sequence[str], stage: Stage) -> None:
    """Raises InputError, all problems at once, where a reward needs a column that the prompts lack."""
    problems = [p for r in rewards for p in r.check_columns(columns, f"stage '{stage.name}'.rewards")]
    if problems:
        raise InputError(*problems)


def _label(name: str) -> str:
    """`file.py:function` without the file's directory: the same metric wherever a run happens."""
    file, _, function = name.rpartition(":")
    return f"{Path(file).name}:{function}" if file.endswith(".py") else name


def set_up(rewards: Sequence[Reward], columns: Sequence[str], stage: Stage) -> None:
    """Check columns, then let rewards load what they need."""
    check_columns(rewards, columns, stage)
    for reward in rewards:
        if hasattr(reward.function, "setup"):
            reward.function.setup(stage)


def score(rewards: Sequence[Reward], inputs: RewardInputs) -> np.ndarray:
    """Every function on every completion, asynchronous ones at the same time: float64 [N, functions], NaN: none.

    Raises RunError, with the label, for whatever a function raises.
    """

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(reward.call(inputs) for reward in rewards), return_exceptions=True)

    with ThreadPoolExecutor(1) as thread:  # a notebook's thread already runs an event loop
        columns = thread.submit(asyncio.run, all_of_them()).result()
    for reward, column in zip(rewards, columns, strict=True):
        if isinstance(column, RunError | InputError):
            raise column
        if isinstance(column, BaseException):
            raise RunError(f"reward '{reward.label}' raised {type(column).__name__}: {column}") from column
    out = np.stack(columns, axis=-1)
    if np.isnan(out).all():
        raise RunError(
            "no reward function applies to any completion of the rollout: there is nothing to learn from"
        )
    return out
