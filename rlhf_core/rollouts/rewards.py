"""Reward functions: made from a config, asked for what they take, checked for what they return."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from rlhf_core.contracts import REWARD, RewardInputs
from rlhf_core.errors import InputError, RunError, near
from rlhf_core.options import Component

if TYPE_CHECKING:
    from rlhf_core.registry import Registry
    from rlhf_core.stage import Stage

OWN = ("prompts", "completions", "completion_ids")
"""What every function may take, beside the columns of the prompts."""


class WeightedReward(Component):
    """A reward function in a config: `rewards: list[Annotated[WeightedReward, REWARD]]`."""

    weight: float = Field(default=1.0, description="of its values in the sum")
    label: str | None = Field(
        default=None, description="its name in the metrics; none: `name`, without directories"
    )
    timeout: float | None = Field(default=None, gt=0, description="seconds a call may take; none: no limit")
    on_error: Literal["stop", "skip"] = Field(
        default="stop",
        description="after a call that failed or took too long: end the run, or leave its completions unscored",
    )


@dataclass
class Reward:
    """A reward function with its label in the metrics and its weight in the sum.

    timeout: seconds a call may take; None: no limit. on_error: what a call that failed or took longer means.
    failures: calls that were skipped so far. warned: whether NaN has been spoken of.
    """

    label: str
    weight: float
    function: Any
    timeout: float | None = None
    on_error: Literal["stop", "skip"] = "stop"
    failures: int = 0
    warned: bool = False

    @property
    def collective(self) -> bool:
        """Whether it is an object with `setup`, whose weights are on the mesh of all processes."""
        return hasattr(self.function, "setup")

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
        own, have = ", ".join(OWN), ", ".join(sorted(columns)) or "no columns beside the prompt"
        return [
            f"{where}: reward '{self.label}' needs the column '{name}', which the prompts do not have; they have {have}"
            f"{f'.{meant} Beside columns there are {own}' if (meant := near(name, [*OWN, *columns])) else ''}"
            for name in missing
        ]

    def arguments(self, inputs: RewardInputs) -> dict[str, Any]:
        """What the function is called with: what it names, and every column where it takes any. Copies: what it does to
        them, no other function sees.
        """
        _, takes, any_column = self.wants()
        offered = {**inputs.columns, **{name: getattr(inputs, name) for name in OWN}}
        asked = {name: value for name, value in offered.items() if any_column or name in takes}
        return {
            name: list(map(list, value)) if name == "completion_ids" else copy.deepcopy(value)
            for name, value in asked.items()
        }

    def checked(self, values: Any, expected: int) -> np.ndarray:
        """float64 [expected]; NaN where the function does not apply. Raises RunError for anything but such a list."""
        try:
            if isinstance(values, Mapping):
                raise TypeError
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
                if isinstance(value, str):
                    raise TypeError
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

    Raises InputError where there is none, two share a label, weights do not match, or a timeout has nothing to act on.
    """
    rewards: list[Reward] = []
    for component in components:
        function = registry.get(REWARD, component.name, **component.options)
        rewards.append(
            Reward(
                component.label or _label(component.name),
                component.weight,
                function,
                component.timeout,
                component.on_error,
            )
        )
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
    for reward in rewards:
        if reward.collective and reward.timeout is not None:
            raise InputError(
                f"{where}.rewards: '{reward.label}' is an object with `setup`: it computes on the mesh and cannot be "
                "left behind there; leave out its `timeout`"
            )
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


def snapshots(rewards: Sequence[Reward]) -> dict[str, Any]:
    """{label: what a checkpoint keeps of it} for functions that are objects with `snapshot`."""
    return {r.label: r.function.snapshot() for r in rewards if hasattr(r.function, "snapshot")}


def restore(rewards: Sequence[Reward], kept: Mapping[str, Any]) -> None:
    """Give each reward back what `snapshots` kept of it."""
    for reward in rewards:
        if reward.label in kept:
            reward.function.restore(kept[reward.label])
