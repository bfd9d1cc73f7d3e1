"""Fail, or shorten, one system call of a command: one true message, and the same command again completes the work."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.torture import runs, shim
from tests.torture.children import Child, Ended, rlhf
from tests.torture.experiment import Case, Trial

SHARE = 2.0
ERRORS = ("EIO", "ENOSPC", "EACCES", "EROFS", "EDQUOT")
ACTIONS = {"once": "error", "on": "errors", "short": "short"}
SECONDS = 90.0
BEST = "load_best_model_at_end = true\n"


@dataclass(frozen=True)
class Command:
    """One command whose calls are broken.

    words: of the command, with {data} for the directory of its data and pipeline. stages: of that pipeline.
    after: the command that made what this one finds. every: whether each call fails with each error, not only with one
    that is drawn.
    """

    words: str
    stages: Sequence[str] = ()
    after: str | None = None
    every: bool = False

    def start(self, place: Path, directory: Path, env: Mapping[str, str | None] | None = None) -> Child:
        """Start it in a directory."""
        return rlhf(*self.words.format(data=place / "data").split(), cwd=directory, env=env)


CHAIN = (runs.SFT, runs.REWARD + BEST, runs.GRPO + BEST)
MODEL, JUDGE = "run/base/artifacts/model", "run/rm/artifacts/model"
SHORT = "--max_training_steps 2 --total_batch_size 4 --max_sequence_length 32"
COMMANDS = {
    "sft": Command("run {data}/sft.toml --dir run", CHAIN[:1], every=True),
    "export": Command(f"export {MODEL} new/model", after="sft", every=True),
    "generate": Command(
        f"generate {MODEL} {{data}}/prompts.jsonl -o new/rows.jsonl --max_completion_length 4 --max_prompt_length 16",
        after="sft",
        every=True,
    ),
    "train": Command(
        f"train reward --model {MODEL} --train_data {{data}}/pairs.jsonl --dir new {SHORT}", after="sft"
    ),
    "reward": Command("run {data}/reward.toml --dir run", CHAIN[:2], after="sft"),
    "score": Command(f"score {JUDGE} {{data}}/pairs.jsonl -o new/rows.jsonl", after="reward", every=True),
    "report": Command("report run -o new/page.html", after="reward", every=True),
    "grpo": Command("run {data}/grpo.toml --dir run", CHAIN, after="reward"),
}
"""Each after the one whose results it needs."""
LEFT_OUT = re.compile(r"stage '(\w+)': the evaluation after update \d+ failed and is left out")
PREPARING = 0.4
"""The part of the time after which no further command is prepared."""


def run(trial: Trial) -> None:
    shim.require()
    # Not a TemporaryDirectory, which forked processes would delete when they end.
    place = Path(tempfile.mkdtemp(prefix="torture-disk-errors-"))
    prepared_by = time.monotonic() + PREPARING * trial.seconds_left
    runs.write_data(place / "data")
    try:
        names = []
        for kind in _needed(trial.only):
            if trial.only is None and names and time.monotonic() > prepared_by:
                break
            names += [f"{kind} {fault}" for fault in _faults(trial, kind, _prepare(kind, place))]
        trial.random("order").shuffle(names)
        trial.each(names, lambda case: judge(case, place), seconds=3 * SECONDS)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _needed(only: str | None) -> list[str]:
    """List the commands to prepare, for all cases or for one."""
    if only is None:
        return list(COMMANDS)
    kind: str | None = only.partition(" ")[0]
    kinds: list[str] = []
    while kind in COMMANDS:
        kinds.insert(0, kind)
        kind = COMMANDS[kind].after
    return kinds


def _prepare(kind: str, place: Path) -> list[shim.Call]:
    """Make what a command finds, in PLACE/KIND, run it undisturbed in PLACE/KIND.expected, and list its calls."""
    command, before, expected = COMMANDS[kind], place / kind, place / f"{kind}.expected"
    if command.after is None:
        before.mkdir()
    else:
        shutil.copytree(place / f"{command.after}.expected", before)
    text = "".join(command.stages).replace('"data/', '"')
    (place / "data" / f"{kind}.toml").write_text(f'dir = "run"\n{text}')
    shutil.copytree(before, expected)
    log = place / f"{kind}.log"
    ended = command.start(place, expected, shim.environment(expected, log=log)).wait(300)
    if ended.code:
        raise RuntimeError(f"an undisturbed command failed: {ended}")
    return list(shim.calls(log))


def _faults(trial: Trial, kind: str, calls: Sequence[shim.Call]) -> Iterator[str]:
    for call in calls:
        draw = trial.random(kind, call)
        errors = ERRORS if COMMANDS[kind].every else (draw.choice(ERRORS),)
        yield from (f"{error} once {call}" for error in errors)
        yield f"{draw.choice(ERRORS)} on {call}"
        if call.operation == "write":
            yield f"EIO short {call}"


def judge(case: Case, place: Path) -> None:
    kind, error, how, text = case.name.split(" ", 3)
    command, call, directory = COMMANDS[kind], shim.Call.parse(text), case.directory / "case"
    shutil.copytree(place / kind, directory)
    log = case.directory / "log"
    plan = shim.environment(directory, log=log, at=call, action=ACTIONS[how], error=getattr(errno, error))
    ended = command.start(place, directory, plan).wait(SECONDS)
    made = list(shim.calls(log)) if log.exists() else []
    broken: Sequence[shim.Call] = []
    if call in made:
        case.count("calls broken")
        more = dataclasses.replace(call, ordinal=call.ordinal + 1)
        repeated = more in made and more not in shim.calls(place / f"{kind}.log")
        # From then on, threads may meet the error in another order, and whichever is reported is true.
        broken = made[made.index(call) :] if how == "on" else [call]
        for line in _wrong_end(ended, broken, how, error, harmless=repeated or _is_harmless(call)):
            case.fail(f"{line}: {ended}")
    elif ended.code:
        case.fail(f"failed without the fault: {ended}")
    newest = _newest_checkpoints(directory)
    for path, step in saved_checkpoints(directory, [each for each in made if each not in broken]).items():
        if not _done(path) and newest.get(path, -1) < step:
            case.fail(f"the checkpoint of step {step} of {path.name} is lost\nafter it {ended}")
    if left_out := [] if ended.code else LEFT_OUT.findall(ended.err):
        # What was said to be left out is missing, and the best model is that of the other evaluations.
        case.count("evaluations left out", len(left_out))
        for stage in left_out:
            case.require(_done(directory / "run" / stage), f"stage {stage} is not done\nafter it {ended}")
        return
    expected = place / f"{kind}.expected"
    if ended.code:
        again = command.start(place, directory).wait(SECONDS)
        case.require(again.code == 0, f"the same command again {again}\nafter it {ended}")
    for path, step in newest.items():
        if _started(path) < step:
            case.fail(f"{path.name} began again at update {_started(path)}; there was a checkpoint of {step}")
    for line in runs.differences(expected, directory):
        if not line.startswith(("run/events.jsonl", "new/events.jsonl")):
            case.fail(f"{line}\nafter it {ended}")
    missing = sorted(_files(expected) - _files(directory))
    if missing:
        case.fail(f"missing after the second command: {missing}\nafter it {ended}")
    if left := sorted(_files(directory) - _files(expected)):
        case.fail(f"left after the second command: {left}\nafter it {ended}")


def _wrong_end(
    ended: Ended, broken: Sequence[shim.Call], how: str, error: str, *, harmless: bool
) -> Iterator[str]:
    """Yield what is wrong with the end of a command of which calls were broken. harmless: it need not say so."""
    lines = [line for line in ended.err.splitlines() if line.strip() and not re.match(r"\[\w+\] ", line)]
    warnings = [line for line in lines if line.startswith("warning: ")]
    messages = [line for line in lines if line not in warnings]
    if ended.traceback:
        yield "a traceback"
    elif how == "short" and (ended.code or lines):
        yield "a short write is no failure"
    elif how == "short":
        return
    elif ended.code not in (0, 1, 2):
        yield f"exit code {ended.code}"
    elif ended.code == 0:
        if messages:
            yield "a message, and exit code 0"
        if not harmless and not any(_is_true(line, broken, error) for line in warnings):
            yield "the failure is not said"
    elif len(messages) != 1:
        yield f"{len(messages)} messages"
    elif not _is_true(messages[0], broken, error):
        yield "the message does not name the place and the reason"
    elif ended.code == 2 and not any(map(_is_output, broken)):
        yield "exit code 2, which means a mistake in the input"


def _is_harmless(call: shim.Call) -> bool:
    """Return whether nothing depends on the call: a deletion or directory that is made again, or who holds a lock."""
    again = call.operation == "unlink" or (call.operation == "mkdir" and call.ordinal > 0)
    return again or (call.path.endswith("/.lock") and call.operation != "create")


def _is_output(call: shim.Call) -> bool:
    """Return whether the call makes, or locks, the place that the user gave for the output."""
    return call.path in (".", "run", "new", "run/.lock", "new/.lock") or call.path.startswith("new/.")


TEMPORARY = re.compile(r"^\.(.+?)(?:\.#)?\.tmp$|^\.(.+)\.(?:replaced|unfinished|unfinished\.json)$")


def _is_true(message: str, broken: Sequence[shim.Call], error: str) -> bool:
    """Return whether a message gives the reason, and names the file of a broken call, or what that is part of."""
    reason = "no space left on the disk" if error == "ENOSPC" else os.strerror(getattr(errno, error))
    named = any(call.path == "." or place in message for call in broken for place in _places(call))
    return named and reason.lower() in message.lower()


def _places(call: shim.Call) -> Iterator[str]:
    """Yield the names under which a message may speak of a call's path."""
    parts: list[str] = []
    for part in call.path.split("/"):
        parts.append(TEMPORARY.sub(r"\1\2", part))
        if parts[-1] != part:
            yield "/".join(parts)
    yield "/".join(parts)
    if call.operation == "unlink" or parts[-1] == ".lock":
        yield "/".join(parts[:-1])


def saved_checkpoints(directory: Path, made: Sequence[shim.Call]) -> dict[Path, int]:
    """Return {stage directory: the step of the newest checkpoint that was saved by these calls}."""
    saved: dict[Path, int] = {}
    for number, call in enumerate(made):
        path = directory / call.path
        if call.operation == "rename" and path.parent.name == "checkpoints" and path.name.isdecimal():
            folder = str(Path(call.path).parent)
            if any(later.operation == "fsync" and later.path == folder for later in made[number:]):
                saved[path.parent.parent] = max(int(path.name), saved.get(path.parent.parent, 0))
    return saved


def _newest_checkpoints(directory: Path) -> dict[Path, int]:
    """Return {stage directory: the step of its newest checkpoint} for the stages that are not done."""
    newest: dict[Path, int] = {}
    for path in directory.glob("*/*/checkpoints/[0-9]*"):
        if path.name.isdecimal() and not _done(stage := path.parent.parent):
            newest[stage] = max(int(path.name), newest.get(stage, 0))
    return newest


def _done(stage: Path) -> bool:
    record = stage / "stage.json"
    return record.exists() and json.loads(record.read_text())["state"] == "done"


def _started(stage: Path) -> int:
    """Return the update at which the last run of a stage began."""
    return json.loads((stage / "plan.json").read_text())["start"]


def _files(directory: Path) -> set[str]:
    """List the files that a command leaves, apart from checkpoints, whose number depends on where a run was stopped."""
    return {
        re.sub(r"[0-9a-f]{8,}", "#", str(path.relative_to(directory)))
        for path in directory.rglob("*")
        if not re.search(r"checkpoints/\d+(/|$)", str(path))
    }
