"""One stage run from its first event to its last, for pipelines and for the Python doors alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_core import artifacts, stage_files, workers
from rlhf_core.agreement import text_of_first
from rlhf_core.contracts import LOGGER, Artifact, Trainer
from rlhf_core.disk_errors import attempt
from rlhf_core.errors import InputError, RunError
from rlhf_core.files import make_directory, remove_leftovers
from rlhf_core.hookspecs import hookimpl
from rlhf_core.loggers import Console, JsonLines
from rlhf_core.text_settings import template_date

if TYPE_CHECKING:
    from rlhf_core.options import TrainerConfig
    from rlhf_core.plugins import Host
    from rlhf_core.stage import Stage


def execute(
    trainer: Trainer,
    config: TrainerConfig,
    stage: Stage,
    host: Host,
    *,
    finished: Callable[[dict[str, Artifact]], None] | None = None,
) -> dict[str, Artifact]:
    """Run `trainer` between `rlhf_stage_start` and `rlhf_stage_end`; every declared output, {name: Artifact}.

    The loggers that `config` names listen during this stage only, and worker processes end with it.
    `rlhf_stage_end` comes last whatever happened, and what was raised is raised after it. finished: called before it,
    with the outputs, where every one is there. Raises RunError where the trainer returned without an output it
    declares.
    """
    stage = replace(stage, template_date=text_of_first(template_date(config, stage)))
    attempt(lambda: make_directory(stage.dir), f"stage '{stage.name}'", stage.dir)
    if stage.is_main:
        for directory in (stage.dir, *(stage.dir / name for name in stage_files.FOLDERS)):
            remove_leftovers(directory)
    listeners = make_loggers(config, stage) if stage.is_main else {}
    listeners["newest metrics"] = _Newest()
    for name, listener in reversed(listeners.items()):  # pluggy calls the newest first
        host.pm.register(listener, name=name)
    error: BaseException | None = None
    try:
        host.hook.rlhf_stage_start(stage=stage)
        trainer.run(config, stage)
        outputs = read_outputs(trainer, stage)
        if stage.is_main:
            stage_files.sync(stage.dir)
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
            warnings.warn(str(failed), stacklevel=2)
        finally:
            for listener in listeners.values():
                host.pm.unregister(listener)
            workers.close()


class _Newest:
    """A listener that keeps the newest value of every metric in `stage.metrics`."""

    @hookimpl
    def rlhf_step_end(self, stage: Stage, metrics: Mapping[str, float]) -> None:
        stage.metrics.update(metrics)


def make_loggers(config: TrainerConfig, stage: Stage) -> dict[str, Any]:
    """{name in messages: logger}: metrics.jsonl, the console in the form that `progress_bar_type` names, and what
    `logger` lists. Ours come first, so that none of the others can keep a row from them.
    """
    configured = {each.name for each in config.logger}
    found: dict[str, Any] = {}
    if "jsonl" not in configured:
        found["logger 'jsonl'"] = JsonLines()
    if "console" not in configured:
        found["logger 'console'"] = Console(config.progress_bar_type, config.progress_metrics)
    for index, each in enumerate(config.logger):
        name = f"logger '{each.name}'"
        name = f"{name} (logger[{index}])" if name in found else name
        found[name] = stage.registry.get(LOGGER, each.name, **each.options)
    return found


def read_outputs(trainer: Trainer, stage: Stage) -> dict[str, Artifact]:
    """What `trainer` declares, read back and verified. Raises RunError for an output that is missing or damaged."""
    outputs = {}
    for name, kind in trainer.outputs.items():
        path = stage.dir / "artifacts" / name
        if not path.exists():
            raise RunError(f"stage '{stage.name}': there is no output '{name}' ({kind}) in {path}")
        try:
            artifact = artifacts.read(path)
        except InputError as error:
            raise RunError(f"stage '{stage.name}': output '{name}' is not whole: {error}") from error
        if artifact.kind != kind:
            raise RunError(
                f"stage '{stage.name}': output '{name}' should be a {kind}, and the trainer saved a "
                f"{artifact.kind}"
            )
        outputs[name] = artifact
    return outputs
