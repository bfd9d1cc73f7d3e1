"""Calling reward functions: together, within their time, and with one outcome on every process."""

from __future__ import annotations

import asyncio
import inspect
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from rlhf_core.contracts import RewardInputs
from rlhf_core.errors import InputError, RunError, raised

if TYPE_CHECKING:
    from rlhf_core.rollouts.rewards import Reward

Outcome = np.ndarray | BaseException | None
"""What came of a call: float64 [N], what was raised, or None where another process makes the call."""
DONE, SKIPPED, STOPPED = 0, 1, 2
HERE = str(Path(__file__).parent.parent)


def score(rewards: Sequence[Reward], inputs: RewardInputs, *, needed: bool = True) -> np.ndarray:
    """Every function on every completion: float64 [N, functions], NaN where one does not apply or its call is skipped.

    Asynchronous functions and those with a timeout run at the same time, after the others. Of several processes the
    first calls the functions, and the others get its values bit for bit; objects with `setup` are called last, on all
    processes, one after another. Every process makes this call and returns, or raises, the same.

    Raises RunError, with the label, for whatever a function raises (with on_error "skip" only for values that are no
    rewards), and, if `needed`, where no function applies to any completion. Counts skipped calls in `Reward.failures`.
    """
    outcomes = _call(rewards, inputs)
    states = _agreed([_state(reward, outcome) for reward, outcome in zip(rewards, outcomes, strict=True)])
    table = np.full((len(inputs.completions), len(rewards)), np.nan)
    skipped = []
    for f, (reward, outcome, state) in enumerate(zip(rewards, outcomes, states, strict=True)):
        if state == STOPPED:
            if isinstance(outcome, RunError | InputError):
                raise outcome
            raise RunError(_failure(reward, outcome)) from (
                outcome if isinstance(outcome, BaseException) else None
            )
        if state == SKIPPED:
            skipped.append(_failure(reward, outcome))
            if not reward.failures:
                warnings.warn(f"{skipped[-1]}; such calls are left out and counted", stacklevel=2)
            reward.failures += 1
        elif isinstance(outcome, np.ndarray):
            table[:, f] = outcome
    table = _of_first_process(table)
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


def _state(reward: Reward, outcome: Outcome) -> int:
    if not isinstance(outcome, BaseException):
        return DONE
    wrong_values = isinstance(outcome, RunError | InputError)
    return SKIPPED if reward.on_error == "skip" and not wrong_values else STOPPED


def _failure(reward: Reward, outcome: Outcome) -> str:
    if isinstance(outcome, _TooSlowError):
        how = str(outcome)
    elif isinstance(outcome, BaseException):
        how = raised(outcome, HERE)
    else:
        how = "failed in another process, whose output says why"
    return f"reward '{reward.label}' {how}"


def _agreed(states: Sequence[int]) -> np.ndarray:
    """The worst state of each reward on any process, so that all go on or none does."""
    if jax.process_count() == 1:
        return np.array(states)
    return np.asarray(multihost_utils.process_allgather(np.array(states, np.int32))).max(axis=0)


def _of_first_process(table: np.ndarray) -> np.ndarray:
    """The first process's float64 table, as it is: sent as float64, jax would round it to float32."""
    if jax.process_count() == 1:
        return table
    return np.array(multihost_utils.broadcast_one_to_all(table.view(np.uint32))).view(np.float64)


def _call(rewards: Sequence[Reward], inputs: RewardInputs) -> list[Outcome]:
    """One outcome a reward. Objects with `setup` compute on the mesh: in the same order on every process."""
    functions = [f for f, reward in enumerate(rewards) if not reward.collective]
    groups = [functions if jax.process_index() == 0 else []]
    groups += [[f] for f, reward in enumerate(rewards) if reward.collective]
    outcomes: list[Outcome] = [None] * len(rewards)
    with ThreadPoolExecutor(1) as thread:  # a notebook's thread already runs an event loop
        for group in groups:
            called = thread.submit(asyncio.run, _together([rewards[f] for f in group], inputs)).result()
            for f, outcome in zip(group, called, strict=True):
                outcomes[f] = outcome
    return outcomes


async def _together(rewards: Sequence[Reward], inputs: RewardInputs) -> list[Outcome]:
    # Functions that hold the loop come first: no other's time runs meanwhile.
    order = sorted(range(len(rewards)), key=lambda f: _waits(rewards[f]))
    called = await asyncio.gather(*(_one(rewards[f], inputs) for f in order), return_exceptions=True)
    outcomes = dict(zip(order, called, strict=True))
    return [outcomes[f] for f in range(len(rewards))]


def _waits(reward: Reward) -> bool:
    return reward.timeout is not None or _is_async(reward.function)


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _one(reward: Reward, inputs: RewardInputs) -> np.ndarray:
    """float64 [N]; NaN where the function does not apply. Raises RunError where it returns something else."""
    arguments = reward.arguments(inputs)
    threaded = reward.timeout is not None and not _is_async(reward.function)
    try:
        async with asyncio.timeout(reward.timeout) as limit:
            values = reward.function(**arguments) if not threaded else _in_thread(reward.function, arguments)
            while inspect.isawaitable(values):  # a thread may return something to wait for, too
                values = await values
    except TimeoutError as error:
        if not limit.expired():  # the function's own
            raise
        left = "; its thread goes on in the background" if threaded else ""
        raise _TooSlowError(f"took longer than its timeout of {reward.timeout:g} s{left}") from error
    return reward.checked(values, len(inputs.completions))


class _TooSlowError(Exception):
    pass


def _in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> asyncio.Future[Any]:
    """The call in a thread of its own. A daemon, not one of a pool's: those are waited for when Python ends."""
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()

    def work() -> None:
        try:
            done.set_result(function(**arguments))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return asyncio.wrap_future(done)
