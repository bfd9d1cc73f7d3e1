"""Where a stage's time went, from when its rows were logged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhf_core.report.run import StageRun


@dataclass(frozen=True)
class Part:
    """seconds of one kind of work; share of the whole run, between 0 and 1."""

    name: str
    seconds: float
    share: float


UPDATES, BEFORE, AFTER = "updates", "before the first update", "evaluation, saving, the rest"


def parts(stage: StageRun, total: float) -> list[Part]:
    """Start-up (data, model, compiling), the updates, and the rest: evaluations, checkpoints, the last artifact.

    `step_time` is the mean over the updates since the row before, evaluations left out; with more than one session,
    what was done twice after a kill counts as rest. total: seconds of the whole run.
    """
    whole = stage.seconds
    if not whole or not total:
        return []
    if "step_time" not in stage.metrics:
        return [Part(BEFORE, whole, whole / total)] if not stage.metrics else []
    times = stage.metrics["step_time"]
    updates = float(np.sum(np.diff(times.steps, prepend=0.0) * times.values))
    updates = min(updates, whole)
    before = _before(stage, float(times.steps[0] * times.values[0]))
    before = min(before, whole - updates)
    found = {BEFORE: before, UPDATES: updates, AFTER: whole - updates - before}
    return [Part(name, seconds, seconds / total) for name, seconds in found.items()]


def _before(stage: StageRun, first: float) -> float:
    """Seconds from the beginning to the first update, which ended with its first row `first` seconds later."""
    if stage.first_row is None:
        return 0.0
    return max(stage.first_row - stage.sessions[0].began - first, 0.0)
