"""Running a pipeline: each stage skipped, continued or begun, and refused where it would be another stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core import plugins as plugin_loading
from rlhf_core.config.secrets import public_table
from rlhf_core.contracts import Artifact
from rlhf_core.pipeline.file import PipelineFile, read
from rlhf_core.pipeline.forecast import previews
from rlhf_core.pipeline.output import to_toml
from rlhf_core.pipeline.plan import Plan, StagePlan, plan
from rlhf_core.runtime import peers
from rlhf_core.runtime.signals import stop_if_asked, stop_signals
from rlhf_core.runtime.terminal import echo, indented_list
from rlhf_core.stage import differences, experiment
from rlhf_core.stage.record import StageRecord
from rlhf_core.stage.recorded import Asked, held, run_recorded
from rlhf_core.stage.text_settings import day_begun

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.plugins import Host

BEFORE = "before anything was trained"


@dataclass(frozen=True)
class StageResult:
    """artifacts: {output: Artifact}. skipped: done before. metrics: the last value of every metric."""

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
    with stop_signals(redeliver=True):
        start()  # before plugins, which may compute something when they are imported
        with peers.joint_run():
            file = read(path, sets=sets, dir=dir)
            host = plugin_loading.load(files=[Path(each) for each in plugins])
            return run(plan(file, host), host)


def start() -> None:
    """Prepare the process and join the job's others, before anything of the pipeline or of a plugin is read."""
    from rlhf_core import runtime

    stop_if_asked(BEFORE)
    runtime.prepare()
    stop_if_asked(BEFORE)


def run(plan: Plan, host: Host, *, say: Callable[[str], None] = echo) -> Results:
    """Run a plan. `say` is told, on the main process, what each stage will do, and which are skipped or continued."""
    with stop_signals(), peers.joint_run():
        start()
        return _run(plan, host, say)


def _run(plan: Plan, host: Host, say: Callable[[str], None]) -> Results:
    import jax

    from rlhf_core.mesh import make_mesh
    from rlhf_core.runtime.peak_memory import free_memory

    mesh = make_mesh(plan.mesh.get("data", -1), plan.mesh.get("fsdp", 1), plan.mesh.get("tensor", 1))
    is_main = jax.process_index() == 0
    say = say if is_main else _silent
    with held(plan.dir, lambda: asked(plan, host), mesh=dict(plan.mesh)) as records:
        # What is wrong with the last stage's data is told now, not after the first ones are trained.
        done = {name for name, (record, now) in records.items() if record.settle(now) == "done"}
        said = previews(plan, host, without=done)
        stop_if_asked(BEFORE)
        if is_main:
            _write_resolved(plan, host)
        for name, lines in said.items():
            say(indented_list(f"stage '{name}' will train on", lines))
        results: dict[str, StageResult] = {}
        for number, stage in enumerate(plan.stages):
            if number and not results[plan.stages[number - 1].name].skipped:
                free_memory()  # of the stage before, whose programs and arrays nothing needs
            results[stage.name] = _run_stage(
                stage, records[stage.name][0], mesh, host, is_main, say, said.get(stage.name, [])
            )
    if all(result.skipped for result in results.values()):
        say(f"{plan.dir}: every stage is done, nothing to run. To train again, give another --dir.")
    return Results(plan.dir, results)


def asked(plan: Plan, host: Host) -> list[Asked]:
    """What each stage of a plan is asked to compute, for its record."""
    return [
        Asked(
            stage.name,
            stage.dir,
            _record(stage, host),
            frozenset(each.reference.partition(".")[0] for each in stage.inputs.values() if each.reference),
            f"give those back, use another --dir, or delete {stage.dir} to run it anew",
        )
        for stage in plan.stages
    ]


def _record(stage: StagePlan, host: Host) -> differences.Record:
    inputs = {field: (each.path, each.reference) for field, each in stage.inputs.items()}
    return experiment.of_pipeline(stage.trainer_name, stage.seed, stage.written, inputs, host.registry)


def _run_stage(
    stage_plan: StagePlan,
    record: StageRecord,
    mesh: Mesh,
    host: Host,
    is_main: bool,
    say: Callable[[str], None],
    said: Sequence[str],
) -> StageResult:
    from rlhf_core.stage import Stage
    from rlhf_core.training.memory import MemoryLine

    name, directory = stage_plan.name, stage_plan.dir
    stage = Stage(
        name,
        directory,
        stage_plan.seed,
        mesh,
        is_main,
        host.registry,
        host.hook,
        template_date=day_begun(directory.parent),
    )
    ended = run_recorded(
        stage_plan.trainer,
        stage_plan.config,
        stage,
        host,
        record,
        _record(stage_plan, host),
        notes=directory.parent,
        say=say,
        told=[line.removeprefix("warning: ") for line in said],
        forecast=next((line.bytes for line in said if isinstance(line, MemoryLine)), None),
    )
    return StageResult(*ended)


def _write_resolved(plan: Plan, host: Host) -> None:
    from rlhf_core.runtime.files import write_atomic

    stages: list[dict[str, Any]] = [
        {"name": stage.name, "trainer": stage.trainer_name, **public_table(stage.written, host.registry)}
        for stage in plan.stages
    ]
    table = {"dir": str(plan.dir), "seed": plan.seed, "mesh": dict(plan.mesh), "stage": stages}
    write_atomic(plan.dir / "pipeline.resolved.toml", to_toml(table), private=True)


def _silent(_: str) -> None:
    pass


__all__ = ["PipelineFile", "Plan", "Results", "StageResult", "plan", "read", "run", "run_pipeline"]
