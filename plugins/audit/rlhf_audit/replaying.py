"""A check that trains a stage's last updates again, from a checkpoint and the journal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_audit.check import FAIL, PASS, Check, skipped
from rlhf_audit.subject import Subject
from rlhf_core import InputError, RunError
from rlhf_core.pipeline import replay as replays


def replay_check(subject: Subject, updates: int, plugins: Sequence[Path]) -> Check:
    """Train `updates` updates again from the newest checkpoint that has as many after it, and compare bit for bit."""
    name = "replay"
    if not subject.numbers:
        return skipped(name, "only stages with a journal are trained again")
    if not subject.stage.table:
        return skipped(name, "a trainer that was called from Python is not trained again")
    kept = [int(path.name) for path in subject.dir.glob("checkpoints/[0-9]*") if path.name.isdecimal()]
    last = subject.updates
    if updates > last:
        return skipped(name, f"the stage logged {last} updates")
    logged = [int(row["step"]) for row in subject.stage.metrics if "loss" in row]
    starts = [step for step in (0, *kept) if any(step < row <= step + updates <= last for row in logged)]
    if not starts:
        return skipped(
            name,
            f"none of {updates} updates after a checkpoint was logged: give a larger N, or log_steps = 1",
        )
    since = max(starts)
    until = since + updates
    try:
        found = replays.replay(subject.run.dir, subject.stage.name, until, plugins, since=since)
    except (InputError, RunError) as error:
        return Check(
            name, FAIL, f"updates {since + 1} to {until}", str(error).splitlines()[0], str(subject.dir)
        )
    number = f"updates {since + 1} to {found.updates}"
    if found.differences:
        return Check(name, FAIL, number, found.differences[0], str(subject.dir / "metrics.jsonl"))
    return Check(name, PASS, number, values={"since": since, "until": found.updates})
