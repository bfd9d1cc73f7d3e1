"""What `rlhf check` can say of reward functions: their columns, the rows they read, and a call of each."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.contracts import Forecast, RewardInputs
from rlhf_core.data.conversations import is_chat
from rlhf_core.data.ragged import Cells
from rlhf_core.errors import InputError, RunError
from rlhf_core.rewards.calling import call_together, failure
from rlhf_core.rewards.function import OWN, Reward
from rlhf_core.rewards.setup import checked
from rlhf_core.rewards.unreadable import UnreadableError
from rlhf_core.workers import RaisedError, TooSlowError, run_async

if TYPE_CHECKING:
    from rlhf_core.data import Prompts, Records
    from rlhf_core.stage import Stage

SECONDS = 60.0
MADE_UP = (" The answer is 4.", "4", "")
"""Completions, one of them empty, as a policy writes them sooner or later."""
IDS = ([5, 6, 7, 5, 6, 1], [5, 1], [1])
FORMS = {
    True: "completions are lists of messages here: c[-1]['content'] is the text",
    False: "completions are texts here",
}
MISTAKES = ("TypeError", "AttributeError", "NameError", "ImportError", "ModuleNotFoundError")
"""What a function raises because of how it is written; anything else may be due to what was made up."""


@dataclass(frozen=True)
class _Table:
    """Prompts before they are tokenised, as far as rewards see them."""

    raw: Sequence[Any]
    chat: bool
    columns: dict[str, Sequence[Any]]
    records: Records

    def where(self, i: int) -> str:
        return self.records.where(i)


def forecast_rewards(rewards: Sequence[Reward], prompts: Prompts | Records, stage: Stage) -> Forecast:
    """Forecast what rewards will do with these prompts.

    Plain functions are called once, in a process of their own, with made-up completions of the first prompt, in the
    form that the run will have. Asynchronous ones may cost money and are not called, nor are objects with `setup` and
    rewards with `check = false`. Raises InputError, all problems at once, for what would end the run.
    """
    table: Any = prompts if hasattr(prompts, "raw") else _table(prompts)
    lines: list[str] = []
    warned: list[str] = []
    problems: list[str] = []
    try:
        warned += checked(rewards, table, stage)
    except InputError as error:
        problems += error.problems
    for reward in rewards:
        lines += _collisions(reward, table.columns)
        called = reward.tried and not reward.asynchronous and not reward.collective
        if not called or not len(table.raw) or reward.check_columns(list(table.columns), ""):
            continue
        said, fatal = _tried(reward, table)
        if said:
            (problems if fatal else warned).append(f"stage '{stage.name}'.rewards: {said}" if fatal else said)
    if problems:
        raise InputError(*problems)
    return Forecast(tuple(lines), tuple(warned))


def _table(records: Records) -> _Table:
    rows = np.arange(len(records))
    return _Table(
        Cells(records, rows, "prompt"),
        any(is_chat(source, "prompt") for source in records.sources if "prompt" in source.columns),
        {name: Cells(records, rows, name) for name in records.columns if name != "prompt"},
        records,
    )


def _collisions(reward: Reward, columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Which of an option and a column of one name the function gets."""
    needs, takes, _ = reward.wants()
    lines = [
        f"reward '{reward.label}': its option {name} = {value!r} is used, and the column '{name}' is not"
        for name, value in reward.chosen.items()
        if name in columns
    ]
    return lines + [
        f"reward '{reward.label}': {name} is the column of that name; an option {name} in the pipeline would be used "
        "in its place"
        for name in sorted(takes - needs - set(OWN) - set(reward.chosen))
        if name in columns
    ]


def _tried(reward: Reward, prompts: Any) -> tuple[str, bool]:
    """(what a call with made-up completions shows, whether it is a mistake); an empty text where nothing."""
    n = len(MADE_UP)
    inputs = RewardInputs(
        [prompts.raw[0]] * n,
        [[{"role": "assistant", "content": text}] if prompts.chat else text for text in MADE_UP],
        [list(ids) for ids in IDS],
        {name: [values[0]] * n for name, values in prompts.columns.items()},
        [prompts.where(0)] * n,
    )
    probe = dataclasses.replace(reward, timeout=reward.timeout or SECONDS)
    function = getattr(reward.function, "func", reward.function)
    home = str(getattr(function, "__module__", ""))
    try:
        if home.startswith("rlhf_core."):
            raise InputError("ours need no process of their own")
        probe.pool()
    except InputError:
        probe = dataclasses.replace(reward)
    with contextlib.redirect_stdout(sys.stderr):
        (outcome,) = run_async(call_together([probe], inputs))
    if probe.in_workers:
        probe.pool().close()
    return _judged(probe, outcome, FORMS[prompts.chat])


def _judged(reward: Reward, outcome: Any, form: str) -> tuple[str, bool]:
    if outcome is None or isinstance(outcome, np.ndarray | UnreadableError):
        return "", False
    if isinstance(outcome, RunError | InputError):
        return f"{outcome} (called with made-up completions)", True
    text = failure(reward, outcome)
    if isinstance(outcome, TooSlowError):
        return f"{text} for {len(MADE_UP)} made-up completions", False
    name = outcome.type_name if isinstance(outcome, RaisedError) else type(outcome).__name__
    if name in MISTAKES and "'NoneType'" not in text:
        return f"{text}, called with made-up completions; {form}", True
    return (
        f"{text}, called with made-up completions, one of them empty; in a run that would end it, or with "
        'on_error = "skip" leave the whole call unscored',
        False,
    )
