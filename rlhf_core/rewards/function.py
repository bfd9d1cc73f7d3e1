"""Reward functions: made from a config, asked for what they take, checked for what they return."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from rlhf_core.config import Component
from rlhf_core.contracts import REWARD, RewardInputs
from rlhf_core.errors import InputError, RunError, suggest
from rlhf_core.rewards.called import Called
from rlhf_core.workers import Pool, UnsendableError

if TYPE_CHECKING:
    from rlhf_core.plugins.registry import Registry

OWN = ("prompts", "completions", "completion_ids")
"""What every function may take, beside the columns of the prompts."""
ELSEWHERE = {
    "trainer_state": "TRL passes its trainer's state by this name, and nothing like it is passed here; remove the "
    "parameter, or give it a default. What changes over a run is a reward with state: a dataclass with `__call__`, "
    "`snapshot()` and `restore(kept)`",
    "log_extra": "TRL passes a function by this name; here every reward's values are in samples/*.jsonl beside the "
    "completions, and its mean and deviation in the metrics. Remove the parameter",
    "log_metric": "TRL passes a function by this name; here a metric of its own is a second reward with weight = 0. "
    "Remove the parameter",
    "environments": "TRL passes its environments by this name, and there are none here. Remove the parameter",
    "kwargs": "write it with two stars, **kwargs, to take every column",
}
"""Parameters that are no columns: {name: what to do}."""


class WeightedReward(Component):
    """A reward function in a config: `rewards: list[Annotated[WeightedReward, REWARD]]`."""

    weight: float = Field(default=1.0, description="of its values in the sum")
    label: str | None = Field(
        default=None, description="its name in the metrics; none: `name`, without directories"
    )
    timeout: float | None = Field(default=None, gt=0, description="seconds a call may take; none: no limit")
    processes: int | None = Field(
        default=None, ge=1, description="worker processes that share a call's completions; none: no worker"
    )
    on_error: Literal["stop", "skip"] = Field(
        default="stop",
        description="after a call that failed or took too long: end the run, or leave its completions unscored",
    )
    check: bool = Field(
        default=True,
        description="whether `rlhf check` calls it once, unless it is async, on made-up completions",
    )


@dataclass
class Reward:
    """A reward function with its label in the metrics and its weight in the sum.

    timeout: seconds a call may take; None: no limit. on_error: what a call that failed or took longer means.
    processes: worker processes that share a call; None: none, but one for a plain function with a timeout.
    tried: whether `rlhf check` may call it. failures: calls that were skipped so far.
    warned: whether NaN was warned of.
    """

    label: str
    weight: float
    function: Any
    timeout: float | None = None
    on_error: Literal["stop", "skip"] = "stop"
    failures: int = 0
    warned: bool = False
    processes: int | None = None
    tried: bool = True
    _pool: Pool | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def asynchronous(self) -> bool:
        """Whether it is called on the event loop, and cancelled there."""
        call = getattr(self.function, "func", self.function)
        return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)

    @property
    def in_workers(self) -> bool:
        """Whether it is called in processes of its own, which can be ended."""
        limited = self.timeout is not None or self.processes is not None
        return limited and not self.asynchronous and not self.collective

    def pool(self) -> Pool:
        """Its worker processes. Raises InputError for a function that another process cannot find."""
        if self._pool is None or self._pool.closed:
            try:
                self._pool = Pool(Called(self.function), self.processes or 1)
            except UnsendableError as error:
                why = "timeout" if self.processes is None else "processes"
                raise InputError(
                    f"reward '{self.label}' has `{why}`, so that it runs in a process of its own, which has to find it "
                    f"by name: {error}; put it into a file and name it file.py:function, make it async, or leave out "
                    f"`{why}`"
                ) from error
        return self._pool

    def parts(self, inputs: RewardInputs) -> list[RewardInputs]:
        """The call, in as many parts as there are processes; completions of one prompt stay together."""
        total, wanted = len(inputs.completions), self.processes or 1
        cuts = [0]
        for k in range(1, wanted):
            cut = max(total * k // wanted, cuts[-1])
            while cuts[-1] < cut < total and inputs.prompts[cut] == inputs.prompts[cut - 1]:
                cut += 1
            if cut > cuts[-1]:
                cuts.append(cut)
        ends = [*cuts[1:], total]
        return [
            part_of(inputs, start, end)
            for start, end in zip(cuts, ends, strict=True)
            if end > start or not start
        ]

    @property
    def chosen(self) -> dict[str, Any]:
        """The options that were given to a function; a column of such a name does not reach it."""
        return dict(self.function.keywords) if isinstance(self.function, functools.partial) else {}

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
            f"{where}: reward '{self.label}' needs '{name}': {ELSEWHERE[name]}"
            if name in ELSEWHERE
            else f"{where}: reward '{self.label}' needs the column '{name}', which the prompts do not have; they have "
            f"{have}"
            f"{f'.{meant} Beside columns there are {own}' if (meant := suggest(name, [*OWN, *columns])) else ''}"
            for name in missing
        ]

    def arguments(self, inputs: RewardInputs) -> dict[str, Any]:
        """What the function is called with: what it names, and every column where it takes any. Copies: what it does to
        them, no other function sees.
        """
        _, takes, any_column = self.wants()
        offered = {**inputs.columns, **{name: getattr(inputs, name) for name in OWN}}
        asked = {
            name: value
            for name, value in offered.items()
            if (any_column or name in takes) and name not in self.chosen
        }
        if self.in_workers:  # what is sent is a copy
            return asked
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
                "one per completion"
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
                processes=component.processes,
                tried=component.check,
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
    problems = [f"{where}.rewards: {problem}" for reward in rewards for problem in _unsuited(reward)]
    if problems:
        raise InputError(*problems)
    if weights is not None:
        if len(weights) != len(rewards):
            raise InputError(f"{where}.reward_weights: {len(weights)} weights for {len(rewards)} rewards")
        for reward, weight in zip(rewards, weights, strict=True):
            reward.weight = weight
    return rewards


def part_of(inputs: RewardInputs, start: int, end: int) -> RewardInputs:
    """The completions start to end, without the last."""
    return RewardInputs(
        inputs.prompts[start:end],
        inputs.completions[start:end],
        inputs.completion_ids[start:end],
        {name: values[start:end] for name, values in inputs.columns.items()},
        inputs.places[start:end],
    )


def _unsuited(reward: Reward) -> list[str]:
    """Why it cannot have the `timeout` or `processes` that it has."""
    limits = [name for name in ("timeout", "processes") if getattr(reward, name) is not None]
    if reward.collective and limits:
        return [
            f"'{reward.label}' is an object with `setup`: it computes on the mesh and cannot be ended there; leave out "
            f"its `{limits[0]}`"
        ]
    if reward.asynchronous and reward.processes is not None:
        return [
            f"'{reward.label}' is asynchronous: its calls wait together as it is; leave out its `processes`"
        ]
    if not reward.in_workers:
        return []
    if hasattr(reward.function, "snapshot"):
        return [
            f"'{reward.label}' has `snapshot`: its values depend on what it has seen, which a worker process would "
            f"keep to itself; leave out its `{limits[0]}`"
        ]
    try:
        reward.pool()
    except InputError as error:
        return list(error.problems)
    return []


def _label(name: str) -> str:
    """`file.py:function` without the file's directory: the same metric wherever a run happens."""
    file, _, function = name.rpartition(":")
    return f"{Path(file).name}:{function}" if file.endswith(".py") else name
