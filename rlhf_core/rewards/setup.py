"""Reward functions before the first call: their columns, the rows that they can read, and their weights."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import InputError, error_line
from rlhf_core.rewards.function import Reward
from rlhf_core.runtime.agreement import broadcast_text

if TYPE_CHECKING:
    from rlhf_core.data import Prompts
    from rlhf_core.stage import Stage

HERE = str(Path(__file__).parent.parent)
SHOWN = 5
"""So many rows are named, and the others counted."""


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
        problems, skipped = json.loads(broadcast_text(found))
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
            problems.append(f"reward '{reward.label}': its check(columns) {error_line(error, HERE)}")
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


def snapshots(rewards: Sequence[Reward]) -> dict[str, Any]:
    """{label: what a checkpoint keeps of it} for functions that are objects with `snapshot`."""
    return {r.label: r.function.snapshot() for r in rewards if hasattr(r.function, "snapshot")}


def restore(rewards: Sequence[Reward], kept: Mapping[str, Any]) -> None:
    """Give each reward back what `snapshots` kept of it."""
    for reward in rewards:
        if reward.label in kept:
            reward.function.restore(kept[reward.label])
