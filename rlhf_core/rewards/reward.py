"""Reward functions: how a config names them, how they are called, and what their values must be."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from pydantic import Field

from rlhf_core.config import Component
from rlhf_core.config.durations import Seconds
from rlhf_core.contracts import REWARD, RewardInputs
from rlhf_core.errors import InputError, NonFiniteError, RunError, counted, warn
from rlhf_core.hidden import remember_attributes, scrub
from rlhf_core.rewards.values import LOG, RewardCall, Scored
from rlhf_core.runtime.agreement import broadcast_numbers, broadcast_text, gather_maximum
from rlhf_core.workers.event_loop import call_now, is_async, outcome_of, start_async
from rlhf_core.workers.pickling import UnsendableError
from rlhf_core.workers.pool import DiedError, Pool, TooSlowError, describe_failure

if TYPE_CHECKING:
    from rlhf_core.environments import EnvironmentOptions
    from rlhf_core.plugins.registry import Registry
    from rlhf_core.stage import Stage

OF_EPISODES = "environment"
"""The name of the reward that an environment gives."""
OWN = ("prompts", "completions", "completion_ids")
"""Arguments that every function may take besides the columns of the prompts and LOG."""
Outcome = np.ndarray | BaseException | None
"""Outcome of a call: float64 [N], the exception it raised, or None where another process makes the call."""
DONE, SKIPPED, STOPPED = 0, 1, 2
SECONDS_TO_FIND_ROW = 5.0


class WeightedReward(Component):
    """Name a reward function in a config: `rewards: list[Annotated[WeightedReward, REWARD]]`."""

    weight: float = Field(default=1.0, description="weight of its values in the sum")
    label: str | None = Field(
        default=None, description="name in the metrics; none: `name` without directories"
    )
    timeout: Seconds | None = Field(default=None, gt=0, description="seconds per call; none: no limit")
    processes: int | None = Field(
        default=None,
        ge=1,
        description="worker processes that share a call's completions; none: run in this process",
    )
    on_error: Literal["stop", "skip"] = Field(
        default="stop",
        description="what to do when a call fails or takes too long: end the run, or leave its completions unscored",
    )
    check: bool = Field(
        default=True,
        description="whether `rlhf check` calls it once on made-up completions, unless it is async",
    )


@dataclass
class Reward:
    """A reward function with its label in the metrics and its weight in the sum.

    timeout: seconds per call; None: no limit. on_error: whether a call that fails or exceeds it ends the run.
    processes: worker processes that share a call; None: one for a plain function with a timeout, else none.
    tried: whether `rlhf check` may call it. installed: whether it is registered by name.
    unreadable: places of rows that its `check` rejected, which it does not score.
    failures: calls skipped so far. logged: metrics of the last call, {name: values}.
    told: what was warned about, once each. ready: whether it has loaded what it needs. settled: its state after the
    rollout that is trained on, which evaluations see; None: as it is.
    """

    label: str
    weight: float
    function: Any
    timeout: float | None = None
    on_error: Literal["stop", "skip"] = "stop"
    processes: int | None = None
    tried: bool = True
    installed: bool = False
    unreadable: set[str] = field(default_factory=set)
    failures: int = 0
    logged: dict[str, list[float]] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    ready: bool = False
    settled: Any = field(default=None, init=False, repr=False, compare=False)
    _pool: Pool | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def asynchronous(self) -> bool:
        """Return whether it is called, and cancelled, on the event loop."""
        return is_async(self.function)

    @property
    def collective(self) -> bool:
        """Return whether it is an object with `setup`, whose weights are on the mesh of all processes.

        Not an asynchronous one: what that waits for is elsewhere.
        """
        return hasattr(self.function, "setup") and not self.asynchronous

    @property
    def in_workers(self) -> bool:
        """Return whether it is called in worker processes, which can be killed."""
        limited = self.timeout is not None or self.processes is not None
        return limited and not self.asynchronous and not self.collective

    @property
    def logs(self) -> bool:
        """Return whether it takes `log_metric`."""
        return LOG in self.wants()[1]

    @property
    def chosen(self) -> dict[str, Any]:
        """Return the options set for a function; columns with these names do not reach it."""
        return dict(self.function.keywords) if isinstance(self.function, functools.partial) else {}

    @property
    def call(self) -> RewardCall:
        """Return what calls it."""
        return RewardCall(self.function, f"reward '{self.label}'", self.logs)

    def pool(self) -> Pool:
        """Return its worker pool. Raises InputError for a function that another process cannot import."""
        if self._pool is None or self._pool.closed:
            try:
                self._pool = Pool(self.call, self.processes or 1)
            except UnsendableError as error:
                why = "timeout" if self.processes is None else "processes"
                raise InputError(
                    f"reward '{self.label}' has `{why}`, so it runs in another process, which must find it by "
                    f"name: {error}; put it in a file and name it file.py:function, make it async, or leave out "
                    f"`{why}`"
                ) from error
        return self._pool

    def wants(self) -> tuple[set[str], set[str], bool]:
        """Return (parameters it needs, parameters it takes, whether it takes every column)."""
        parameters = inspect.signature(self.function).parameters.values()
        named = [
            p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name != "self"
        ]
        needs = {p.name for p in named if p.default is p.empty}
        return needs, {p.name for p in named}, any(p.kind is p.VAR_KEYWORD for p in parameters)

    def arguments(self, inputs: RewardInputs) -> dict[str, Any]:
        """Return the keyword arguments of a call: those the function names, or all where it takes **kwargs.

        Values are copies, so that no function sees another one's changes.
        """
        _, takes, any_column = self.wants()
        available = {**inputs.columns, **{name: getattr(inputs, name) for name in OWN}}
        arguments = {
            name: value
            for name, value in available.items()
            if (any_column or name in takes) and name not in self.chosen and name != LOG
        }
        if self.in_workers:  # sending copies
            return arguments
        return {
            name: list(map(list, value)) if name == "completion_ids" else copy.deepcopy(value)
            for name, value in arguments.items()
        }


def open_rewards(
    components: Sequence[WeightedReward],
    stage: Stage,
    *,
    weights: Sequence[float] | None = None,
    environment: EnvironmentOptions | None = None,
) -> list[Reward]:
    """Make the reward functions of a config's field `rewards`, followed by those passed from Python.

    weights: of all functions in this order, instead of those in the config. environment: of the stage's episodes, if
    any, whose own reward, called "environment" and weighted by its field `weight`, comes before them.
    Raises InputError where there is no function, and for unknown names and options, equal labels, weights that do not
    match in number, and a function that cannot have its `timeout` or `processes`.
    """
    registry, where = stage.registry, f"stage '{stage.name}'"
    rewards = [_named(component, registry) for component in components]
    rewards += [_given(function, registry) for function in stage.inputs.get("rewards") or ()]
    if weights is not None:
        own = "" if environment is None else "; the environment has its own, environment.weight"
        _set_weights(rewards, weights, where, own)
    if environment is not None:
        rewards.insert(0, Reward(OF_EPISODES, environment.weight, episode_rewards, tried=False))
    if not rewards:
        raise InputError(f"{where}.rewards: missing; name at least one reward function or reward model")
    labels = [reward.label for reward in rewards]
    doubled = [label for label in labels if labels.count(label) > 1]
    if doubled:
        raise InputError(
            f"{where}.rewards: two rewards are called '{doubled[0]}'; give one of them a `label`"
        )
    problems = [f"{where}.rewards: {problem}" for reward in rewards for problem in _limit_problems(reward)]
    if problems:
        raise InputError(*problems)
    return rewards


def _named(component: WeightedReward, registry: Registry) -> Reward:
    """Make a reward that a config names."""
    return Reward(
        component.label or _label(component.name),
        component.weight,
        registry.get(REWARD, component.name, **component.options, **_told(component, registry)),
        component.timeout,
        component.on_error,
        processes=component.processes,
        tried=component.check,
        installed=":" not in component.name,
    )


def _given(function: Any, registry: Registry) -> Reward:
    """Make a reward of what was passed from Python: a function, a registered name, or the directory of a model."""
    if not isinstance(function, str):
        remember_attributes(function)
        label = getattr(function, "__name__", type(function).__name__)
        return Reward(label, 1.0, function)
    if function in registry.names(REWARD) or ":" in function:
        return Reward(_label(function), 1.0, registry.get(REWARD, function))
    return Reward(_label(function), 1.0, registry.get(REWARD, "model", model=function))


def _set_weights(rewards: Sequence[Reward], weights: Sequence[float], where: str, hint: str) -> None:
    if len(weights) != len(rewards):
        raise InputError(
            f"{where}.reward_weights: {counted(len(weights), 'weights')} for "
            f"{counted(len(rewards), 'rewards')}{hint}"
        )
    for reward, weight in zip(rewards, weights, strict=True):
        reward.weight = weight


def _told(component: WeightedReward, registry: Registry) -> dict[str, Any]:
    """Return `on_error` for a component that declares an option of this name, to leave out part of a call itself."""
    declared = registry.options(REWARD, component.name)
    return {"on_error": component.on_error} if "on_error" in declared else {}


def episode_rewards(environment_rewards: Sequence[float | None]) -> Sequence[float | None]:
    """Return the sum of each episode's rewards; None where the environment gave none."""
    return environment_rewards


def snapshots(rewards: Sequence[Reward]) -> dict[str, Any]:
    """Return {label: its state for a checkpoint} of functions that are objects with `snapshot`."""
    return {r.label: copy.deepcopy(r.function.snapshot()) for r in rewards if hasattr(r.function, "snapshot")}


def restore(rewards: Sequence[Reward], kept: Mapping[str, Any]) -> None:
    """Restore each reward's state from what `snapshots` returned."""
    for reward in rewards:
        if reward.label in kept:
            reward.function.restore(copy.deepcopy(kept[reward.label]))


@contextmanager
def as_settled(rewards: Sequence[Reward]) -> Iterator[None]:
    """Give rewards their `settled` states inside the block, and then those that they had before."""
    before = snapshots(rewards)
    restore(rewards, {reward.label: reward.settled for reward in rewards if reward.settled is not None})
    try:
        yield
    finally:
        restore(rewards, before)


def parts(inputs: RewardInputs, count: int) -> list[RewardInputs]:
    """Split a call into at most `count` parts of similar size; completions of one prompt stay together."""
    total = len(inputs.completions)
    cuts = [0]
    for k in range(1, count):
        cut = max(total * k // count, cuts[-1])
        while cuts[-1] < cut < total and inputs.prompts[cut] == inputs.prompts[cut - 1]:
            cut += 1
        if cuts[-1] < cut < total:
            cuts.append(cut)
    ends = [*cuts[1:], total]
    return [inputs.take(range(start, end)) for start, end in zip(cuts, ends, strict=True)]


def _limit_problems(reward: Reward) -> list[str]:
    """List why a reward cannot have its `timeout` or `processes`."""
    limits = [name for name in ("timeout", "processes") if getattr(reward, name) is not None]
    why = None
    if reward.collective and limits:
        why = "is an object with `setup`: it runs on the mesh, where it cannot be killed"
    elif reward.asynchronous and reward.processes is not None:
        why, limits = "is asynchronous: its calls already run concurrently", ["processes"]
    elif reward.in_workers and hasattr(reward.function, "snapshot"):
        why = "has `snapshot`: its values depend on its state, which would stay in a worker process"
    if why:
        return [f"'{reward.label}' {why}; leave out its `{limits[0]}`"]
    try:
        if reward.in_workers:
            reward.pool()
    except InputError as error:
        return list(error.problems)
    return []


def _label(name: str) -> str:
    """Drop the directory from `file.py:function`, so that metrics have the same name on every machine."""
    return Path(name).name if ":" in name else name


# Call them


def score(rewards: Sequence[Reward], inputs: RewardInputs, *, needed: bool = True) -> np.ndarray:
    """Score every completion with every function: float64 [N, functions], NaN where one does not apply or is skipped.

    Asynchronous functions and those in worker processes run concurrently, after the others. In a job of several
    processes the first one calls the functions and sends its values to the others bit for bit; objects with `setup` are
    called last, on all processes, one after another. Every process must call `score`; all return or raise the same.

    Raises RunError with the label, and the row where it can be found, for anything a function raises (with on_error
    "skip" only for invalid return values), and, if `needed`, where no function applies to any completion. Counts
    skipped calls in `Reward.failures`. Rows in `Reward.unreadable` are not passed to the function.
    """
    for reward in rewards:
        reward.logged = {}
    called: dict[str, Outcome] = {}
    for group in _groups(rewards):
        called |= zip((reward.label for reward in group), call_together(group, inputs), strict=True)
    outcomes = [called.get(reward.label) for reward in rewards]
    # The worst state of each reward on any process, so that all continue or none does.
    states = gather_maximum([_state(*each) for each in zip(rewards, outcomes, strict=True)])
    table = np.full((len(inputs.completions), len(rewards)), np.nan)
    skipped: list[str] = []
    for f, (reward, outcome, state) in enumerate(zip(rewards, outcomes, states, strict=True)):
        if state == STOPPED:
            raise _error(reward, outcome, inputs)
        if state == SKIPPED:
            reward.logged = {}
            skipped.append(failure(reward, outcome))
            if not reward.failures:
                warn(f"{skipped[-1]}; such calls are left out and counted")
            reward.failures += 1
        elif isinstance(outcome, np.ndarray):
            table[:, f] = outcome
    table = broadcast_numbers(table)
    if needed and np.isnan(table).all():
        nothing = "no reward function applies to any completion of the rollout, so there is nothing to learn"
        raise RunError("; ".join([nothing, *skipped]))
    return table


def _groups(rewards: Sequence[Reward]) -> Iterator[list[Reward]]:
    """Yield the rewards that this process calls together: functions, then objects with `setup` one after another."""
    if jax.process_index() == 0:
        yield [reward for reward in rewards if not reward.collective]
    yield from ([reward] for reward in rewards if reward.collective)


def logged_metrics(rewards: Sequence[Reward]) -> dict[str, float]:
    """Average what each reward logged in the last call of `score`, {metric: value}; every process must call this."""
    if not any(reward.logs for reward in rewards):
        return {}
    metrics = {
        f"rewards/{reward.label}/{name}": sum(values) / len(values)
        for reward in rewards
        for name, values in reward.logged.items()
    }
    # The first process called the functions.
    own: dict[str, float] = json.loads(broadcast_text(json.dumps(metrics)))
    return own


def _state(reward: Reward, outcome: Outcome) -> int:
    if not isinstance(outcome, BaseException):
        return DONE
    wrong_values = isinstance(outcome, RunError | InputError)
    return SKIPPED if reward.on_error == "skip" and not wrong_values else STOPPED


def _error(reward: Reward, outcome: Outcome, inputs: RewardInputs) -> Exception:
    """Make the error with which a failed call ends the run."""
    if isinstance(outcome, NonFiniteError) and inputs.places:
        error: Exception = RunError(f"{inputs.places[outcome.sequence]}: reward '{reward.label}': {outcome}")
    elif isinstance(outcome, RunError | InputError):
        return outcome
    else:
        row = _find_failing_row(reward, inputs, outcome) if isinstance(outcome, Exception) else ""
        error = RunError(failure(reward, outcome) + row)
    error.__cause__ = outcome if isinstance(outcome, BaseException) else None
    return error


def failure(reward: Reward, outcome: Outcome) -> str:
    """Describe a failed call, starting with the reward's name."""
    how = "failed in another process; see that process's output"
    if isinstance(outcome, BaseException):
        how = describe_failure(outcome, reward.timeout)
    return scrub(f"reward '{reward.label}' {how}")


def call_together(rewards: Sequence[Reward], inputs: RewardInputs) -> list[Outcome]:
    """Call functions: those that run in this thread one after another, then the others at the same time."""
    begun: dict[int, list[futures.Future[Scored]]] = {}
    readable = [_readable(reward, inputs) for reward in rewards]
    for f in sorted(range(len(rewards)), key=lambda f: rewards[f].in_workers or rewards[f].asynchronous):
        reward = rewards[f]
        own = inputs.take(readable[f])
        count = len(own.completions)
        if not count:
            begun[f] = []
        elif reward.in_workers or reward.asynchronous:
            begun[f] = _start(reward, own)
        else:
            begun[f] = [call_now(reward.call, reward.arguments(own), count)]
    calls = [call for each in begun.values() for call in each]
    try:
        futures.wait(calls)
    except BaseException:
        for call in calls:
            call.cancel()
        raise
    count = len(inputs.completions)
    return [_outcome(reward, begun[f], readable[f], count) for f, reward in enumerate(rewards)]


def _readable(reward: Reward, inputs: RewardInputs) -> list[int]:
    """List the completions whose rows the reward's `check` did not reject."""
    places = inputs.places or [""] * len(inputs.completions)
    return [i for i, place in enumerate(places) if place not in reward.unreadable]


def _start(reward: Reward, inputs: RewardInputs) -> list[futures.Future[Scored]]:
    """Start a call on the event loop, or one for each part in worker processes."""
    if reward.asynchronous:
        call = reward.call.on_loop(reward.arguments(inputs), len(inputs.completions))
        return [start_async(call, reward.timeout)]
    pool = reward.pool()
    return [
        pool.submit(reward.arguments(part), len(part.completions), seconds=reward.timeout)
        for part in parts(inputs, reward.processes or 1)
    ]


def _outcome(
    reward: Reward, calls: Sequence[futures.Future[Scored]], rows: Sequence[int], count: int
) -> Outcome:
    """Join the results of calls for these of `count` completions; return the first exception if one raised."""
    done: list[Any] = [outcome_of(call) for call in calls]
    raised = [each for each in done if isinstance(each, BaseException)]
    if raised:
        return raised[0]
    values = [value for part, _ in done for value in part]
    for _, logged in done:
        for name, numbers in logged.items():
            reward.logged.setdefault(name, []).extend(numbers)
    undefined = sum(value is not None and math.isnan(value) for value in values)
    if undefined and "NaN" not in reward.told:
        reward.told.add("NaN")
        warn(
            f"reward '{reward.label}' returned NaN for {undefined} of {len(values)} completions: treated as None, "
            "'does not apply'"
        )
    table = np.full(count, np.nan)
    table[rows] = np.array(values, np.float64)
    return table


def _find_failing_row(reward: Reward, inputs: RewardInputs, error: BaseException) -> str:
    """Return ` for prompts.jsonl row 17`: the first row on which, alone, a plain function raises the same error.

    Empty where no row or every row does, where calls cost time or money, and where values depend on earlier calls.
    """
    if isinstance(error, TooSlowError | DiedError) or reward.asynchronous or reward.collective:
        return ""
    if hasattr(reward.function, "snapshot"):
        return ""
    until = time.monotonic() + SECONDS_TO_FIND_ROW
    fails: list[bool] = []
    for i in range(len(inputs.completions)):
        (again,) = call_together([reward], inputs.take([i]))
        alike = type(again) is type(error)
        fails.append(alike and getattr(again, "type_name", 0) == getattr(error, "type_name", 0))
        # An error on every row is not the row's fault.
        if any(fails) and not all(fails):
            failing = fails.index(True)
            return f" for {inputs.places[failing] if inputs.places else f'completion {failing}'}"
        if time.monotonic() > until:
            break
    return ""
