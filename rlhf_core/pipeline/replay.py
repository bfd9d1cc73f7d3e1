"""Train a stage again from its journal, and compare what it logged and what it saved."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rlhf_core import artifacts, runtime
from rlhf_core import plugins as plugin_loading
from rlhf_core.config.trainer import COMPARING, TrainerConfig
from rlhf_core.contracts import Trainer
from rlhf_core.errors import Damaged, InputError, RunError, Stopped, counted, suggest
from rlhf_core.mesh import make_mesh
from rlhf_core.pipeline.file import read
from rlhf_core.pipeline.plan import plan
from rlhf_core.runs import RESOLVED, StageDirectory, open_run
from rlhf_core.runtime.rollout_files import FOLDER
from rlhf_core.runtime.signals import stop_requested
from rlhf_core.runtime.terminal import echo
from rlhf_core.stage import Replay, Stage
from rlhf_core.stage.execute import execute
from rlhf_core.stage.identity import identified
from rlhf_core.stage.record import StageRecord
from rlhf_core.stage.spec import StageSpec
from rlhf_core.stage.text_settings import day_begun

WITHOUT = {
    "logger": [],
    "max_evaluation_steps": 0,
    "evaluation_steps": None,
    "eval_on_start": False,
    "previews": None,
    "num_preview_samples": 0,
    "log_completions": False,
    "save_steps": None,
    "save_interval_minutes": 1e9,
    "training_time_limit": None,
}
"""Settings of a replay, which only trains: what needs a sampler or a reward is left out."""
_OF_MACHINE = ("time", "_per_second", "memory", "eval_", "seconds")
"""Parts of the names of metrics that a replay does not compute, or that depend on the machine."""


@dataclass(frozen=True)
class Replayed:
    """What a replay found. updates: made again. differences: lines, none where everything logged and saved is equal.

    model: whether the saved model was compared. changes: lines, where something differs: what is not as it was then.
    """

    stage: str
    updates: int
    differences: Sequence[str]
    model: bool
    changes: Sequence[str] = ()


@runtime.session()
def replay(
    run: Path,
    stage: str | None = None,
    to: int | None = None,
    plugins: Sequence[Path] = (),
    *,
    since: int = 0,
) -> Replayed:
    """Train a stage of a run again from its journal, in a temporary directory, without its sampler and its rewards.

    stage: the one to replay; None: the last one with a journal. to: the last update to make; None: all. since: the
    step of the checkpoint to start from; 0: from the beginning.
    Raises InputError where the run has no such stage or no journal.
    """
    run = run.expanduser().absolute()
    if not (run / RESOLVED).is_file():
        raise InputError(f"{run}: not the directory of a pipeline: there is no {RESOLVED} in it")
    file = read(run / RESOLVED, dir=run)
    host = plugin_loading.load(files=plugins)
    planned = plan(file, host)
    then = _choose([each for each in open_run(run).stages if each.table], stage, run)
    (chosen,) = [each for each in planned.stages if each.name == then.name]
    _require_whole(then.rollout_numbers, chosen.dir / FOLDER)
    finished = then.spec.get("state") == "done" and chosen.config.compares is None
    logged = _by_step(then)
    last = max(logged, default=0)
    to = last if to is None else min(to, last)  # a limit of time may have ended it before its last update
    config = _only_trained(chosen.config)
    with tempfile.TemporaryDirectory(prefix="rlhf-replay-") as directory:
        made = Stage(
            name=chosen.name,
            dir=Path(directory) / chosen.name,
            seed=chosen.seed,
            mesh=make_mesh(**dict[str, Any](planned.mesh)),
            is_main=jax.process_index() == 0,
            registry=host.registry,
            hook=host.hook,
            template_date=day_begun(run),
            # A checkpoint is compared with what the stage computes.
            spec=identified(chosen, host.registry) if since else chosen,
            replay=Replay(chosen.dir / FOLDER, to),
        )
        if since:
            checkpoint = Path("checkpoints", str(since))
            shutil.copytree(chosen.dir / checkpoint, made.dir / checkpoint)
        again = _train_again(made, chosen.trainer, config, host)
        differences = list(_metric_differences(logged, again))
        compares = (made.dir / "artifacts").is_dir() and finished
        if compares:
            differences += _weight_differences(chosen.dir / "artifacts", made.dir / "artifacts")
        changes = _changes(chosen, host) if differences else ()
        return Replayed(chosen.name, max(again), differences, compares, changes)


def _train_again(
    stage: Stage, trainer: Trainer, config: TrainerConfig, host: plugin_loading.Host
) -> dict[int, Mapping[str, Any]]:
    """Train a stage of a journal as far as it goes; return {updates done: what was logged then}."""
    try:
        execute(trainer, config, stage, host)
    except Stopped:  # after the last update of the replay
        if stop_requested():
            raise
    logged = _by_step(open_run(stage.dir).stages[0]) if any(stage.dir.glob("metrics.jsonl")) else {}
    if not logged:
        raise RunError(f"stage '{stage.name}': no update could be trained again")
    return logged


def _require_whole(rollouts: Sequence[int], journal: Path) -> None:
    """Raise InputError where a rollout is missing between the first one and the last one of a journal."""
    missing = sorted({*range(max(rollouts) + 1)} - {*rollouts})
    if missing:
        raise InputError(
            f"{journal}: rollout {missing[0]} is missing, so that nothing after it can be trained again; "
            'journal = "keep" keeps all'
        )


def _only_trained(config: TrainerConfig) -> TrainerConfig:
    """Leave out of a config what a replay does not do again: evaluations, logs elsewhere, saving."""
    fields = type(config).model_fields
    without = WITHOUT | {name: fields[name].default for name in (*COMPARING, "greater_is_better")}
    changes: dict[str, Any] = {name: value for name, value in without.items() if name in fields}
    return config.replace(**changes)


def report(found: Replayed) -> None:
    """Print what a replay found. Raises RunError where something differs."""
    updates = counted(found.updates, "updates")
    if found.differences:
        lines = "".join(f"\n  {line}" for line in found.differences)
        if found.changes:
            lines += "\nwhat has changed:" + "".join(f"\n  {line}" for line in found.changes)
        raise RunError(f"stage '{found.stage}': {updates} trained again from the journal differ:{lines}")
    what = "every logged metric and the saved weights are" if found.model else "every logged metric is"
    echo(f"stage '{found.stage}': {updates} trained again from the journal: {what} the same, bit for bit")


def _choose(stages: Sequence[StageDirectory], name: str | None, run: Path) -> StageDirectory:
    by_name = {stage.name: stage for stage in stages}
    if name is not None and name not in by_name:
        raise InputError(
            f"--stage {name}: no such stage.{suggest(name, by_name)} Stages: {', '.join(by_name)}"
        )
    journalled = [each for each in stages if each.rollout_numbers and name in (None, each.name)]
    if not journalled:
        which = f"stage '{name}'" if name else f"{run}: no stage"
        raise InputError(f"{which} has a journal: only stages that sample completions have one")
    return journalled[-1]


def _changes(chosen: StageSpec, host: plugin_loading.Host) -> list[str]:
    """Say what is not as it was when the stage ran: data, code and versions, and what was accepted on the way."""
    then = StageRecord(chosen.dir, chosen.name).then
    accepted = [
        f"{each['change']}, accepted after update {each['after_update']}" for each in then.get("accepted", ())
    ]
    return [*accepted, *(str(each) for part in identified(chosen, host.registry).diff(then) for each in part)]


def _by_step(stage: StageDirectory) -> dict[int, Mapping[str, Any]]:
    """Return {updates done: what was logged then}. Raises Damaged where a row has no step."""
    rows = stage.metrics
    if not all(type(row.get("step")) is int for row in rows):
        raise Damaged(stage.dir / "metrics.jsonl", "a row has no step")
    return {row["step"]: row for row in rows}


def _metric_differences(
    before: Mapping[int, Mapping[str, Any]], after: Mapping[int, Mapping[str, Any]]
) -> Iterator[str]:
    """Yield, for each metric that differs, where it does first, and by how much at most."""
    found: dict[str, list[tuple[int, Any, Any]]] = {}
    for step, row in after.items():
        old = before.get(step, {})  # the run may have been stopped before
        for name in sorted(old.keys() | row.keys()) if old else ():
            if any(part in name for part in _OF_MACHINE):
                continue
            if old.get(name) != row.get(name):
                found.setdefault(name, []).append((step, old.get(name), row.get(name)))
    for name, places in found.items():
        step, was, now = places[0]
        yield f"{name}: first at update {step}, {was} then, {now} now{_largest(places)}"


def _largest(places: Sequence[tuple[int, Any, Any]]) -> str:
    gaps = [abs(now - was) for _, was, now in places if isinstance(was, float) and isinstance(now, float)]
    return f"; at most {max(gaps):.2g} apart" if gaps and math.isfinite(max(gaps)) else ""


def _weight_differences(before: Path, after: Path) -> Iterator[str]:
    for path in sorted(before.glob("*/*.safetensors")):
        other = after / path.relative_to(before)
        if not other.is_file() or artifacts.hash_file(path) != artifacts.hash_file(other):
            yield f"{path.parent.name}/{path.name}: other weights"
