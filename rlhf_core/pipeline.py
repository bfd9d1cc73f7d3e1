"""Running a pipeline: each stage skipped, continued or begun, and refused where it would be another stage."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core import events, hook_errors
from rlhf_core import plugins as plugin_loading
from rlhf_core.contracts import Artifact
from rlhf_core.errors import InputError, RunError
from rlhf_core.pipeline_file import PipelineFile, read
from rlhf_core.plan import Plan, StagePlan, plan
from rlhf_core.preview import previews
from rlhf_core.resolved import to_toml
from rlhf_core.stage_record import StageRecord
from rlhf_core.terminal import listed
from rlhf_core.text_settings import day_begun

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.plugins import Host


@dataclass(frozen=True)
class StageResult:
    """artifacts: {output: Artifact}. skipped: done before. metrics: the newest value of every metric."""

    artifacts: Mapping[str, Artifact]
    skipped: bool
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Results:
    """A finished pipeline: its run directory, and {stage: StageResult} in the order of running."""

    dir: Path
    stages: Mapping[str, StageResult]


def run_pipeline(
    path: str | Path,
    *,
    sets: Sequence[str] = (),
    plugins: Sequence[str | Path] = (),
    dir: str | Path | None = None,
) -> Results:
    """Run or continue a pipeline; stages that are done are skipped.

    sets: as `--set`, "stage.field=value" or "seed=1". plugins: files, as `--plugin`. dir: in place of the
    file's.

    Raises InputError with everything that is wrong with the file, or where a stage was begun with other
    settings; RunError where a stage fails for a reason that can be told; Stopped after a signal, with the
    state saved.
    """
    file = read(path, sets=sets, dir=dir)
    host = plugin_loading.load(files=[Path(each) for each in plugins])
    return run(plan(file, host), host)


def run(plan: Plan, host: Host, *, say: Callable[[str], None] = print) -> Results:
    """Run a plan. `say` is told, on the main process, what each stage will do, and which are skipped or continued."""
    import jax

    from rlhf_core import runtime
    from rlhf_core.mesh import make_mesh

    runtime.prepare()
    mesh = make_mesh(plan.mesh.get("data", -1), plan.mesh.get("fsdp", 1), plan.mesh.get("tensor", 1))
    is_main = jax.process_index() == 0
    say = say if is_main else _silent
    with lock(plan.dir, is_main):
        records = {stage.name: StageRecord(stage) for stage in plan.stages}
        _refuse(records)
        # What is wrong with the last stage's data is told now, not after the first ones are trained.
        done = {name for name, record in records.items() if record.state == "done"}
        said = previews(plan, host, without=done)
        if is_main:
            _write_resolved(plan)
        for name, lines in said.items():
            say(listed(f"stage '{name}' will train on", lines))
        results = {
            stage.name: _run_stage(
                stage, records[stage.name], mesh, host, is_main, say, said.get(stage.name, [])
            )
            for stage in plan.stages
        }
    if all(result.skipped for result in results.values()):
        say(f"{plan.dir}: every stage is done, nothing to run. To train again, give another --dir.")
    return Results(plan.dir, results)


def _refuse(records: Mapping[str, StageRecord]) -> None:
    """Before anything runs: a change in the last stage is told now, not after the first ones are trained."""
    problems: list[str] = []
    for record in records.values():
        try:
            record.refuse_changes()
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems)


def _run_stage(
    stage_plan: StagePlan,
    record: StageRecord,
    mesh: Mesh,
    host: Host,
    is_main: bool,
    say: Callable[[str], None],
    said: Sequence[str],
) -> StageResult:
    from rlhf_core.execution import execute, read_outputs
    from rlhf_core.stage import Stage

    name, trainer = stage_plan.name, stage_plan.trainer
    record.refuse_changes()  # again: what earlier stages made is there only now
    stage = Stage(
        name,
        stage_plan.dir,
        stage_plan.seed,
        mesh,
        is_main,
        host.registry,
        host.hook,
        template_date=day_begun(stage_plan.dir.parent),
    )
    if record.state != "new" and (changed := record.changed_versions()):
        warnings.warn(f"stage '{name}' was begun with {'; '.join(changed)}", stacklevel=2)
    if record.state == "done":
        try:
            outputs = read_outputs(trainer, stage)
        except RunError as error:
            raise InputError(f"{error}; it was done before: delete {stage.dir} to run it anew") from error
        say(f"stage '{name}': done on {record.then['finished']}, skipped")
        return StageResult(outputs, True, read_metrics(stage.dir / "metrics.jsonl"))
    if record.state == "running":
        say(f"stage '{name}': begun on {record.then['started']}, continues")
    noted: AbstractContextManager[None] = nullcontext()
    if is_main:
        told = [line.removeprefix("warning: ") for line in said]
        noted = events.noted(stage.dir.parent, name, mesh, continues=record.state == "running", told=told)
        record.write_running()
    try:
        with noted, hook_errors.named(host.pm):
            finished = record.write_done if is_main else None
            outputs = execute(trainer, stage_plan.config, stage, host, finished=finished)
    except (InputError, RunError):
        saved = "finished" in record.then or any((stage.dir / "checkpoints").glob("[0-9]*"))
        if is_main and not saved:
            record.forget()
        raise
    return StageResult(outputs, False, read_metrics(stage.dir / "metrics.jsonl"))


def read_metrics(path: Path) -> dict[str, float]:
    """The newest value of every metric in a metrics.jsonl, NaN for null; empty where there is none."""
    newest: dict[str, float | None] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            newest.update(json.loads(line))
    return {name: math.nan if value is None else value for name, value in newest.items()}


@contextmanager
def lock(directory: Path, is_main: bool = True) -> Iterator[None]:
    """Hold DIR/.lock, so that no other process runs the same directory; the kernel frees it if this one dies.

    Raises InputError where another process holds it.
    """
    if not is_main:
        yield
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"dir: {directory} is not a directory; give another --dir") from None
    except PermissionError:
        raise InputError(f"dir: no permission to write to {directory}; give another --dir") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(f"dir: {directory} cannot be made ({error.strerror}); give another --dir") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            raise InputError(
                f"dir: {directory} is in use by another run{f' (process {holder})' if holder else ''}; "
                "wait for it to end, or give another --dir"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def _write_resolved(plan: Plan) -> None:
    from rlhf_core.artifacts import write_atomic

    stages: list[dict[str, Any]] = [
        {"name": stage.name, "trainer": stage.trainer_name, **stage.written.to_dict()}
        for stage in plan.stages
    ]
    table = {"dir": str(plan.dir), "seed": plan.seed, "mesh": dict(plan.mesh), "stage": stages}
    write_atomic(plan.dir / "pipeline.resolved.toml", to_toml(table))


def _silent(_: str) -> None:
    pass


__all__ = ["PipelineFile", "Plan", "Results", "StageResult", "plan", "read", "run", "run_pipeline"]
