"""The kit for loggers."""

from __future__ import annotations

import dataclasses
import inspect
import math
import tempfile
from pathlib import Path
from typing import Any

from rlhf_core import plugins
from rlhf_core.contracts import LOGGER, Artifact
from rlhf_core.errors import InputError, RunError
from rlhf_core.stage import Stage
from rlhf_core.testing.findings import Broken, Findings, made
from rlhf_core.testing.fixtures import a_stage

METRICS = {"loss": 0.5, "reward/a b": -1.0, "clip_ratio/low_mean": 0.0, "num_tokens": 3e9}
NOT_FINITE = {"loss": math.nan, "min_reward": -math.inf, "max_reward": math.inf}


def check_logger(logger: Any) -> None:
    """Raise AssertionError with every property of a logger that `logger` lacks.

    logger: what is registered, a class or a function without required options, made anew for every stage as a pipeline
    does; or an object, which is told of one stage after another.

    component: it can be registered. hooks: it has hooks, all decorated and known.
    events: it takes a whole stage.
    not finite: NaN and infinite metrics are no error.
    sparse metrics: rows may have other names than before, or none.
    going on: a stage that continues starts above step 1.
    failure: a stage may fail before its first step.
    inputs: the metrics it is given stay as they are.
    """
    found = Findings("logger", logger)
    if inspect.isclass(logger) or inspect.isroutine(logger):
        made(found, LOGGER, logger)

        def make() -> Any:
            return logger()

    else:

        def make() -> Any:
            return logger

    with found.property("hooks"):
        try:
            plugins.require_hooks(plugins.empty_host().pm, make())
        except InputError as error:
            raise Broken("; ".join(error.problems)) from error
    found.stop_if_broken()
    with tempfile.TemporaryDirectory() as directory:
        _tell(found, make, Path(directory))
    found.end()


def _tell(found: Findings, make: Any, directory: Path) -> None:
    base = plugins.empty_host()

    def told(name: str, *rows: tuple[int, dict[str, float]], error: BaseException | None = None) -> None:
        logger = make()
        stage = _listening(base, directory / name)
        stage.dir.mkdir(parents=True, exist_ok=True)
        base.pm.register(logger)
        try:
            stage.hook.rlhf_stage_start(stage=stage)
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

    with found.property("events"):
        told("whole", (1, dict(METRICS)), (2, dict(METRICS)))
    found.stop_if_broken()
    with found.property("not finite"):
        told("not finite", (1, dict(NOT_FINITE)))
    with found.property("sparse metrics"):
        told("sparse", (1, dict(METRICS)), (2, {}), (3, {"eval_loss": 0.5}), (4, {"new": 1.0}))
    with found.property("going on"):
        told("going on", (1, dict(METRICS)))
        told("going on", (8, dict(METRICS)), (9, dict(METRICS)))
    with found.property("failure"):
        told("failure", error=RunError("the kit ends this stage"))
    with found.property("inputs"):
        given = dict(METRICS)
        told("inputs", (1, given))
        if given != METRICS:
            raise Broken(f"it was given {METRICS} and left {given}; other loggers see the same: copy first")


def _listening(base: plugins.Host, directory: Path) -> Stage:
    return dataclasses.replace(a_stage(directory, host=base), name=directory.name)
