"""Skip, continue, begin or refuse a stage by its record, in agreement with every process of the job."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.contracts import Artifact, Trainer
from rlhf_core.errors import InputError, RunError, Stopped
from rlhf_core.runtime.agreement import enter_on_first, gather_texts, require_shared_directory, stop_together
from rlhf_core.runtime.directory_lock import lock
from rlhf_core.runtime.peak_memory import forget_peak, format_bytes, peak_line
from rlhf_core.stage import differences, events
from rlhf_core.stage.execute import execute, hook_errors_named, read_outputs
from rlhf_core.stage.record import StageRecord, State

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.plugins import Host
    from rlhf_core.stage import Stage


class StageOutcome(NamedTuple):
    """artifacts: {output: Artifact}. skipped: the stage was done before. metrics: the newest value of every metric."""

    artifacts: Mapping[str, Artifact]
    skipped: bool
    metrics: Mapping[str, float]


class StageRequest(NamedTuple):
    """A request to run one stage. now: what it would compute, see `rlhf_core.stage.differences`.

    reads: stages whose outputs it reads. fix: how a user can run it with other settings, for messages.
    """

    name: str
    dir: Path
    now: differences.Record
    reads: frozenset[str] = frozenset()
    fix: str = ""


@contextmanager
def open_records(
    directory: Path,
    ask: Callable[[], Sequence[StageRequest]],
    *,
    field: str = "dir",
    accept: Collection[str] = (),
    prepare: Callable[[], None] | None = None,
    **facts: Any,
) -> Iterator[dict[str, tuple[StageRecord, differences.Record]]]:
    """Lock a run directory and compare the records of its stages: {stage: (its record, what it computes now)}.

    The main process takes the lock; every process compares. ask: returns the stages, in order. accept: names of changes
    to accept. prepare: called first, on the main process alone. facts: what else all processes must agree on. Raises
    InputError, on every process, if the directory is in use, a stage was begun as another experiment, or processes
    differ.
    """
    with enter_on_first(lambda: _locked(directory, field, prepare)):
        require_shared_directory(directory, field)
        records: dict[str, StageRecord] = {}
        problems: list[str] = []
        stages: Sequence[StageRequest] = ()
        try:
            stages = ask()
            records = read_records(stages, accept)
            problems += refusals(stages, records)
            facts["stages"] = {
                stage.name: {"record": dict(stage.now), "state": records[stage.name].state}
                for stage in stages
            }
        except InputError as error:
            problems += error.problems
        require_agreement(facts, problems)
        yield {stage.name: (records[stage.name], stage.now) for stage in stages}


@contextmanager
def _locked(directory: Path, field: str, prepare: Callable[[], None] | None) -> Iterator[None]:
    with lock(directory, field):
        if prepare is not None:
            prepare()
        yield


def read_records(stages: Sequence[StageRequest], accept: Collection[str] = ()) -> dict[str, StageRecord]:
    """Read the records of stages. accept: names of changes to accept; one that nothing answers to is warned of."""
    records = {
        stage.name: StageRecord(stage.dir, stage.name, fix=stage.fix, accept=accept) for stage in stages
    }
    used = {
        name
        for stage in stages
        for change in records[stage.name].accepted(stage.now)
        for short in differences.accept_names(change.field, records[stage.name].then, stage.now)
        for name in (short, f"{stage.name}.{short}")
    }
    for name in sorted(set(accept) - used):
        warnings.warn(f"accept '{name}': no change that was refused has this name", stacklevel=2)
    return records


def refusals(stages: Sequence[StageRequest], records: Mapping[str, StageRecord]) -> list[str]:
    """List every reason to refuse a stage, so that a change in the last stage is known before the first one trains."""
    problems: list[str] = []
    extended: set[str] = set()
    for stage in stages:
        record = records[stage.name]
        try:
            state = record.settle(stage.now)
        except InputError as error:
            problems += error.problems
            continue
        if stale := sorted(stage.reads & extended):
            if record.state == "new":
                continue
            problems.append(
                f"stage '{stage.name}' was begun with '{stale[0]}' as it was, which would be trained further: delete "
                f"{record.dir} to run it anew afterwards, or use another --dir"
            )
        if record.state == "done" and state == "running":
            extended.add(stage.name)
    return problems


def require_agreement(facts: Mapping[str, Any], problems: Sequence[str]) -> None:
    """Raise the same InputError on every process if any has problems, or if their facts differ."""
    reports = [json.loads(text) for text in gather_texts(json.dumps([facts, list(problems)]))]
    processes: dict[str, list[int]] = {}
    for process, (_, process_problems) in enumerate(reports):
        for problem in process_problems:
            processes.setdefault(problem, []).append(process)
    if processes:
        raise InputError(
            *(p if len(on) == len(reports) else f"process {on[0]}: {p}" for p, on in processes.items())
        )
    first = reports[0][0]
    differing = [
        f"process {process}: {line}"
        for process, (process_facts, _) in enumerate(reports)
        for line in _differences(first, process_facts)
    ]
    if differing:
        raise InputError(
            *differing,
            "the processes of a job must be given the same pipeline, data, code and versions, and see the same run "
            "directory; start all of them with the same",
        )


def _differences(first: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each difference between the first process and another one."""
    for name in first:
        if name != "stages" and first[name] != here.get(name):
            yield f"{name} is {json.dumps(here.get(name))}, and {json.dumps(first[name])} on process 0"
    ours, theirs = here["stages"], first["stages"]
    if list(ours) != list(theirs):
        yield f"the stages are {', '.join(ours)}, and {', '.join(theirs)} on process 0"
        return
    for name, stage in ours.items():
        changes = differences.compare(theirs[name]["record"], stage["record"])
        for change in (*changes.refused, *changes.warned, *changes.data):
            yield f"stage '{name}'.{change.field} is {change.now}, and {change.before} on process 0"
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
    shown: Sequence[str] = (),
    forecast: int | None = None,
    done: str = "skipped",
) -> StageOutcome:
    """Begin or continue a stage, or return the outputs of one that is done.

    now: what it computes. notes: the directory of events.jsonl. shown: warnings of its forecast. forecast: bytes of
    memory, printed next to the peak. done: words for a stage that is done.
    Raises InputError, on every process, if it was begun as another experiment.
    """
    state: State = "new"
    problems: list[str] = []
    try:
        state = record.settle(now)  # again: the outputs of earlier stages exist only now
    except InputError as error:
        problems += error.problems
    require_agreement({"stages": {}}, problems)
    lines = record.warnings(now) if stage.is_main else []
    accepts = bool(record.accepted(now))
    now = record.with_accepted(now)
    stage = replace(stage, experiment=now)
    if state == "done":
        for line in lines:
            warnings.warn(line, stacklevel=3)
        try:
            outputs = read_outputs(trainer, stage)
        except RunError as error:
            raise InputError(f"{error}; it was done before: delete {stage.dir} to run it anew") from error
        record.require_outputs(outputs)
        if accepts and stage.is_main:
            record.keep_done(now)
        say(f"stage '{stage.name}': done on {record.then['finished']}, {done}")
        return StageOutcome(outputs, True, record.metrics)
    stop_together(f"before stage '{stage.name}' was {'begun' if state == 'new' else 'continued'}")
    if state == "running":
        how = "is trained further" if record.state == "done" else "continues"
        say(f"stage '{stage.name}': begun on {record.then['started']}, {how}")
    before = dict(record.then)
    event_log: AbstractContextManager[None] = nullcontext()
    if stage.is_main:
        continues = state == "running" or record.has_checkpoints
        event_log = events.log_stage(notes, stage.name, stage.devices(), continues=continues, shown=shown)
        record.write_running(now, stage.template_date)
    forget_peak()
    try:
        with event_log, hook_errors_named(host.pm):
            for line in lines:
                warnings.warn(line, stacklevel=3)
            outputs = execute(
                trainer,
                config,
                stage,
                host,
                finished=lambda outputs: record.write_done(stage.metrics, outputs) if stage.is_main else None,
            )
    except (InputError, RunError, Stopped) as error:
        if stage.is_main and record.state != "done":
            with suppress(OSError, RunError):  # a disk that refuses this, too, must not hide the error
                if not record.has_checkpoints and not record.has_artifacts:
                    record.put_back({})
                elif isinstance(error, InputError):
                    record.put_back(before)
        raise
    if forecast is not None:
        stage.say(f"memory: {peak_line()}; the forecast was at most {format_bytes(forecast)}")
    return StageOutcome(outputs, False, dict(stage.metrics))
