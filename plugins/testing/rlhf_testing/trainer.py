"""Check trainers with short runs of a tiny model, one of them interrupted twice."""

from __future__ import annotations

import json
import math
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlhf_core import load_model, plugins
from rlhf_core.config import TrainerConfig
from rlhf_core.contracts import TRAINER, Trainer
from rlhf_core.errors import Stopped
from rlhf_core.mesh import make_mesh
from rlhf_core.scoring import Scorer
from rlhf_core.training import OnShapes, forecast
from rlhf_testing.findings import Broken, Findings, make_component, require_finite
from rlhf_testing.fixtures import CRASH_AT, SEED, STOP_AT, Case, Ran, clockless

SMALL = {
    "total_batch_size": 4,
    "learning_rate": 1e-2,
    "max_training_steps": 6,
    "log_steps": 1,
    "save_steps": 2,
}
HEADS: Mapping[str, Any] = {"language_model": "lm", "reward_model": "score"}
NEAR = 1e-2
"""Relative to the norm of all parameters; a few Adam updates move them by several times that, or flip signs."""


def check_trainer(
    trainer: str | Trainer,
    config: TrainerConfig | None = None,
    *,
    rows: Sequence[Mapping[str, Any]],
    **inputs: Any,
) -> None:
    """Raise AssertionError that lists every property that `trainer` breaks.

    trainer: a registered name, or the `Trainer`. Raises InputError for an unknown name.
    config: of the trainer's class; fields that it does not set get the small values of `SMALL`.
    rows: the training data, such as `texts()`, `pairs()` or `prompts()` of this package.
    inputs: other objects for `Stage.inputs`, such as `rewards`. By default `model` and `tokenizer` are the kit's own,
    and `eval_dataset` is the first few rows.

    component: it can be registered.
    config: it survives writing and reading.
    forecast: its `build` can be checked without devices, and writes nothing.
    finishes: a run of a few updates ends.
    outputs: every output is saved, announced and finite, and opens again; a reward model as rewards open it.
    metrics: finite numbers, `loss` among them, at increasing steps.
    evaluation: none fails, which a run only warns of.
    stop: a SIGTERM ends it after the update, with its state saved (only checked in a process's main thread).
    resume: after an interruption it continues to bit-identical results.
    mesh: all available devices give the same up to rounding. Skipped with a warning if there is only one device.
    """
    __tracebackhide__ = True
    findings = Findings("trainer", trainer)
    known = plugins.load().registry.get(TRAINER, trainer) if isinstance(trainer, str) else trainer
    make_component(findings, TRAINER, known)
    with tempfile.TemporaryDirectory() as directory:
        case = Case.of(known, config, rows, inputs, SMALL, Path(directory))
        findings.always = {"seed": SEED, "config": case.config, "rows": list(rows)}
        _settings(findings, case)
        whole = None
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with findings.property("finishes"):
                whole = case.run("whole")
        for each in said:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        findings.stop_if_broken()
        assert whole is not None
        with findings.property("outputs"):
            _outputs(case, whole)
        with findings.property("metrics"):
            _metrics(whole)
        with findings.property("evaluation"):
            _evaluation([str(each.message) for each in said])
        findings.stop_if_broken()
        _interrupted(findings, case, whole)
        if len(jax.devices()) > 1:
            with findings.property("mesh"):
                _mesh(case, whole)
        else:
            warnings.warn(
                "check_trainer: 'mesh' was not checked, there is only one device; put "
                "jax.config.update('jax_num_cpu_devices', 2) first",
                stacklevel=2,
            )
    findings.end()


def _settings(findings: Findings, case: Case) -> None:
    with findings.property("config"):
        again = type(case.config).from_json(case.config.to_json())
        if again != case.config:
            raise Broken(
                f"after a round trip through JSON it is {again}, not {case.config}; use fields that JSON can hold"
            )
    if case.trainer.build is None:
        return
    with findings.property("forecast"):
        stage = case.stage("forecast", mesh=None)
        forecast(case.trainer.build, OnShapes(case.config, stage))
        if stage.dir.exists() and any(stage.dir.iterdir()):
            raise Broken(
                f"a check wrote {sorted(p.name for p in stage.dir.iterdir())}; build must only describe what is trained"
            )


def _outputs(case: Case, whole: Ran) -> None:
    if not case.trainer.outputs:
        raise Broken("it declares no outputs; declare what run saves, {'model': 'language_model'}")
    for name, kind in case.trainer.outputs.items():
        if name not in whole.announced:
            raise Broken(
                f"'{name}' was saved without rlhf_artifact_saved; save it with artifacts.save_model(stage, …)"
            )
        path = whole.outputs[name].path
        for parameter, values in weights(path).items():
            require_finite(values, f"'{name}': {parameter}")
        if kind == "reward_model":
            Scorer.load(
                path, mesh=make_mesh(devices=jax.devices()[:1]), registry=plugins.installed_registry()
            )
        if kind in HEADS:
            mesh = make_mesh(devices=jax.devices()[:1])
            model = load_model(path, HEADS[kind], mesh=mesh, registry=plugins.installed_registry())
            ids = np.array([[3, 4, 5]])
            mask = np.ones((1, 3), int)
            compute = model.logits if kind == "language_model" else model.scores
            require_finite(compute(ids, mask), f"'{name}': its outputs")


def _metrics(whole: Ran) -> None:
    logged = {step: row for step, row in whole.rows if row}
    if not logged:
        raise Broken("no metrics: call stage.hook.rlhf_step_end(stage=…, step=…, metrics=…), as fit does")
    steps = [step for step, _ in whole.rows]
    if steps != sorted(steps) or min(steps) < 0:
        raise Broken(f"steps {steps}: they must be the updates done so far, and increase")
    for step, row in logged.items():
        for name, value in row.items():
            if not isinstance(value, float | int | np.floating | np.integer):
                raise Broken(f"step {step}: '{name}' is {type(value).__name__}; report plain floats")
            if not math.isfinite(value):
                raise Broken(f"step {step}: '{name}' is {value}; leave out metrics without a value")
        json.dumps({name: float(value) for name, value in row.items()}, allow_nan=False)
    names = {name for row in logged.values() for name in row}
    if "loss" not in names:
        raise Broken(f"there is no 'loss' among {', '.join(sorted(names))}")


def _evaluation(said: Sequence[str]) -> None:
    failed = next((line for line in said if "failed and is skipped; training continues" in line), None)
    if failed is not None:
        raise Broken(failed.partition("training continues: ")[2])


def _interrupted(findings: Findings, case: Case, whole: Ran) -> None:
    parts, stopped_before = "fresh", False
    if threading.current_thread() is threading.main_thread():  # others get no signals
        with findings.property("stop"):
            stopped = case.run("stopped", stop=STOP_AT)
            if not isinstance(stopped.error, Stopped) or stopped.ignored:
                raise Broken(
                    f"a SIGTERM after update {STOP_AT} did not stop it: use fit, or "
                    "rlhf_core.runtime.signals.stop_signals(), save after the update and raise Stopped"
                )
        stopped_before = "stop" not in findings.failures
        parts = "stopped" if stopped_before else "fresh"
    with findings.property("resume"):
        crashed = case.run(parts, crash=CRASH_AT)
        rest = case.run(parts)
        for at, ran in [(STOP_AT, crashed)] * stopped_before + [(CRASH_AT, rest)]:
            begun = ran.rows[0][0] if ran.rows else 0
            if begun <= 1:
                raise Broken(
                    f"it was interrupted after update {at} and starts over at update {begun}; restore "
                    "the newest checkpoint below stage.dir, as fit does"
                )
        for name, artifact in whole.outputs.items():
            files, others = artifact.metadata["files"], rest.outputs[name].metadata["files"]
            changed = sorted(file for file in {*files, *others} if files.get(file) != others.get(file))
            if changed:
                raise Broken(
                    f"'{name}' of an interrupted run differs in {', '.join(changed)}; everything that changes from "
                    "update to update (order of the data, random keys, counters) belongs in the checkpoint"
                )
        before, after = dict(map(clockless, whole.rows)), dict(map(clockless, rest.rows))
        differ = [step for step, row in after.items() if before.get(step) != row]
        if differ:
            raise Broken(f"the metrics of updates {differ} differ from those of an uninterrupted run")


def _mesh(case: Case, whole: Ran) -> None:
    count = len(jax.devices())
    spread = case.run("mesh", mesh=make_mesh(fsdp=2 if count % 2 == 0 else 1))
    first, other = (next(row["loss"] for _, row in ran.rows if "loss" in row) for ran in (whole, spread))
    if not math.isclose(first, other, rel_tol=1e-3, abs_tol=1e-4):
        raise Broken(f"the first loss is {first:.6g} on one device and {other:.6g} on {count}")
    for name, artifact in whole.outputs.items():
        one = weights(artifact.path)
        many = weights(spread.outputs[name].path)
        size = math.sqrt(sum(float(np.square(x).sum()) for x in one.values()))
        apart = math.sqrt(sum(float(np.square(x - many[n]).sum()) for n, x in one.items()))
        if apart > NEAR * size:
            raise Broken(
                f"'{name}' on {count} devices differs from one device by {apart / size:.2g} of its norm"
            )


def weights(path: Any) -> dict[str, Any]:
    """Return every parameter of an artifact's safetensors files, float64."""
    from safetensors import safe_open

    parameters = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="flax") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                parameters[name] = np.asarray(tensors.get_tensor(name), np.float64)
    return parameters
