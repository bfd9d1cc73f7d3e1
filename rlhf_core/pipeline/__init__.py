"""Run a pipeline: begin, continue or skip each stage, and refuse one whose settings have changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from rlhf_core import plugins as plugin_loading
from rlhf_core import runtime
from rlhf_core.config.secrets import public_table
from rlhf_core.config.toml import to_toml
from rlhf_core.errors import InputError, suggest, warn
from rlhf_core.mesh import make_mesh
from rlhf_core.pipeline.file import PipelineFile, read
from rlhf_core.pipeline.forecast import stage_forecasts
from rlhf_core.pipeline.plan import Plan, plan, with_all_metrics
from rlhf_core.pipeline.settings import settings_lines
from rlhf_core.runtime import machine
from rlhf_core.runtime.agreement import raise_together
from rlhf_core.runtime.directory_lock import lock
from rlhf_core.runtime.files import write_atomic
from rlhf_core.runtime.signals import stop_if_asked
from rlhf_core.runtime.terminal import echo, indented_list
from rlhf_core.stage import events
from rlhf_core.stage.execute import StageResult, run_stage
from rlhf_core.stage.identity import identified
from rlhf_core.stage.record import StageRun, decide_together
from rlhf_core.stage.reuse import find_reusable
from rlhf_core.stage.text_settings import day_begun

if TYPE_CHECKING:
    from rlhf_core.plugins import Host
    from rlhf_core.stage.spec import StageSpec


@dataclass(frozen=True)
class Results:
    """The results of a finished pipeline: its run directory, and {stage: StageResult} in the order they ran."""

    dir: Path
    stages: Mapping[str, StageResult]


@runtime.session()  # entered before plugins are loaded, whose import may run computations
def run_pipeline(
    path: str | Path,
    *,
    sets: Sequence[str] = (),
    plugins: Sequence[str | Path] = (),
    dir: str | Path | None = None,
    accept: Sequence[str] = (),
    reuse: str | Path | None = None,
    only: Sequence[str] = (),
    verbose: bool = False,
) -> Results:
    """Run or continue a pipeline; stages that are done are skipped.

    sets: as `--set`, "stage.field=value" or "seed=1". plugins: files, as `--plugin`. dir: replaces the file's `dir`.
    accept: names of changed rewards and environments to continue with, as `--accept`. reuse: another run directory,
    whose finished stages are taken over where they match. only: the stages to run, whose inputs must be finished.
    verbose: show every metric of an evaluation, rather than four, and at the end what was compiled.

    Raises InputError with everything that is wrong with the file, or if a stage was begun with other settings;
    RunError if a stage fails for a known reason; Stopped after a signal, with the state saved.
    """
    file = read(path, sets=sets, dir=dir)
    host = plugin_loading.load(files=[Path(plugin) for plugin in plugins])
    planned = plan(file, host)
    if verbose:
        planned = with_all_metrics(planned)
    return run(planned, host, accept=accept, reuse=reuse, only=only)


@runtime.session()
def run(
    plan: Plan,
    host: Host,
    *,
    say: Callable[[str], None] = echo,
    accept: Sequence[str] = (),
    reuse: str | Path | None = None,
    only: Sequence[str] = (),
) -> Results:
    """Run a plan. say: prints, on the main process, each stage's forecast and whether it is skipped or continued.

    accept, reuse, only: see `run_pipeline`.
    """
    whole = plan
    plan = chosen_stages(plan, only)
    mesh = make_mesh(**dict[str, Any](plan.mesh))
    is_main = jax.process_index() == 0
    say = say if is_main else _silent
    with lock(plan.dir):
        with raise_together():
            if reuse is not None and is_main:
                _take_over(plan, host, reuse, say)
        runs = decide_together(
            lambda: identified_stages(plan, host), accept, mesh=dict(plan.mesh), only=sorted(only)
        )
        # Report problems with the last stage's data now, not after the first stages have trained.
        done = {name for name, each in runs.items() if each.decision.action == "skip"}
        require_inputs(plan, only, done)
        forecasts = stage_forecasts(plan, host, without=done)
        stop_if_asked("before anything was trained")
        if is_main:
            warn_of_readers(plan, runs)
            _write_resolved(whole, host)
        for each in plan.stages:
            if each.name in forecasts:
                lines = settings_lines(each.written, host.registry) + forecasts[each.name].printed()
                say(indented_list(f"stage '{each.name}' will train on", lines))
        results: dict[str, StageResult] = {}
        day = day_begun(plan.dir)
        trained = False
        for name, asked in runs.items():
            if trained:
                machine.free_memory()  # of the previous stage's programs and arrays
            # What earlier stages make exists now.
            begins = asked._replace(spec=identified(asked.spec, host.registry))
            results[name] = run_stage(
                begins, host, mesh, say=say, accept=accept, day=day, forecast=forecasts.get(name)
            )
            trained = not results[name].skipped
    if all(result.skipped for result in results.values()):
        say(f"{plan.dir}: every stage is done, nothing to run. To train again, give another --dir.")
    return Results(plan.dir, results)


def chosen_stages(plan: Plan, only: Sequence[str]) -> Plan:
    """Return a plan of these stages and of those that they read; the whole plan for none."""
    if not only:
        return plan
    by_name = {stage.name: stage for stage in plan.stages}
    unknown = [name for name in only if name not in by_name]
    if unknown:
        raise InputError(
            *(
                f"--only {name}: no such stage.{suggest(name, by_name)} Stages: {', '.join(by_name)}"
                for name in unknown
            )
        )
    wanted = {*only}.union(*(by_name[name].reads for name in only))
    return replace(plan, stages=tuple(stage for stage in plan.stages if stage.name in wanted))


def require_inputs(plan: Plan, only: Sequence[str], done: Collection[str]) -> None:
    """Raise InputError for every unfinished stage outside `--only` that one of them reads."""
    problems = [
        f"--only {stage.name}: it reads '{source}', which is not finished in {plan.dir}; add --only {source}, or "
        "--reuse a run in which it is"
        for stage in plan.stages
        if stage.name in only
        for source in sorted(stage.reads - {*only} - {*done})
    ]
    if problems:
        raise InputError(*problems)


def _take_over(plan: Plan, host: Host, run: str | Path, say: Callable[[str], None]) -> None:
    """Take over the finished stages of another run that match, and say which ones do not."""
    found, reasons = find_reusable(run, identified_stages(plan, host))
    for stage in found.values():
        stage.take_over()
        events.log_event(plan.dir, stage.spec.name, "reused", message=str(stage.source))
        say(f"stage '{stage.spec.name}': reused from {stage.source}")
    for line in reasons:
        say(line)


def warn_of_readers(plan: Plan, stages: Mapping[str, StageRun]) -> None:
    """Warn of new stages whose earlier output a stage that is not new has read."""
    new = {name for name, each in stages.items() if not each.record.then}
    for stage in plan.stages:
        for source in sorted(stage.reads & new) if stage.name not in new else ():
            warn(
                f"stage '{source}' runs again, and stage '{stage.name}' used its previous output: if the "
                f"output changes, '{stage.name}' will be refused; delete {stage.dir} to rerun it too"
            )


def identified_stages(plan: Plan, host: Host) -> list[StageSpec]:
    """Return the stages of a plan with what each would compute, to be compared with its record."""
    return [identified(stage, host.registry) for stage in plan.stages]


def _write_resolved(plan: Plan, host: Host) -> None:
    stages: list[dict[str, Any]] = [
        {"name": stage.name, "trainer": stage.trainer_name, **public_table(stage.written, host.registry)}
        for stage in plan.stages
    ]
    table = {"dir": str(plan.dir), "seed": plan.seed, "mesh": dict(plan.mesh), "stage": stages}
    write_atomic(plan.dir / "pipeline.resolved.toml", to_toml(table), private=True)


def _silent(_: str) -> None:
    pass


__all__ = ["PipelineFile", "Plan", "Results", "StageResult", "plan", "read", "run", "run_pipeline"]
