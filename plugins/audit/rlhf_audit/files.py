"""Checks of files: artifacts, the journal, the ledger of groups and the metrics."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_audit.check import FAIL, PASS, Check, skipped, verdict_of
from rlhf_audit.subject import Entry, Subject
from rlhf_core import InputError
from rlhf_core.artifacts import open_artifact

METRICS, DIGESTS = "metrics.jsonl", "metrics.sha256"


def artifacts(subject: Subject) -> Check:
    """Compare every file of every artifact with the hashes of its manifest."""
    name = "artifact hashes"
    directories = sorted(path.parent for path in subject.dir.glob("artifacts/*/rlhf_artifact.json"))
    folder = subject.dir / "artifacts"
    wanted = (subject.stage.spec.get("results") or {}).get("artifacts") or {}
    missing = [output for output in wanted if folder / output not in directories]
    if missing:
        return Check(
            name,
            FAIL,
            f"{len(missing)} missing",
            f"the output '{missing[0]}' is gone",
            str(folder / missing[0]),
        )
    if not directories:
        return skipped(name, "no output was saved")
    files = 0
    for directory in directories:
        try:
            files += len(open_artifact(directory).metadata["files"])
        except InputError as error:
            return Check(name, FAIL, "", error.problems[0].partition(";")[0], str(directory))
    return Check(name, PASS, f"{files} files", values={"files": files})


def journal(subject: Subject) -> Check:
    """Check that the journal has every rollout that was trained on, each once and in its order."""
    name = "journal"
    if not subject.numbers:
        return skipped(name, "the stage samples nothing, or keeps no journal")
    before = len(subject.damaged)
    problem, where = _order_problem(subject)
    damaged = [each for each in subject.damaged[before:] if each.path.parent.name == "journal"]
    if damaged:
        problem = f"a file cannot be read: {damaged[0].why}"
        where = str(damaged[0].path)
    count = len(subject.numbers)
    return Check(name, verdict_of(problem), f"{count} rollouts", problem, where, {"rollouts": count})


def _order_problem(subject: Subject) -> tuple[str, str]:
    """Return what is wrong with the order of the rollouts, and the file that shows it."""
    first, last = subject.numbers[0], subject.numbers[-1]
    missing = sorted({*range(first, last + 1)} - {*subject.numbers})
    if first and subject.config.get("journal") != "until_checkpoint":
        missing.insert(0, 0)
    if missing:
        return f"rollout {missing[0]} is missing", str(subject.journal_file(missing[0]))
    seen: dict[str, int] = {}
    version = -1
    reserved: set[int] = set()
    for entry in subject.rollouts():
        number = entry.rollout.number
        where = str(subject.journal_file(entry.rollout.number))
        found = entry.rollout.digest()
        if found in seen:
            return f"rollout {number} has the completions of rollout {seen[found]}", where
        seen[found] = number
        newest = int(entry.rollout.samples.version.max(initial=0))
        if newest < version:
            why = f"rollout {number} was sampled by version {newest}, the one before by {version}: it is misplaced"
            return why, where
        version = newest
        used = {*entry.taken[: entry.rollout.rounds]}
        if used & reserved:
            return f"rollout {number} has prompts of round {min(used & reserved)}, as one before it", where
        reserved |= used
    return _end_problem(subject, last)


def _end_problem(subject: Subject, last: int) -> tuple[str, str]:
    """Return whether updates were made after the journal's last rollout."""
    each = subject.updates_per_rollout
    if each is None or not subject.updates:
        return "", ""
    needed = math.ceil(subject.updates / each)
    if last + 1 < needed:
        return f"{subject.updates} updates need {needed} rollouts", str(subject.journal_file(last + 1))
    return "", ""


def rows(subject: Subject) -> Check:
    """Check that tokens, rewards and texts of every completion in the journal agree with each other."""
    name = "journal rows"
    if not subject.numbers:
        return skipped(name, "the stage samples nothing, or keeps no journal")
    completions = 0
    for entry in subject.rollouts():
        for problem, row in _row_problems(subject, entry):
            number = entry.rollout.number
            where = f"{subject.journal_file(number)}, completion {row}"
            return Check(name, FAIL, f"rollout {number}", problem, where)
        completions += len(entry.rollout.total)
    return Check(name, PASS, f"{completions:,} completions", values={"completions": completions})


def _row_problems(subject: Subject, entry: Entry) -> Iterator[tuple[str, int]]:
    """Yield what is wrong with completions, and their numbers."""
    rollout = entry.rollout
    samples = rollout.samples
    count = len(rollout.total)
    if len(rollout.samples_read) != count or len(samples.lengths) != count:
        yield f"{len(rollout.samples_read)} texts for {count} completions", 0
        return
    inside = np.arange(samples.tokens.shape[1]) < np.asarray(samples.lengths)[:, None]
    wrong = {
        "the policy's tokens are not within its length": (samples.mask & ~inside).any(1),
        "a log-probability is above 0, or not finite": (samples.mask & ~(samples.logps <= 1e-5)).any(1)
        | (samples.mask & ~np.isfinite(samples.logps)).any(1),
    }
    for problem, there in wrong.items():
        for row in np.flatnonzero(there).tolist():
            yield problem, row
    weights = _weights(subject, rollout.rewards.shape[1])
    for row, said in enumerate(rollout.samples_read):
        if said.get("length") != int(samples.mask[row].sum()):
            yield (
                f"its text has {said.get('length')} tokens, and {int(samples.mask[row].sum())} are there",
                row,
            )
        if not _equal(said.get("reward"), rollout.total[row]):
            yield (
                f"its reward is {said.get('reward')} beside the text and {rollout.total[row]} in the arrays",
                row,
            )
        each = list((said.get("rewards") or {}).values())
        if each and not all(map(_equal, each, rollout.rewards[row])):
            yield (
                f"its rewards are {each} beside the text and {rollout.rewards[row].tolist()} in the arrays",
                row,
            )
        if weights is not None:
            scored = ~np.isnan(rollout.rewards[row])
            total = float((weights * rollout.rewards[row])[scored].sum()) if scored.any() else math.nan
            if not _equal(total, rollout.total[row]):
                yield f"its reward is {rollout.total[row]}, and the weighted sum is {total}", row


def _weights(subject: Subject, functions: int) -> np.ndarray | None:
    """Return the weights of the reward functions; None where functions were given from Python, too."""
    named = subject.config.get("rewards") or []
    if subject.config.get("environment") is not None or len(named) != functions:
        return None
    given = subject.config.get("reward_weights")
    if given is not None:
        return np.array(given, np.float64)
    return np.array([float(each.get("weight", 1.0)) if isinstance(each, Mapping) else 1.0 for each in named])


def _equal(one: Any, other: Any) -> bool:
    """Compare two numbers; None is not scored, as NaN is."""
    first = math.nan if one is None else float(one)
    second = math.nan if other is None else float(other)
    if math.isnan(first) or math.isnan(second):
        return math.isnan(first) and math.isnan(second)
    return math.isclose(first, second, rel_tol=1e-5, abs_tol=1e-6)


def ledger(subject: Subject) -> Check:
    """Check that every group whose prompts were reserved was trained on or dropped by rule, and none twice."""
    name = "ledger"
    kept = [path for path in subject.dir.glob("checkpoints/[0-9]*/host.json") if path.parent.name.isdecimal()]
    if not subject.numbers or not kept:
        return skipped(name, "there is no journal with a checkpoint that counts its groups")
    path = max(kept, key=lambda path: int(path.parent.name))
    try:
        saved = json.loads(path.read_bytes())
        # The trainer's counters are within the checkpoint's.
        host = _find_ledger(saved)
    except (OSError, ValueError) as error:
        return Check(name, FAIL, "", f"it cannot be read: {error}", str(path))
    if host is None:
        return skipped(name, "the checkpoint has no ledger")
    entered = host["ledger"]
    begun = host["sampled"]
    trained = entered["used"] + entered["training"] + entered["passed_over"]
    step = int(path.parent.name)
    first = subject.numbers[0]
    each = subject.updates_per_rollout or 1
    rollouts = {entry.rollout.number: entry.rollout for entry in subject.rollouts()}
    until = math.ceil(step / each)
    there = [rollouts[number] for number in range(first, until) if number in rollouts]
    if first or len(there) < until:
        return skipped(name, "the journal does not reach back to the first rollout")
    groups, dropped = 0, 0
    for rollout in there:
        groups += len(rollout.prompts)
        dropped += int(rollout.metrics.get("dynamic_sampling/dropped", 0))
        dropped += int(rollout.metrics.get("dynamic_sampling/surplus", 0))
    counted = entered["equal"] + entered["surplus"]
    problem = ""
    if trained != groups:
        problem = f"{trained} groups were trained on, and the journal has {groups}"
    elif counted != dropped:
        problem = f"{counted} groups were dropped, and the journal says {dropped}"
    elif begun < until:
        problem = f"{begun} rollouts were sampled, and {until} trained on"
    number = f"{trained} groups trained on, {counted} dropped"
    return Check(name, verdict_of(problem), number, problem, str(path) if problem else "", {"groups": groups})


def _find_ledger(saved: Any) -> Mapping[str, Any] | None:
    """Return the table that has the ledger, at any depth; None where there is none."""
    if not isinstance(saved, dict):
        return None
    if isinstance(saved.get("ledger"), dict):
        return saved
    found = (_find_ledger(value) for value in saved.values())
    return next((each for each in found if each is not None), None)


def metrics(subject: Subject) -> Check:
    """Check the rows of metrics.jsonl: their order, their chain of digests, and their hashes in checkpoints and in the
    record of a stage.
    """
    name = "metrics rows"
    path = subject.dir / METRICS
    if not path.is_file():
        return skipped(name, "nothing was logged")
    logged = subject.stage.metrics
    steps = [row.get("step") for row in logged]
    for row, (one, other) in enumerate(pairwise(steps), 1):
        if not (isinstance(one, int) and isinstance(other, int) and one < other):
            return Check(
                name,
                FAIL,
                f"{len(steps)} rows",
                f"step {other} follows step {one}",
                f"{path}, line {row + 1}",
            )
    known = dict(_digests(subject))
    recorded = ((subject.stage.spec.get("results") or {}).get("files") or {}).get(METRICS)
    chained = (subject.dir / DIGESTS).is_file()
    if recorded is None and not known and not chained:
        why = "an earlier version wrote the stage, which is not done: nothing has a hash of the rows"
        return skipped(name, why, f"{len(logged)} rows")
    chain = ", each with a digest" if chained else ""
    number = f"{len(logged)} rows{chain}, {len(known)} checkpoints have their hash"
    problem, where = _changed_row(path, known, recorded)
    values = {"rows": len(logged), "checkpoints": len(known)}
    return Check(name, verdict_of(problem), number, problem, where, {} if problem else values)


def _changed_row(path: Path, known: Mapping[int, tuple[int, str]], recorded: str | None) -> tuple[str, str]:
    """Return what is wrong with the content of metrics.jsonl, and where; empty texts where nothing is.

    known: size and hash of the rows before each checkpoint. recorded: the hash of the file in the record of a stage
    that is done.
    """
    content = path.read_bytes()
    chain = path.with_name(DIGESTS)
    if chain.is_file():
        problem, line = _chain_problem(content, chain.read_bytes(), done=recorded is not None)
        if problem:
            return problem, f"{path}, line {line}"
    for step, (size, digest) in sorted(known.items()):
        if hashlib.sha256(content[:size]).hexdigest() != digest:
            return f"a row of the updates up to {step} was changed since their checkpoint was written", str(
                path
            )
    if recorded not in (None, hashlib.sha256(content).hexdigest()):
        return "a row was changed since the stage was done", str(path)
    return "", ""


def _chain_problem(content: bytes, chain: bytes, *, done: bool) -> tuple[str, int]:
    """Return what is wrong with rows, and the line that shows it.

    chain: a line for each row, the SHA-256 of the line before it and of the row. done: whether the stage is; then
    every row has a digest. A stage that was killed may lack that of its last row.
    """
    rows = [row for row in content.splitlines(keepends=True) if row.endswith(b"\n")]
    digests = chain.splitlines(keepends=True)
    before = b""
    for line, (row, digest) in enumerate(zip(rows, digests, strict=False), 1):
        if hashlib.sha256(before + row).hexdigest().encode() != digest.rstrip():
            return "a row was changed, removed or moved after it was logged", line
        before = digest
    if len(rows) < len(digests):
        return f"{len(digests)} rows were logged: the last ones were removed", len(rows) + 1
    if len(rows) > len(digests) + (not done):
        return f"{len(digests)} rows were logged: others were added", len(digests) + 1
    return "", 0


def _digests(subject: Subject) -> Iterator[tuple[int, tuple[int, str]]]:
    """Yield the updates before each checkpoint with the size and the hash of the rows that were logged until then.

    Damaged checkpoints are left out: `rlhf run` names them.
    """
    for path in subject.dir.glob("checkpoints/[0-9]*/host.json"):
        try:
            size, digest = json.loads(path.read_bytes())["host"]["logged"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        yield int(path.parent.name), (int(size), str(digest))


def logged_rewards(subject: Subject) -> Check:
    """Compare the mean rewards that were logged with those of the journal."""
    name = "logged rewards"
    each = subject.updates_per_rollout
    every = int(subject.config.get("log_steps") or 0)
    reason = _not_comparable(subject)
    if reason:
        return skipped(name, reason)
    if each is None or not every:
        return skipped(name, "fewer than two rollouts, or nothing was logged")
    sums = _reward_sums(subject)
    if sums is None:
        return skipped(
            name, "metrics are over groups that the journal does not have: dynamic_sampling dropped them"
        )
    compared, before, worst = 0, 0, 0.0
    for row in subject.stage.metrics:
        step, said = row.get("step"), row.get("reward")
        if not isinstance(step, int) or said is None:
            continue
        start, before = before, step
        if start % each or step % each:
            continue  # it covers only a part of a rollout
        numbers = range(start // each, step // each)
        if not numbers or any(number not in sums for number in numbers):
            continue
        total = sum(sums[number][0] for number in numbers)
        count = sum(sums[number][1] for number in numbers)
        mean = total / max(count, 1)
        apart = abs(mean - said)
        compared += 1
        worst = max(worst, apart)
        if not math.isclose(mean, said, rel_tol=1e-4, abs_tol=1e-5):
            problem = f"update {step} logged a mean reward of {said:.6g}, and the journal has {mean:.6g}"
            return Check(name, FAIL, f"{apart:.2g} apart", problem, str(subject.dir / METRICS))
    if not compared:
        return skipped(name, "no row of the metrics covers whole rollouts")
    return Check(name, PASS, f"{compared} rows, at most {worst:.1g} apart", values={"rows": compared})


def _reward_sums(subject: Subject) -> dict[int, tuple[float, int]] | None:
    """Return {rollout: (sum of its rewards, how many there are)}; None where groups that were dropped are not kept."""
    sums = {}
    for entry in subject.rollouts():
        rollout = entry.rollout
        if rollout.rounds > 1 and rollout.dropped is None:
            return None
        total = rollout.total
        if rollout.dropped is not None:
            total = np.concatenate([total, rollout.dropped.total])
        scored = int((~np.isnan(total)).sum())
        sums[rollout.number] = (float(np.nansum(total)), scored)
    return sums


def _not_comparable(subject: Subject) -> str:
    """Return why logged rewards are not those of the journal."""
    if not subject.numbers:
        return "there is no journal"
    if subject.option("environment") is not None:
        return "metrics of episodes leave out those that failed"
    return ""
