"""Check rewards."""

from __future__ import annotations

import copy
import inspect
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.contracts import REWARD
from rlhf_core.errors import RunError, suggest
from rlhf_core.rewards.values import LOG, MetricLog, RewardCall
from rlhf_core.workers.event_loop import call_now, outcome_of
from rlhf_core.workers.pool import describe_failure
from rlhf_testing.findings import Broken, Findings, make_component, require_close
from rlhf_testing.fixtures import a_stage

ODD = ("", " ", "\n", "é 漢 🙂 \u200b", "a" * 5000, "{[(<\\", "1e999 -0 ½")
"""Unusual completions that models write sooner or later."""
MOST = 8
"""Groups of rows in which a failure is looked for."""
ROWS = (
    {"prompt": "What is 2 + 2?", "completion": " 4"},
    {"prompt": "What is 2 + 2?", "completion": " It is five, I think."},
    {"prompt": "Say hello.", "completion": " Hello! Hello! Hello!"},
    {"prompt": "Say hello.", "completion": " Good morning to you."},
)


def check_reward(reward: Any, rows: Sequence[Mapping[str, Any]] = ROWS, *, group: int = 1) -> None:
    """Raise AssertionError that lists every property that `reward` breaks.

    reward: a function, plain or async, a class with defaults, or a callable object, which may have `setup(stage)`.
    rows: each with `prompt`, `completion` and the columns that the reward reads; at least two, a multiple of `group`.
    group: adjacent completions of one prompt that the reward compares on purpose; 1: it compares none.

    component: it can be registered.
    columns: it needs no column that the rows lack.
    check: `check(columns)`, if it has one, returns {row: what is wrong}.
    values: one per completion, a finite number, or None where it does not apply.
    order, split: a completion's value does not depend on the others or their order.
    odd completions: it also scores empty, very long and unusual text.
    inputs: a call does not change them. repeatable: a second call gives the same.
    """
    __tracebackhide__ = True
    findings = Findings("reward", reward)
    reward = make_component(findings, REWARD, reward)
    rows = [{"completion_ids": [5 + i % 7, 4, 1], **row} for i, row in enumerate(rows)]
    with findings.property("columns"):
        _require_columns(reward, rows[0])
    with findings.property("check"):
        _require_check(reward, rows)
    findings.stop_if_broken()
    with _ready(reward):
        findings.check("values", partial(scores, reward), rows, _smaller(rows, group))
        findings.stop_if_broken()
        for name, require in {"order": _require_order, "split": _require_split}.items():
            findings.check(name, partial(require, reward, group), rows, _smaller(rows, group))
        if all(isinstance(row["completion"], str) for row in rows):
            for text in ODD:
                odd = [{**rows[0], "completion": text}] * group
                findings.check("odd completions", partial(scores, reward), odd)
        findings.check("inputs", partial(_require_unchanged, reward), rows, _smaller(rows, group))
        findings.check("repeatable", partial(_require_repeatable, reward), rows, _smaller(rows, group))
    findings.end()


def _smaller(rows: Sequence[Mapping[str, Any]], group: int) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Yield each of the first groups of rows, then two in a row."""
    parts = _groups(rows, group)[:MOST]
    yield from parts
    yield from ([*first, *second] for first, second in pairwise(parts))


def _require_order(reward: Any, group: int, rows: Sequence[Mapping[str, Any]]) -> None:
    turned = [row for part in _groups(rows, group)[::-1] for row in part]
    expected = np.concatenate(_groups(scores(reward, rows), group)[::-1])
    require_close(scores(reward, turned), expected, "with the rows in another order", rtol=1e-4)


def _require_split(reward: Any, group: int, rows: Sequence[Mapping[str, Any]]) -> None:
    alone = [scores(reward, part) for part in _groups(rows, group)]
    what = "with each completion alone" if group == 1 else f"with each {group} completions alone"
    require_close(np.concatenate(alone), scores(reward, rows), what, rtol=1e-4)


def _require_unchanged(reward: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    given = copy.deepcopy(rows)
    arguments = _arguments(reward, given)
    before = copy.deepcopy(arguments)
    _call(reward, arguments, len(given))
    changed = [name for name in arguments if arguments[name] != before[name]]
    changed += ["rows"] if given != rows else []
    if changed:
        raise Broken(f"the call changes {', '.join(changed)}; copy what you change")


def _require_repeatable(reward: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    before = scores(reward, rows)
    require_close(scores(reward, rows), before, "called again with the same completions", rtol=0.0)


def scores(reward: Any, rows: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    """Score rows: float64 [rows], NaN where the reward does not apply. Raises Broken for invalid values."""
    values = _call(reward, _arguments(reward, rows), len(rows))
    if any(value is not None and math.isnan(value) for value in values):
        raise Broken("it returned NaN; return None where it does not apply")
    return np.array(values, np.float64)


def _call(reward: Any, arguments: Mapping[str, Any], count: int) -> list[float | None]:
    scored = outcome_of(call_now(RewardCall(reward, "it"), arguments, count))
    if isinstance(scored, RunError):
        raise Broken(str(scored))
    if isinstance(scored, Exception):
        raise scored
    if isinstance(scored, BaseException):
        raise Broken(describe_failure(scored, None))
    values: list[float | None] = scored[0]
    return values


def _arguments(reward: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the arguments that the reward names, or all of them where it takes **kwargs."""
    offered: dict[str, Any] = {
        name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", "completion")
    }
    offered["prompts"] = [row["prompt"] for row in rows]
    offered["completions"] = [row["completion"] for row in rows]
    parameters = inspect.signature(reward).parameters.values()
    taken = {p.name for p in parameters}
    if LOG in taken:
        offered[LOG] = _log_metric
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        offered["completion_ids"] = offered.get("completion_ids", [])
        return offered
    return {name: values for name, values in offered.items() if name in taken}


def _log_metric(name: str, value: Any) -> None:
    MetricLog()(name, value)


def _require_columns(reward: Any, row: Mapping[str, Any]) -> None:
    there = {*row, "prompts", "completions", LOG} - {"prompt", "completion"}
    parameters = inspect.signature(reward).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in there]
    if missing:
        meant = "".join(suggest(name, sorted(there)) for name in missing)
        raise Broken(
            f"it needs {', '.join(missing)}, which the rows lack.{meant} A reward takes lists of prompts, completions, "
            "completion_ids, and columns of the data: give the kit rows that have them"
        )


def _require_check(reward: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    check = getattr(getattr(reward, "func", reward), "check", None)
    if check is None:
        return
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", "completion")}
    wrong = check(columns)
    if not isinstance(wrong, Mapping):
        raise Broken(
            f"check(columns) returned {type(wrong).__name__}; return {{row: what is wrong}}, empty for no row"
        )
    for row, text in wrong.items():
        if not (isinstance(row, int) and 0 <= row < len(rows) and isinstance(text, str) and text):
            raise Broken(
                f"check(columns) returned {{{row!r}: {text!r}}}; return {{row: what is wrong}}, rows from 0"
            )


@contextmanager
def _ready(reward: Any) -> Iterator[None]:
    """Call `setup(stage)` before the block if the reward has it."""
    if not hasattr(reward, "setup"):
        yield
        return
    with tempfile.TemporaryDirectory() as directory:
        reward.setup(a_stage(Path(directory)))
        yield


def _groups(rows: Any, size: int) -> list[Any]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]
