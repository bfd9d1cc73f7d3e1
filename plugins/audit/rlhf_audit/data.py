"""Checks of data: prompts that are held out and trained on, and what evaluations of the same rows say."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_audit.check import FAIL, PASS, Check, skipped
from rlhf_audit.subject import Subject

NOT_A_WORD = re.compile(r"[\W_]+")
VALUES = ("reward", "loss", "margin", "score")
"""Values of evaluated rows, of which the first that there is counts."""


def held_out(subject: Subject) -> Check:
    """Look for held-out prompts in the training data: equal ones, and equal but for case, spaces and punctuation.

    Rows that share a prompt and nothing else, as pairs do that vary their answer, count as well.
    """
    name = "held-out prompts"
    train = _files(subject.config.get("train_data"))
    held = _files(subject.config.get("eval_data"))
    if not held:
        return skipped(name, "there is no eval_data")
    for path in (*train, *held):
        if path.suffix not in (".jsonl", ".json") or not path.is_file():
            return skipped(name, f"{path} is no file of JSON lines that is here")
    if not train:
        return skipped(name, "train_data is no file of JSON lines that is here")
    trained = {prompt for path in train for _, prompt in _prompts(path)}
    loosely = {plain(prompt) for prompt in trained}
    equal = similar = total = 0
    place = ""
    for path in held:
        for line, prompt in _prompts(path):
            total += 1
            if prompt in trained:
                equal += 1
            elif plain(prompt) in loosely:
                similar += 1
            else:
                continue
            if not place:
                place = f"{path}, line {line}"
    if not total:
        return skipped(name, "no row of eval_data has a prompt")
    number = f"{equal} of {total} equal, {similar} more but for case, spaces and punctuation"
    found_values = {"equal": equal, "similar": similar, "rows": total}
    if not equal + similar:
        return Check(name, PASS, number, values=found_values)
    return Check(name, FAIL, number, "evaluations measure prompts that were trained on", place, found_values)


def plain(text: str) -> str:
    """Return a text without case, spaces and punctuation."""
    return NOT_A_WORD.sub("", text.casefold())


def _files(data: Any) -> list[Path]:
    """Return the files that a field of data names."""
    if isinstance(data, str):
        return [Path(data)]
    parts = []
    if isinstance(data, Mapping):
        if "path" in data:
            return [Path(str(data["path"]))]
        parts = [value for value in data.values() if isinstance(value, str | Mapping)]
    elif isinstance(data, Sequence):
        parts = list(data)
    return [path for part in parts for path in _files(part)]


def _prompts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, prompt) of the rows of a file; rows without a prompt are texts."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            prompt = _prompt(row) if isinstance(row, dict) else None
            if prompt:
                yield number, prompt


def _prompt(row: Mapping[str, Any]) -> str | None:
    """Return what a row asks: its prompt, its messages before the last reply, or its text."""
    for field in ("prompt", "messages", "chosen", "text"):
        found = row.get(field)
        if isinstance(found, str):
            return found
        if isinstance(found, list) and found:
            asked = [each for each in found if isinstance(each, dict)]
            if len(asked) > 1 and asked[-1].get("role") == "assistant":
                asked = asked[:-1]
            return "\n".join(f"{each.get('role')}: {each.get('content')}" for each in asked)
    return None


def evaluations(subject: Subject) -> Check:
    """Compare the first evaluation with the last row by row, and the means of each with what was logged."""
    name = "evaluations"
    found = subject.stage.evaluations
    steps = list(found)
    if not steps:
        return skipped(name, "no evaluation was written per row")
    logged = {row.get("step"): row for row in subject.stage.metrics}
    for step in steps:
        why = _unlike_logged(found[step].get("metrics") or {}, logged.get(step, {}))
        if why:
            where = str(subject.dir / "evaluations" / f"{step:06d}.json")
            return Check(name, FAIL, f"update {step}", why, where)
    if len(steps) < 2:
        return Check(name, PASS, "one evaluation, as logged")
    first = _by_row(found[steps[0]])
    last = _by_row(found[steps[-1]])
    shared = sorted(first.keys() & last.keys())
    fields = [each for each in VALUES if shared and each in first[shared[0]]]
    if not fields:
        return skipped(name, "rows have no value in common")
    field = fields[0]
    changes = []
    for row in shared:
        before, later = first[row].get(field), last[row].get(field)
        if before is not None and later is not None:
            changes.append(later - before)
    change = np.array(changes, float)
    if len(change) < 2:
        return skipped(name, "fewer than two rows were evaluated twice")
    error = float(change.std(ddof=1)) / math.sqrt(len(change))
    interval = f"{field} {change.mean():+.4g} ± {1.96 * error:.2g}"
    number = f"{interval} over {len(change)} rows, update {steps[0]} to {steps[-1]}"
    return Check(name, PASS, number, values={"change": float(change.mean()), "standard_error": error})


def _unlike_logged(evaluated: Mapping[str, Any], logged: Mapping[str, Any]) -> str:
    """Say which metric of an evaluation was logged with another value; empty where none was."""
    for metric, value in evaluated.items():
        key = metric if metric.startswith("eval_") else f"eval_{metric}"
        said = logged.get(key)
        if said is None or value is None:
            continue
        if not math.isclose(said, value, rel_tol=1e-6, abs_tol=1e-9):
            return f"{key} is {value} here and {said} in the metrics"
    return ""


def _by_row(evaluation: Mapping[str, Any]) -> dict[Any, Mapping[str, Any]]:
    """Return the values of an evaluation by row."""
    return {row.get("row"): row for row in evaluation.get("rows") or () if isinstance(row, dict)}
