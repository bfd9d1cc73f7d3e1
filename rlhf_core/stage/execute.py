"""Run one stage as it was decided, from its first event to its last, for pipelines and for trainers from Python."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import pluggy

from rlhf_core import artifacts
from rlhf_core.contracts import LOGGER, Artifact, Forecast, Trainer
from rlhf_core.errors import InputError, RunError, Stopped, disk_full, error_line, warn
from rlhf_core.loggers.every import every
from rlhf_core.loggers.jsonl import DIGESTS, JsonLines
from rlhf_core.loggers.jsonl import FILE as METRICS
from rlhf_core.plugins.component import HERE
from rlhf_core.plugins.hooks import hookimpl
from rlhf_core.runtime.agreement import broadcast_text, raise_together, stop_together
from rlhf_core.runtime.files import attempt, flush_lines, make_directory, remove_leftovers
from rlhf_core.runtime.machine import forget_peak, format_bytes, peak_line
from rlhf_core.stage import Stage, events
from rlhf_core.stage.decide import Decision, begins_again, decide
from rlhf_core.stage.identity import identified
from rlhf_core.stage.record import StageRecord, StageRun
from rlhf_core.stage.spec import StageSpec
from rlhf_core.stage.text_settings import template_date
from rlhf_core.workers.pool import close as close_workers

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.config import TrainerConfig
    from rlhf_core.plugins import Host


@dataclass(frozen=True)
class StageResult:
    """The result of one stage. skipped: it was done before. metrics: the newest values at the update whose model is
    saved."""

    artifacts: Mapping[str, Artifact]
    skipped: bool
    metrics: Mapping[str, float]


def run_stage(
    run: StageRun,
    host: Host,
    mesh: Mesh,
    *,
    say: Callable[[str], None] | None = None,
    accept: Collection[str] = (),
    day: str | None = None,
    forecast: Forecast | None = None,
) -> StageResult:
    """Begin or continue a stage, or return the outputs of one that is done.

    say: prints a line; None: as the stage does. day: on which the run began. forecast: of the stage.
    Raises InputError, on every process, if it is refused: the outputs of earlier stages may exist only now.
    """
    record = run.record
    expected = forecast or Forecast()
    decision = decide(record.begun, run.spec, accept)
    with raise_together():
        if decision.action == "refuse":
            raise InputError(*decision.reasons)
    spec = record.with_accepted(run.spec, decision.accepted)
    stage = Stage(
        name=spec.name,
        dir=spec.dir,
        seed=spec.seed,
        mesh=mesh,
        is_main=jax.process_index() == 0,
        registry=host.registry,
        hook=host.hook,
        inputs=spec.objects,
        template_date=day,
        spec=spec,
    )
    say = say or stage.say
    if decision.action == "skip":
        return _keep_done(stage, record, decision, say)
    begins = decision.action == "begin"
    if begins:
        stop_together(f"before stage '{stage.name}' was begun")
        if stage.is_main and record.then:  # it starts over
            record.put_back({})
    else:
        stop_together(f"before stage '{stage.name}' was continued")
        how = "is trained further" if decision.action == "extend" else "continues"
        say(f"stage '{stage.name}': begun on {record.then['started']}, {how}")
    on_record: AbstractContextManager[None] = nullcontext()
    if stage.is_main:
        for line in begins_again(spec, record.attempt):
            say(line)
        continues = not begins or record.has_checkpoints
        shown = [*expected.warnings, *expected.told]
        on_record = _on_record(stage, record, day, continues=continues, shown=shown)

    def finished(outputs: dict[str, Artifact]) -> None:
        if stage.is_main:
            record.write_done(stage.metrics, outputs)

    forget_peak()
    with on_record, hook_errors_named(host.pm):
        if stage.is_main:
            for line in decision.warnings:
                warn(line)
        outputs = execute(spec.trainer, spec.config, stage, host, finished=finished)
    if expected.memory is not None:
        stage.say(f"memory: {peak_line()}; the forecast was about {format_bytes(expected.memory)}")
    return StageResult(outputs, False, dict(stage.metrics))


@contextmanager
def _on_record(
    stage: Stage, record: StageRecord, day: str | None, *, continues: bool, shown: Sequence[str]
) -> Iterator[None]:
    """Record a stage as running, and log its events, inside the block.

    After an error, the record of a stage of which nothing is kept is removed, and it is what it was before where the
    user has to change something. shown: as of `events.log_stage`.
    """
    spec = stage.specification()
    before = dict(record.then)
    record.forget_attempt()
    record.write_running(spec, day)
    try:
        with events.log_stage(spec.run, stage.name, stage.devices(), continues=continues, shown=shown):
            yield
    except (InputError, RunError, Stopped) as error:
        if not record.done:
            with suppress(OSError, RunError):  # a disk that refuses this, too, must not hide the error
                if not record.has_checkpoints and not record.has_artifacts:
                    record.put_back({})
                elif isinstance(error, InputError):
                    record.put_back(before)
        raise


def _keep_done(
    stage: Stage, record: StageRecord, decision: Decision, say: Callable[[str], None]
) -> StageResult:
    """Return the outputs of a finished stage. Raises InputError if one is missing or changed."""
    spec = stage.specification()
    for line in decision.warnings if stage.is_main else ():
        warn(line)
    try:
        outputs = read_outputs(spec.trainer, stage)
    except RunError as error:
        raise InputError(f"{error}; it was finished: delete {stage.dir} to rerun it") from error
    record.require_outputs(outputs)
    if decision.accepted and stage.is_main:
        record.keep_done(spec)
    say(f"stage '{stage.name}': done on {record.then['finished']}, {_what_of_done(spec)}")
    return StageResult(outputs, True, record.metrics)


def _what_of_done(spec: StageSpec) -> str:
    if spec.alone:
        return f"nothing is trained: the result is what {spec.dir} holds; for another run, give another save_directory"
    return "skipped"


def execute(
    trainer: Trainer,
    config: TrainerConfig,
    stage: Stage,
    host: Host,
    *,
    finished: Callable[[dict[str, Artifact]], None] | None = None,
) -> dict[str, Artifact]:
    """Run `trainer` between `rlhf_stage_start` and `rlhf_stage_end`; return its outputs, {name: Artifact}.

    The loggers that `config` names listen during this stage only, and worker processes end with it. `rlhf_stage_end`
    is called last even after an exception, which is then raised again. finished: called with the outputs before it, if
    all of them exist. Raises RunError if the trainer returned without an output that it declares.
    """
    if config.platform not in (None, jax.default_backend()):
        raise InputError(
            f"stage '{stage.name}'.platform: the stage needs {config.platform}, and jax runs on "
            f"{jax.default_backend()} here: install jax for it, set JAX_PLATFORMS, or leave out platform"
        )
    stage = specified(trainer, config, stage)
    stage = replace(stage, template_date=broadcast_text(template_date(config, stage)))
    attempt(lambda: make_directory(stage.dir), f"stage '{stage.name}'", stage.dir)
    if stage.is_main:
        for directory in (stage.dir, *stage.dir.glob("*/")):
            remove_leftovers(directory)
    listeners = make_loggers(config, stage) if stage.is_main or config.log_all_workers else {}
    listeners["newest metrics"] = _NewestMetrics()
    for name, listener in reversed(listeners.items()):  # pluggy calls the newest first
        host.pm.register(listener, name=name)
    error: BaseException | None = None
    try:
        host.hook.rlhf_stage_start(stage=stage, config=config)
        trainer.run(config, stage)
        outputs = read_outputs(trainer, stage, verify=False)  # hashed as they were written
        if stage.is_main:
            flush_lines(stage.dir / METRICS)
            flush_lines(stage.dir / DIGESTS)
        if finished is not None:
            finished(outputs)
        return outputs
    except BaseException as caught:
        error = caught
        raise
    finally:
        try:
            host.hook.rlhf_stage_end(stage=stage, error=error)
        except RunError as failed:
            if error is None:
                raise
            warn(str(failed))
        finally:
            for listener in listeners.values():
                host.pm.unregister(listener)
            close_workers()


def specified(trainer: Trainer, config: TrainerConfig, stage: Stage) -> Stage:
    """Return a stage with its specification, also one that neither a pipeline nor a trainer class started."""
    if stage.spec is not None:
        return stage
    spec = StageSpec(
        name=stage.name,
        dir=stage.dir,
        run=stage.dir,
        trainer_name=stage.name,
        trainer=trainer,
        seed=stage.seed,
        written=config,
        config=config,
        preview=config,
        objects=stage.inputs,
    )
    return replace(stage, spec=identified(spec, stage.registry))


class _NewestMetrics:
    """Keep the newest value of every metric in `stage.metrics`."""

    @hookimpl
    def rlhf_step_end(self, stage: Stage, metrics: Mapping[str, float]) -> None:
        stage.metrics.update(metrics)


def make_loggers(config: TrainerConfig, stage: Stage) -> dict[str, Any]:
    """Build {name in messages: logger}: metrics.jsonl, the console, and the loggers of the config's `logger`.

    The first two come first, so that no other logger can keep a row from them.
    """
    configured = {component.name for component in config.logger}
    loggers: dict[str, Any] = {}
    if "jsonl" not in configured:
        loggers["logger 'jsonl'"] = JsonLines(config.log_all_workers)
    if "console" not in configured and stage.is_main:
        shown = {"progress": config.progress_bar_type, "metrics": config.progress_metrics}
        loggers["logger 'console'"] = stage.registry.get(LOGGER, "console", **shown)
    for index, component in enumerate(config.logger):
        name = f"logger '{component.name}'"
        name = f"{name} (logger[{index}])" if name in loggers else name
        logger = stage.registry.get(LOGGER, component.name, **component.options)
        loggers[name] = logger if config.report_steps is None else every(logger, config.report_steps)
    return loggers


def read_outputs(trainer: Trainer, stage: Stage, *, verify: bool = True) -> dict[str, Artifact]:
    """Read the outputs that `trainer` declares. Raises RunError if one is missing or, where `verify`, damaged."""
    outputs = {}
    for name, kind in trainer.outputs.items():
        path = stage.dir / "artifacts" / name
        if not path.exists():
            raise RunError(f"stage '{stage.name}': there is no output '{name}' ({kind}) in {path}")
        try:
            artifact = artifacts.open_artifact(path, verify=verify)
        except InputError as error:
            raise RunError(f"stage '{stage.name}': output '{name}' is incomplete: {error}") from error
        if artifact.kind != kind:
            raise RunError(
                f"stage '{stage.name}': output '{name}' should be a {kind}, and the trainer saved a "
                f"{artifact.kind}"
            )
        outputs[name] = artifact
    return outputs


RESUMES = "Rerun the same command to resume from the newest checkpoint, or to start the stage over if there is none."
FINISHED = "The stage is trained and saved: rerun the same command to continue after it."


@contextmanager
def hook_errors_named(pm: pluggy.PluginManager) -> Iterator[None]:
    """Turn foreign exceptions from hooks into RunErrors that name the plugin or logger, inside the block."""
    undo = pm.add_hookcall_monitoring(lambda *_: None, _raise_with_owner)
    try:
        yield
    finally:
        undo()


def _raise_with_owner(
    outcome: pluggy.Result[Any], hook: str, impls: Sequence[pluggy.HookImpl], arguments: Mapping[str, Any]
) -> None:
    error = outcome.exception
    if not isinstance(error, Exception) or isinstance(error, InputError | RunError | Stopped):
        return
    impl = _raising(error, impls)
    if impl is None or disk_full(error):
        return
    message = f"stage '{arguments['stage'].name}': {_owner(impl)} {error_line(error, HERE)} in {hook}"
    if arguments.get("error") is None:  # else an earlier error has ended the stage
        message += f". {FINISHED if hook == 'rlhf_stage_end' else RESUMES}"
    raise RunError(message) from error


def _raising(error: Exception, impls: Sequence[pluggy.HookImpl]) -> pluggy.HookImpl | None:
    """Find the implementation that raised; of two objects of one class, the one that was called."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        matches = [impl for impl in impls if getattr(impl.function, "__code__", None) is frame.f_code]
        if matches:
            values = list(frame.f_locals.values())
            return next((impl for impl in matches if any(impl.plugin is v for v in values)), matches[0])
    return None


def _owner(impl: pluggy.HookImpl) -> str:
    return impl.plugin_name if impl.plugin_name.startswith("logger ") else f"plugin '{impl.plugin_name}'"
