"""Check reward functions before the first call: their columns, the rows that they can read, and one call of each."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.contracts import Forecast, RewardInputs
from rlhf_core.errors import SHOWN, InputError, RunError, error_line, suggest, warn
from rlhf_core.hidden import hide_named
from rlhf_core.rewards.reward import OWN, Outcome, Reward, call_together, failure
from rlhf_core.rewards.values import LOG
from rlhf_core.runtime.agreement import broadcast_text
from rlhf_core.workers.pool import RaisedError, TooSlowError

if TYPE_CHECKING:
    from rlhf_core.data.prompts import AnyPrompts, UntokenizedPrompts
    from rlhf_core.stage import Stage

HERE = str(Path(__file__).parent.parent)
ELSEWHERE = {
    "trainer_state": "TRL passes its trainer's state under this name, which has no counterpart here; remove "
    "the parameter, or give it a default. For values that change over a run, write a reward with state: a "
    "dataclass with `__call__`, `snapshot()` and `restore(kept)`",
    "log_extra": "TRL passes a function under this name; here every reward's values are in samples/*.jsonl, next to "
    "the completions, and `log_metric` logs numbers. Remove the parameter",
    "environments": "TRL passes its environments under this name; here, with an `environment`, `completions` has what "
    "was said after the prompt, and the column `environment_rewards` what the environment gave. Name those instead",
    "kwargs": "write **kwargs, with two stars, to receive every column",
}
"""Parameters of TRL's reward functions that are not columns: {name: what to do}."""
ALIKE = 0.7
"""Similarity, from 0 to 1, above which a parameter's name may be that of a column, misspelt."""
ROWS_LOOKED_AT = 10_000
"""Rows in which values that a function needs are looked for; a large file is read row by row."""
SECONDS = 60.0
MADE_UP = (" The answer is 4.", "4", "")
"""Made-up completions; one is empty, as a policy writes them sooner or later."""
IDS = ([5, 6, 7, 5, 6, 1], [5, 1], [1])
FORMS = {
    True: "completions are lists of messages here: c[-1]['content'] is the text",
    False: "completions are texts here",
}
MISTAKES = ("TypeError", "AttributeError", "NameError", "ImportError", "ModuleNotFoundError")
"""Exceptions that show a mistake in the function; others may be due to the made-up completions."""


def set_up(rewards: Sequence[Reward], prompts: AnyPrompts, stage: Stage, field: str = "train_data") -> None:
    """Check the columns and rows of the prompts in `field`, then let rewards load what they need, once.

    Raises InputError, with all problems together, if a reward needs a column that the prompts lack. A row that a reward
    cannot read is a problem, or a warning if the reward's `on_error` is "skip".
    """
    lines = _check_prompts(rewards, prompts, stage, field)  # on every process
    for line in lines if stage.is_main else ():
        warn(f"stage '{stage.name}': {line}")
    for reward in rewards:
        called_here = reward.collective or stage.is_main
        if called_here and not reward.ready and hasattr(reward.function, "setup"):
            reward.function.setup(stage)
        reward.ready = True


def _check_prompts(rewards: Sequence[Reward], prompts: Any, stage: Stage, field: str) -> list[str]:
    """Return warnings about columns and rows. Raises InputError as `set_up` does."""
    where = f"stage '{stage.name}'.rewards"
    problems = [f"{where}: {p}" for r in rewards for p in missing_columns(r, prompts.columns, field)]
    if problems:
        raise InputError(*problems)
    if stage.mesh is None:
        problems, skipped, unreadable = check_rows(rewards, prompts, stage)
    else:
        results = json.dumps(check_rows(rewards, prompts, stage) if stage.is_main else ([], [], {}))
        problems, skipped, unreadable = json.loads(broadcast_text(results))
    if problems:
        raise InputError(*problems)
    for reward in rewards:
        reward.unreadable.update(unreadable.get(reward.label, ()))
    advice = [(_overridden(r, prompts.columns), _misspelt(r, prompts.columns, field)) for r in rewards]
    return [*(line for lists in advice for lines in lists for line in lines), *skipped]


def missing_columns(reward: Reward, columns: Collection[str], field: str) -> list[str]:
    """List columns that the function needs and the prompts in `field` lack, as problems."""
    have = ", ".join(sorted(columns)) or "no columns besides the prompt"
    problems = []
    for name in sorted(reward.wants()[0] - {*OWN, LOG, *columns}):
        if name in ELSEWHERE:
            problems.append(f"reward '{reward.label}' needs '{name}': {ELSEWHERE[name]}")
            continue
        meant = suggest(name, [*OWN, *columns])
        problems.append(
            f"reward '{reward.label}' needs the column '{name}', which {field} does not have; it has {have}"
            + (f".{meant} Besides columns there are {', '.join(OWN)}" if meant else "")
        )
    return problems


def check_rows(
    rewards: Sequence[Reward], prompts: Any, stage: Stage
) -> tuple[list[str], list[str], dict[str, list[str]]]:
    """Run the rewards' `check` on the prompts' columns; one that has a parameter `stage` gets the stage, too.

    Returns problems, warnings about rows left out, and {label: places of these rows}.
    """
    problems: list[str] = []
    skipped: list[str] = []
    left_out: dict[str, list[str]] = {}
    for reward in rewards:
        check = getattr(getattr(reward.function, "func", reward.function), "check", None)
        if check is None:
            continue
        try:
            named = {"stage": stage} if "stage" in inspect.signature(check).parameters else {}
            unreadable = check(prompts.columns, **named)
            if not isinstance(unreadable, Mapping):
                raise TypeError(f"it returned {type(unreadable).__name__}, not {{row: what is wrong}}")
        except InputError as error:
            problems += [f"reward '{reward.label}': {problem}" for problem in error.problems]
            continue
        except Exception as error:  # a problem, so that the other processes learn of it
            problems.append(f"reward '{reward.label}': its check(columns) {error_line(error, HERE)}")
            continue
        rows = sorted(unreadable.items())
        lines = [f"{prompts.where(i)}: reward '{reward.label}': {text}" for i, text in rows]
        lines = list(dict.fromkeys(lines))
        more = [f"and {len(lines) - SHOWN} more rows that it cannot read"] if len(lines) > SHOWN else []
        if reward.on_error == "skip" and lines:
            skipped.append(f"{lines[0]}; {len(lines)} such rows are skipped (on_error)")
            left_out[reward.label] = [prompts.where(i) for i in unreadable]
        else:
            problems += lines[:SHOWN] + [f"reward '{reward.label}': {line}" for line in more]
    return problems, skipped, left_out


def forecast_rewards(
    rewards: Sequence[Reward],
    prompts: AnyPrompts | UntokenizedPrompts,
    stage: Stage,
    field: str = "train_data",
) -> Forecast:
    """Forecast what rewards will do with the prompts in `field`.

    Calls each plain function once, in a separate process, with made-up completions of the first prompt, as texts or
    messages like the run's. Does not call asynchronous functions, which may cost money, objects with `setup`, or
    rewards with `check = false`. Raises InputError, with all problems together, for what would end the run.
    """
    lines: list[str] = []
    cautions: list[str] = []
    problems: list[str] = []
    try:
        cautions += _check_prompts(rewards, prompts, stage, field)
    except InputError as error:
        problems += error.problems
    for reward in rewards:
        lines += _without_value(reward, prompts)
        callable_now = reward.tried and not reward.asynchronous and not reward.collective
        if not callable_now or not len(prompts.raw) or missing_columns(reward, prompts.columns, field):
            continue
        finding, fatal = _try_call(reward, prompts)
        if finding:
            (problems if fatal else cautions).append(
                f"stage '{stage.name}'.rewards: {finding}" if fatal else finding
            )
    if problems:
        raise InputError(*problems)
    if field != "train_data":
        return Forecast()  # what training prompts lack is said once
    return Forecast((*lines, *_unread(rewards, prompts.columns)), tuple(cautions))


def _unread(rewards: Sequence[Reward], columns: Collection[str]) -> list[str]:
    """Say which columns no reward takes, where there are rewards; an environment may read all of them."""
    if not rewards or any(reward.wants()[2] for reward in rewards) or "environment_rewards" in columns:
        return []
    taken = {"messages", "tools", "chat_template_kwargs"}.union(*(reward.wants()[1] for reward in rewards))
    unread = [name for name in columns if name not in taken]
    return [f"columns that no reward reads: {', '.join(unread)}"] if unread else []


def _overridden(reward: Reward, columns: Collection[str]) -> list[str]:
    """List the columns that an option of the same name keeps from the function."""
    return [
        f"reward '{reward.label}': its option {name} = {hide_named(name, value)!r} is used, and the column "
        f"'{name}' is not"
        for name, value in reward.chosen.items()
        if name in columns
    ]


def _misspelt(reward: Reward, columns: Collection[str], field: str) -> list[str]:
    """List defaults of a user's function that a column with a similar name was probably meant to replace."""
    if reward.installed:
        return []
    given = {*OWN, LOG, *reward.chosen, *columns}
    others = sorted({*OWN, *columns} - reward.wants()[1])
    return [
        f"reward '{reward.label}': {p.name} is {p.default!r} for every row: no option sets it, and {field} has no "
        f"column of that name.{meant} If the default is meant, set the option"
        for p in inspect.signature(reward.function).parameters.values()
        if p.default is not p.empty and p.name not in given and (meant := suggest(p.name, others, ALIKE))
    ]


def _without_value(reward: Reward, prompts: Any) -> list[str]:
    """Count the rows without a value that the function needs: null, or not in the row at all.

    `environment_rewards` is no value of a row: no row has one before its episode.
    """
    lines = []
    for name in sorted(reward.wants()[0] & set(prompts.columns) - {"environment_rewards"}):
        column = prompts.columns[name]
        rows = range(min(len(prompts.raw), ROWS_LOOKED_AT))
        without = [i for i in rows if column[i] is None]
        if without:
            of = f"{'the first ' if len(prompts.raw) > len(rows) else ''}{len(rows):,} rows"
            lines.append(
                f"reward '{reward.label}': {len(without):,} of {of} have no '{name}'; the first is "
                f"{prompts.where(without[0])}"
            )
    return lines


def _try_call(reward: Reward, prompts: Any) -> tuple[str, bool]:
    """Call a function with made-up completions: (finding, whether it is a mistake); an empty text if all is well."""
    outcome, probe = _call_once(reward, prompts)
    n = len(MADE_UP)
    if isinstance(outcome, np.ndarray) and np.isnan(outcome).all():
        return (
            f"reward '{reward.label}' gave {n} made-up completions no score: it returned None or NaN for each of "
            f"{list(MADE_UP)}; completions without any score have no advantage, and nothing is learned of them",
            False,
        )
    if outcome is None or isinstance(outcome, np.ndarray):
        return "", False
    if isinstance(outcome, RunError | InputError):
        return f"{outcome} (called with made-up completions)", True
    text = failure(probe, outcome)
    if isinstance(outcome, TooSlowError):
        return f"{text} for {n} made-up completions", False
    name = outcome.type_name if isinstance(outcome, RaisedError) else type(outcome).__name__
    if name in MISTAKES and "'NoneType'" not in text:
        return f"{text}, called with made-up completions; {FORMS[prompts.chat]}", True
    return (
        f"{text}, called with made-up completions, one of them empty; in a run this would end it or, "
        'with on_error = "skip", leave the whole call unscored',
        False,
    )


def _call_once(reward: Reward, prompts: Any) -> tuple[Outcome, Reward]:
    """Call a function with made-up completions of the first prompt; return what came of it, and what was called."""
    n = len(MADE_UP)
    inputs = RewardInputs(
        [prompts.raw[0]] * n,
        [[{"role": "assistant", "content": text}] if prompts.chat else text for text in MADE_UP],
        [list(ids) for ids in IDS],
        {name: [values[0]] * n for name, values in prompts.columns.items()},
        [prompts.where(0)] * n,
    )
    probe = dataclasses.replace(reward)
    if not reward.installed:
        probe.timeout = reward.timeout or SECONDS
        try:
            probe.pool()
        except InputError:  # it cannot be sent to a process
            probe = dataclasses.replace(reward)
    with contextlib.redirect_stdout(sys.stderr):
        (outcome,) = call_together([probe], inputs)
    if probe.in_workers:
        probe.pool().close()
    return outcome, probe
