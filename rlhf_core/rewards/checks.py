"""Check reward functions before the first call: their columns, the rows that they can read, and one call of each."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.contracts import RewardInputs
from rlhf_core.data.conversations import is_chat
from rlhf_core.data.ragged import Cells
from rlhf_core.errors import InputError, RunError, raised
from rlhf_core.rewards.calls import call_together, failure
from rlhf_core.rewards.reward import OWN, Reward
from rlhf_core.rewards.unreadable_rows import UnreadableError
from rlhf_core.runtime.agreement import text_of_first
from rlhf_core.workers import RaisedError, TooSlowError, run_async

if TYPE_CHECKING:
    from rlhf_core.data import Prompts, Records
    from rlhf_core.stage import Stage

HERE = str(Path(__file__).parent.parent)
SHOWN = 5
"""So many rows are named, and the others counted."""
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


def check_columns(rewards: Sequence[Reward], columns: Prompts | Sequence[str], stage: Stage) -> None:
    """Raise InputError, all problems at once, where a reward needs a column that the prompts lack.

    columns: their names; or the prompts, whose rows are then given to the rewards' `check`, on the first process. A row
    that a reward cannot read is a problem, and a warning where the reward's `on_error` is "skip".
    """
    lines = checked(rewards, columns, stage)  # on every process
    for line in lines if lines and stage.is_main else ():
        warnings.warn(f"stage '{stage.name}': {line}", stacklevel=2)


def checked(rewards: Sequence[Reward], columns: Any, stage: Stage) -> list[str]:
    """As `check_columns`; the warnings."""
    names = list(columns) if isinstance(columns, Sequence) else list(columns.columns)
    problems = [p for r in rewards for p in r.check_columns(names, f"stage '{stage.name}'.rewards")]
    if problems:
        raise InputError(*problems)
    if isinstance(columns, Sequence):
        return []
    if stage.mesh is None:
        problems, skipped = check_rows(rewards, columns)
    else:
        found = json.dumps(check_rows(rewards, columns) if stage.is_main else ([], []))
        problems, skipped = json.loads(text_of_first(found))
    if problems:
        raise InputError(*problems)
    return skipped


def check_rows(rewards: Sequence[Reward], prompts: Any) -> tuple[list[str], list[str]]:
    """What the `check` of rewards finds in the prompts' columns: (problems, rows that are left out)."""
    problems: list[str] = []
    skipped: list[str] = []
    for reward in rewards:
        check = getattr(getattr(reward.function, "func", reward.function), "check", None)
        if check is None:
            continue
        try:
            found = check(prompts.columns)
            if not isinstance(found, Mapping):
                raise TypeError(f"it returned {type(found).__name__}, not {{row: what is wrong}}")
        except InputError as error:
            problems += [f"reward '{reward.label}': {each}" for each in error.problems]
            continue
        except Exception as error:  # on one process of several: the others learn it
            problems.append(f"reward '{reward.label}': its check(columns) {raised(error, HERE)}")
            continue
        lines = [f"{prompts.where(i)}: reward '{reward.label}': {text}" for i, text in sorted(found.items())]
        lines = list(dict.fromkeys(lines))
        more = [f"and {len(lines) - SHOWN} more rows that it cannot read"] if len(lines) > SHOWN else []
        if reward.on_error == "skip" and lines:
            skipped.append(f"{lines[0]}; {len(lines)} such rows are left out (on_error)")
        else:
            problems += lines[:SHOWN] + [f"reward '{reward.label}': {each}" for each in more]
    return problems, skipped


def set_up(rewards: Sequence[Reward], columns: Prompts | Sequence[str], stage: Stage) -> None:
    """Check columns, and the rows where prompts are given; then let rewards load what they need."""
    check_columns(rewards, columns, stage)
    for reward in rewards:
        if hasattr(reward.function, "setup"):
            reward.function.setup(stage)


@dataclass(frozen=True)
class _Table:
    """Prompts before they are tokenised, as far as rewards see them."""

    raw: Sequence[Any]
    chat: bool
    columns: dict[str, Sequence[Any]]
    records: Records

    def where(self, i: int) -> str:
        return self.records.where(i)


def forecast_rewards(rewards: Sequence[Reward], prompts: Prompts | Records, stage: Stage) -> list[str]:
    """Lines for `rlhf check` on what rewards will do with these prompts; warnings begin with "warning: ".

    Plain functions are called once, in a process of their own, with made-up completions of the first prompt, in the
    form that the run will have. Asynchronous ones may cost money and are not called, nor are objects with `setup` and
    rewards with `check = false`. Raises InputError, all problems at once, for what would end the run.
    """
    table: Any = prompts if hasattr(prompts, "raw") else _table(prompts)
    lines: list[str] = []
    problems: list[str] = []
    try:
        lines += [f"warning: {line}" for line in checked(rewards, table, stage)]
    except InputError as error:
        problems += error.problems
    for reward in rewards:
        lines += _collisions(reward, table.columns)
        called = reward.tried and not reward.asynchronous and not reward.collective
        if not called or not len(table.raw) or reward.check_columns(list(table.columns), ""):
            continue
        said, fatal = _tried(reward, table)
        if said:
            where = f"stage '{stage.name}'.rewards: {said}"
            (problems if fatal else lines).append(where if fatal else f"warning: {said}")
    if problems:
        raise InputError(*problems)
    return lines


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
