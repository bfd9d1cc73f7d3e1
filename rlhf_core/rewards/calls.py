"""Call reward functions concurrently, within their timeouts, with the same outcome on every process."""

from __future__ import annotations

import asyncio
import json
import time
import warnings
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from rlhf_core.contracts import RewardInputs
from rlhf_core.errors import InputError, NonFiniteError, RunError, error_line
from rlhf_core.hidden import scrub
from rlhf_core.rewards.reward import LOG, select
from rlhf_core.rewards.worker_call import MetricLog
from rlhf_core.runtime.agreement import broadcast_numbers, broadcast_text, gather_maximum
from rlhf_core.workers import DiedError, RaisedError, TooSlowError, awaited, outcome_of, start_async

if TYPE_CHECKING:
    from rlhf_core.rewards.reward import Reward

Outcome = np.ndarray | BaseException | None
"""Outcome of a call: float64 [N], the exception it raised, or None where another process makes the call."""
DONE, SKIPPED, STOPPED = 0, 1, 2
HERE = str(Path(__file__).parent.parent)
SECONDS_TO_FIND_ROW = 5.0


def score(rewards: Sequence[Reward], inputs: RewardInputs, *, needed: bool = True) -> np.ndarray:
    """Score every completion with every function: float64 [N, functions], NaN where one does not apply or is skipped.

    Asynchronous functions and those in worker processes run concurrently, after the others. In a job of several
    processes the first one calls the functions and sends its values to the others bit for bit; objects with `setup` are
    called last, on all processes, one after another. Every process must call `score`; all return or raise the same.

    Raises RunError with the label, and the row where it can be found, for whatever a function raises (with on_error
    "skip" only for invalid return values), and, if `needed`, where no function applies to any completion. Counts
    skipped calls in `Reward.failures`. Rows in `Reward.unreadable` are not passed to the function.
    """
    for reward in rewards:
        reward.logged = {}
    outcomes = _call(rewards, inputs)
    # The worst state of each reward on any process, so that all go on or none does.
    states = gather_maximum(
        [_state(reward, outcome) for reward, outcome in zip(rewards, outcomes, strict=True)]
    )
    table = np.full((len(inputs.completions), len(rewards)), np.nan)
    skipped = []
    for f, (reward, outcome, state) in enumerate(zip(rewards, outcomes, states, strict=True)):
        if state == STOPPED:
            if isinstance(outcome, NonFiniteError) and inputs.places:
                raise RunError(
                    f"{inputs.places[outcome.sequence]}: reward '{reward.label}': {outcome}"
                ) from outcome
            if isinstance(outcome, RunError | InputError):
                raise outcome
            row = _find_failing_row(reward, inputs, outcome) if isinstance(outcome, Exception) else ""
            raise RunError(failure(reward, outcome) + row) from (
                outcome if isinstance(outcome, BaseException) else None
            )
        if state == SKIPPED:
            reward.logged = {}
            skipped.append(failure(reward, outcome))
            if not reward.failures:
                warnings.warn(f"{skipped[-1]}; such calls are left out and counted", stacklevel=2)
            reward.failures += 1
        elif isinstance(outcome, np.ndarray):
            table[:, f] = outcome
    table = broadcast_numbers(table)
    if needed and np.isnan(table).all():
        raise RunError(
            "; ".join(
                [
                    "no reward function applies to any completion of the rollout: there is nothing to learn from",
                    *skipped,
                ]
            )
        )
    return table


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


def failure(reward: Reward, outcome: Outcome) -> str:
    """Describe a failed call, starting with the reward's name."""
    if isinstance(outcome, TooSlowError):
        how = f"took longer than its timeout of {reward.timeout:g} s"
    elif isinstance(outcome, DiedError):
        how = f"could not be called: {outcome}"
    elif isinstance(outcome, RaisedError):
        how = str(outcome)
    elif isinstance(outcome, BaseException):
        how = error_line(outcome, HERE)
    else:
        how = "failed in another process, whose output says why"
    return scrub(f"reward '{reward.label}' {how}")


def _call(rewards: Sequence[Reward], inputs: RewardInputs) -> list[Outcome]:
    """Return one outcome per reward; objects with `setup` run on the mesh, in the same order on every process."""
    functions = [f for f, reward in enumerate(rewards) if not reward.collective]
    groups = [functions if jax.process_index() == 0 else []]
    groups += [[f] for f, reward in enumerate(rewards) if reward.collective]
    outcomes: list[Outcome] = [None] * len(rewards)
    for group in groups:
        if group:
            group_outcomes = call_together([rewards[f] for f in group], inputs)
            for f, outcome in zip(group, group_outcomes, strict=True):
                outcomes[f] = outcome
    return outcomes


def call_together(rewards: Sequence[Reward], inputs: RewardInputs) -> list[Outcome]:
    """Call functions concurrently on the event loop; return one outcome each."""
    # Functions that block the loop come first, before any timeout starts.
    order = sorted(range(len(rewards)), key=lambda f: rewards[f].in_workers or rewards[f].asynchronous)
    calls: dict[int, futures.Future[Any]] = {
        f: start_async(_call_one(rewards[f], inputs), None if rewards[f].in_workers else rewards[f].timeout)
        for f in order
    }
    try:
        futures.wait(calls.values())
    except BaseException:
        for call in calls.values():
            call.cancel()
        raise
    return [outcome_of(calls[f]) for f in range(len(rewards))]


async def _call_one(reward: Reward, inputs: RewardInputs) -> np.ndarray:
    """Call one function: float64 [N], NaN where it does not apply. Raises RunError for invalid return values."""
    if any(place in reward.unreadable for place in inputs.places):
        rows = [i for i, place in enumerate(inputs.places) if place not in reward.unreadable]
        table = np.full(len(inputs.places), np.nan)
        if rows:
            table[rows] = await _call_one(reward, select(inputs, rows))
        return table
    if reward.in_workers:
        parts = reward.parts(inputs)
        pool = reward.pool()
        futures = [
            asyncio.wrap_future(pool.submit(named=reward.arguments(part), seconds=reward.timeout))
            for part in parts
        ]
        returned, logged = zip(*await asyncio.gather(*futures), strict=True)
        names = dict.fromkeys(name for part in logged for name in part)
        reward.logged = {name: [x for part in logged for x in part.get(name, ())] for name in names}
        return np.concatenate(
            [
                reward.checked(values, len(part.completions))
                for values, part in zip(returned, parts, strict=True)
            ]
        )
    log = MetricLog()
    reward.logged = log.values  # a call that takes too long fills its own to the end
    values = await awaited(reward.function(**reward.arguments(inputs), **({LOG: log} if reward.logs else {})))
    return reward.checked(values, len(inputs.completions))


def _find_failing_row(reward: Reward, inputs: RewardInputs, error: BaseException) -> str:
    """Return ` for prompts.jsonl row 17`: the first row on which, alone, a plain function raises the same error.

    Empty where no row or every row does, where calls cost time or money, and where values depend on earlier calls.
    """
    if isinstance(error, TooSlowError | DiedError) or reward.asynchronous or reward.collective:
        return ""
    if hasattr(reward.function, "snapshot"):
        return ""
    began, failing, passes = time.monotonic(), -1, False
    for i in range(len(inputs.completions)):
        (again,) = call_together([reward], select(inputs, [i]))
        same = type(again) is type(error) and getattr(again, "type_name", 0) == getattr(error, "type_name", 0)
        failing, passes = i if same and failing < 0 else failing, passes or not same
        if failing >= 0 and passes:  # an error on every row is not the row's fault
            return f" for {inputs.places[failing] if inputs.places else f'completion {failing}'}"
        if time.monotonic() - began > SECONDS_TO_FIND_ROW:
            break
    return ""
