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
    since = max((step for step in kept if step + updates <= last), default=0)
    until = since + updates
    if until > last:
        return skipped(name, f"the stage made {last} updates")
    try:
        found = replays.replay(subject.run.dir, subject.stage.name, until, plugins, since=since)
    except (InputError, RunError) as error:
        return Check(name, FAIL, f"updates {since + 1} to {until}", str(error).splitlines()[0], str(subject.dir))
    number = f"updates {since + 1} to {found.updates}"
    if found.differences:
        return Check(name, FAIL, number, found.differences[0], str(subject.dir / "metrics.jsonl"))
    return Check(name, PASS, number, values={"since": since, "until": found.updates})
