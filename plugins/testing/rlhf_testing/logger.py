"""Check loggers."""

from __future__ import annotations

import dataclasses
import inspect
import math
import tempfile
from pathlib import Path
from typing import Any

from rlhf_core import plugins
from rlhf_core.config import TrainerConfig
from rlhf_core.contracts import LOGGER, Artifact
from rlhf_core.errors import InputError, RunError
from rlhf_core.stage import Stage
from rlhf_testing.findings import Broken, Findings, make_component
from rlhf_testing.fixtures import a_stage

METRICS = {"loss": 0.5, "reward/a b": -1.0, "clip_ratio/low_mean": 0.0, "num_tokens": 3e9}
NOT_FINITE = {"loss": math.nan, "min_reward": -math.inf, "max_reward": math.inf}


def check_logger(logger: Any) -> None:
    """Raise AssertionError that lists every property that `logger` breaks.

    logger: the registered class or function, without required options, called once per stage as in a pipeline; or an
    object, which receives one stage after another.

    component: it can be registered. hooks: it has hooks, all decorated and known.
    events: it handles a whole stage.
    not finite: it accepts NaN and infinite metrics.
    sparse metrics: rows may have other names than earlier ones, or none.
    going on: a resumed stage starts above step 1.
    failure: a stage may fail before its first step.
    inputs: it does not change the metrics.
    """
    __tracebackhide__ = True
    findings = Findings("logger", logger)
    if inspect.isclass(logger) or inspect.isroutine(logger):
        make_component(findings, LOGGER, logger)

        def make() -> Any:
            return logger()

    else:

        def make() -> Any:
            return logger

    with findings.property("hooks"):
        try:
            plugins.require_hooks(plugins.empty_host().pm, make())
        except InputError as error:
            raise Broken("; ".join(error.problems)) from error
    findings.stop_if_broken()
    with tempfile.TemporaryDirectory() as directory:
        _check_stages(findings, make, Path(directory))
    findings.end()


def _check_stages(findings: Findings, make: Any, directory: Path) -> None:
    base = plugins.empty_host()

    def send_stage(
        name: str, *rows: tuple[int, dict[str, float]], error: BaseException | None = None
    ) -> None:
        logger = make()
        stage = _listening(base, directory / name)
        stage.dir.mkdir(parents=True, exist_ok=True)
        base.pm.register(logger)
        try:
            stage.hook.rlhf_stage_start(stage=stage, config=TrainerConfig())
            for step, metrics in rows:
                stage.hook.rlhf_step_end(stage=stage, step=step, metrics=metrics)
            if error is None:
                path = stage.dir / "artifacts" / "model"
                stage.hook.rlhf_artifact_saved(
                    stage=stage, artifact=Artifact("model", "language_model", path)
                )
        finally:
            try:
                stage.hook.rlhf_stage_end(stage=stage, error=error)
            finally:
                base.pm.unregister(logger)

    with findings.property("events"):
        send_stage("whole", (1, dict(METRICS)), (2, dict(METRICS)))
    findings.stop_if_broken()
    with findings.property("not finite"):
        send_stage("not finite", (1, dict(NOT_FINITE)))
    with findings.property("sparse metrics"):
        send_stage("sparse", (1, dict(METRICS)), (2, {}), (3, {"eval_loss": 0.5}), (4, {"new": 1.0}))
    with findings.property("going on"):
        send_stage("going on", (1, dict(METRICS)))
        send_stage("going on", (8, dict(METRICS)), (9, dict(METRICS)))
    with findings.property("failure"):
        send_stage("failure", error=RunError("the kit ends this stage"))
    with findings.property("inputs"):
        given = dict(METRICS)
        send_stage("inputs", (1, given))
        if given != METRICS:
            raise Broken(f"it changed {METRICS} to {given}; other loggers see the same object: copy it first")


def _listening(base: plugins.Host, directory: Path) -> Stage:
    return dataclasses.replace(a_stage(directory, host=base), name=directory.name)
