"""Run a stage under its record: skip, continue, begin or refuse it, alike on every process and for every door."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.contracts import Artifact, Trainer
from rlhf_core.errors import InputError, RunError, Stopped
from rlhf_core.runtime.agreement import enter_on_first, gather_texts, require_shared_directory, stop_together
from rlhf_core.runtime.directory_lock import lock
from rlhf_core.runtime.peak_memory import forget_peak, format_bytes, peak_line
from rlhf_core.stage import differences, events
from rlhf_core.stage.execute import execute, named, read_outputs
from rlhf_core.stage.record import StageRecord, State

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.plugins import Host
    from rlhf_core.stage import Stage


class Ended(NamedTuple):
    """artifacts: {output: Artifact}. skipped: the stage was done before. metrics: the newest value of every metric."""

    artifacts: Mapping[str, Artifact]
    skipped: bool
    metrics: Mapping[str, float]


class Asked(NamedTuple):
    """What one stage is asked to compute. now: see `rlhf_core.stage.differences`.

    reads: stages whose outputs it reads.
    """

    name: str
    dir: Path
    now: differences.Record
    reads: frozenset[str] = frozenset()
    fix: str = ""


@contextmanager
def held(
    directory: Path, ask: Callable[[], Sequence[Asked]], *, field: str = "dir", **facts: Any
) -> Iterator[dict[str, tuple[StageRecord, differences.Record]]]:
    """Lock a run directory on the main process, and open and compare the records of its stages, on every process.

    Gives {stage: (its record, what it is asked to compute now)}.

    ask: gives the stages, in order. facts: what else processes must agree on. Raises InputError, on every process,
    where the directory is in use, a stage was begun as another experiment, or processes differ.
    """
    with enter_on_first(lambda: lock(directory, field)):
        require_shared_directory(directory, field)
        records: dict[str, StageRecord] = {}
        problems: list[str] = []
        stages: Sequence[Asked] = ()
        try:
            stages = ask()
            for each in stages:
                records[each.name] = StageRecord(each.dir, each.name, fix=each.fix)
            problems += refusals(stages, records)
            facts["stages"] = {
                each.name: {"record": dict(each.now), "state": records[each.name].state} for each in stages
            }
        except InputError as error:
            problems += error.problems
        agree(facts, problems)
        yield {each.name: (records[each.name], each.now) for each in stages}


def refusals(stages: Sequence[Asked], records: Mapping[str, StageRecord]) -> list[str]:
    """Everything for which a stage is refused: a change in the last one is told before the first one is trained."""
    problems: list[str] = []
    extended: set[str] = set()
    for each in stages:
        record = records[each.name]
        try:
            state = record.settle(each.now)
        except InputError as error:
            problems += error.problems
            continue
        if stale := sorted(each.reads & extended):
            if record.state == "new":
                continue
            problems.append(
                f"stage '{each.name}' was begun with '{stale[0]}' as it was, which would be trained further: delete "
                f"{record.dir} to run it anew afterwards, or use another --dir"
            )
        if record.state == "done" and state == "running":
            extended.add(each.name)
    return problems


def agree(facts: Mapping[str, Any], problems: Sequence[str]) -> None:
    """Raise InputError, on every process alike, where one has problems or they are asked for different things."""
    told = [json.loads(text) for text in gather_texts(json.dumps([facts, list(problems)]))]
    found: dict[str, list[int]] = {}
    for process, (_, wrong) in enumerate(told):
        for problem in wrong:
            found.setdefault(problem, []).append(process)
    if found:
        raise InputError(*(p if len(on) == len(told) else f"process {on[0]}: {p}" for p, on in found.items()))
    first = told[0][0]
    unlike = [
        f"process {process}: {line}"
        for process, (facts_there, _) in enumerate(told)
        for line in _differences(first, facts_there)
    ]
    if unlike:
        raise InputError(
            *unlike,
            "the processes of a job must be given the same pipeline, data, code and versions, and see the same run "
            "directory; start all of them with the same",
        )


def _differences(first: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """What differs between the first process and another one, a line each."""
    for name in first:
        if name != "stages" and first[name] != here.get(name):
            yield f"{name} is {json.dumps(here.get(name))}, and {json.dumps(first[name])} on process 0"
    ours, theirs = here["stages"], first["stages"]
    if list(ours) != list(theirs):
        yield f"the stages are {', '.join(ours)}, and {', '.join(theirs)} on process 0"
        return
    for name, stage in ours.items():
        found = differences.compare(theirs[name]["record"], stage["record"])
        for each in (*found.refused, *found.warned, *found.data):
            yield f"stage '{name}'.{each.field} is {each.now}, and {each.before} on process 0"
        if stage["state"] != theirs[name]["state"]:
            yield (
                f"stage '{name}' is {stage['state']}, and {theirs[name]['state']} on process 0: the run directory must "
                "be on a disk that all processes share"
            )


def run_recorded(
    trainer: Trainer,
    config: TrainerConfig,
    stage: Stage,
    host: Host,
    record: StageRecord,
    now: differences.Record,
    *,
    notes: Path,
    say: Callable[[str], None],
    told: Sequence[str] = (),
    forecast: int | None = None,
    done: str = "skipped",
) -> Ended:
    """Run a stage, or go on with it, or give what it has left where it is done.

    now: what it computes. notes: the directory of events.jsonl. told: warnings that were shown already. forecast: bytes
    of memory, to be shown beside what was taken. done: what is said of a stage that is done.
    Raises InputError, on every process, where it was begun as another experiment.
    """
    stage = replace(stage, experiment=now)
    state: State = "new"
    problems: list[str] = []
    try:
        state = record.settle(now)  # again: what earlier stages made is there only now
    except InputError as error:
        problems += error.problems
    agree({"stages": {}}, problems)
    for line in record.warnings(now) if stage.is_main else ():
        warnings.warn(line, stacklevel=3)
    if state == "done":
        try:
            outputs = read_outputs(trainer, stage)
        except RunError as error:
            raise InputError(f"{error}; it was done before: delete {stage.dir} to run it anew") from error
        record.require_outputs(outputs)
        say(f"stage '{stage.name}': done on {record.then['finished']}, {done}")
        return Ended(outputs, True, record.metrics)
    stop_together(f"before stage '{stage.name}' was {'begun' if state == 'new' else 'continued'}")
    if state == "running":
        how = "is trained further" if record.state == "done" else "continues"
        say(f"stage '{stage.name}': begun on {record.then['started']}, {how}")
    before = dict(record.then)
    noted: AbstractContextManager[None] = nullcontext()
    if stage.is_main:
        continues = state == "running" or record.has_checkpoints
        noted = events.noted(notes, stage.name, stage.devices(), continues=continues, told=told)
        record.write_running(now)
    forget_peak()
    try:
        with noted, named(host.pm):
            outputs = execute(
                trainer,
                config,
                stage,
                host,
                finished=lambda outputs: record.write_done(stage.metrics, outputs) if stage.is_main else None,
            )
    except (InputError, RunError, Stopped) as error:
        if stage.is_main and record.state != "done":
            if not record.has_checkpoints and not record.has_artifacts:
                record.put_back({})
            elif isinstance(error, InputError):
                record.put_back(before)
        raise
    if forecast is not None:
        stage.say(f"memory: {peak_line()}; at most {format_bytes(forecast)} was forecast")
    return Ended(outputs, False, dict(stage.metrics))
