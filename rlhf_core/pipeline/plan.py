"""Turn a pipeline file into stages ready to run, or report all of its problems together."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core import hub
from rlhf_core.config import Component, TrainerConfig, build
from rlhf_core.config.build import components
from rlhf_core.config.paths import (
    artifact_kinds,
    is_model_field,
    is_written,
    names_remote_model,
    noted_kinds,
    only_measures,
    split_file_name,
)
from rlhf_core.contracts import REWARD, TRAINER, Trainer
from rlhf_core.errors import UNREADABLE, InputError, collected, exists, suggest
from rlhf_core.models.loading import described
from rlhf_core.pipeline.file import PipelineFile, StageTable
from rlhf_core.stage.record import recorded_pins

if TYPE_CHECKING:
    from rlhf_core.plugins import Host

LANGUAGE_MODEL, REWARD_MODEL = "language_model", "reward_model"


@dataclass(frozen=True)
class Input:
    """A path that a stage reads.

    path: absolute. reference: STAGE.OUTPUT if it is an artifact of an earlier stage, which may not exist yet.
    """

    path: Path
    reference: str | None = None


@dataclass(frozen=True)
class StagePlan:
    """A checked stage.

    config: the trainer's config, with references replaced by the paths of the artifacts.
    written: the config with its references, as the resolved pipeline shows it.
    inputs: {dotted path in the config: Input}. pins: {hf:// name as written: the same with its commit}, of the run.
    preview: `config` for a forecast: a model that this pipeline has yet to train is replaced by the one it starts from,
    which has the same shapes and tokenizer; a model of the hub by the directory of its config.json and tokenizer.
    """

    name: str
    trainer_name: str
    trainer: Trainer
    config: TrainerConfig
    written: TrainerConfig
    preview: TrainerConfig
    inputs: Mapping[str, Input]
    pins: Mapping[str, str]
    dir: Path
    seed: int


@dataclass(frozen=True)
class Plan:
    """A pipeline without known problems. dir: absolute. mesh: {axis: devices}, -1 for the rest."""

    path: Path | None
    dir: Path
    seed: int
    mesh: Mapping[str, int]
    stages: tuple[StagePlan, ...]


@dataclass
class _Known:
    """The outputs of earlier stages: {stage: {output: kind}}, None where the trainer is unknown; commits of the hub."""

    dir: Path
    names: Sequence[str]
    pins: hub.Pins
    outputs: dict[str, Mapping[str, str] | None] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)

    def references(self) -> list[str]:
        return [f"{stage}.{output}" for stage, outputs in self.outputs.items() for output in outputs or ()]


def plan(file: PipelineFile, host: Host) -> Plan:
    """Check everything that can be checked without a device.

    Raises InputError with every problem of every stage, one line each: unknown trainers, fields, components
    and options, wrong types, missing files, dangling references and references of the wrong kind.
    """
    problems = [*file.problems, *_directory_problems(file.dir)]
    names = [table.name for table in file.stages]
    known = _Known(file.dir, names, recorded_pins([file.dir / name for name in names]))
    stages = []
    for table in file.stages:
        stage = _stage(table, file, host, known, problems)
        if stage is not None:
            stages.append(stage)
    if problems:
        raise InputError(*_in_order(problems, known.names))
    return Plan(file.path, file.dir, file.seed, file.mesh, tuple(stages))


def with_all_metrics(plan: Plan) -> Plan:
    """Give the console of every stage the option to show all metrics of evaluations."""
    return replace(plan, stages=tuple(_with_all_metrics(stage) for stage in plan.stages))


def _with_all_metrics(stage: StagePlan) -> StagePlan:
    config = stage.config
    loggers = list(config.logger)
    if all(logger.name != "console" for logger in loggers):
        options = {"progress": config.progress_bar_type, "metrics": config.progress_metrics}
        loggers.append(Component(name="console", **options))
    shown = [each.replace(verbose=True) if each.name == "console" else each for each in loggers]
    return replace(stage, config=config.replace(logger=shown))


def _directory_problems(path: Path) -> list[str]:
    """List what keeps a run from being written at `path`."""
    existing = path
    while not exists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return [f"dir: {existing} is not a directory; give another --dir"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"dir: no permission to write to {existing}; give another --dir"]
    return []


def _in_order(problems: Sequence[str], stages: Sequence[str]) -> list[str]:
    """Sort problems, each once: the pipeline's first, then the stages' in the order of the file."""

    def place(problem: str) -> int:
        return next((i for i, name in enumerate(stages) if problem.startswith(f"stage '{name}'")), -1)

    return sorted(dict.fromkeys(problems), key=place)


def _stage(
    table: StageTable, file: PipelineFile, host: Host, known: _Known, problems: list[str]
) -> StagePlan | None:
    where = f"stage '{table.name}'"
    trainer: Trainer | None = None
    if table.trainer:
        try:
            trainer = host.registry.get(TRAINER, table.trainer)
        except InputError as error:
            problems += [f"{where}.trainer: {problem}" for problem in error.problems]
    outputs = None if trainer is None else dict(trainer.outputs)
    pinned = known.pins.pin(table.options, where, problems)
    written, given = None, dict(pinned)
    if trainer is not None:
        with collected(problems):
            options = _with_default_names(trainer.config, pinned)
            written = build(trainer.config, options, where=where, registry=host.registry)
            given = written.to_dict()

    def kinds(dotted: str) -> tuple[str, ...]:
        return () if trainer is None else _kinds(trainer.config, given, host, dotted)

    fields = _Fields(where, outputs, kinds, known, problems)
    replaced = {key: fields.resolve(key, value, key) for key, value in given.items()}
    known.outputs[table.name] = outputs
    for name in outputs or ():  # of two stages with one name, already a problem, the first counts
        known.models.setdefault(f"{table.name}.{name}", replaced.get("model"))
    if trainer is None or written is None:
        return None
    config = written.replace(**{key: value for key, value in replaced.items() if value != given[key]})
    source = config.model
    while isinstance(source, str) and (made := _made_by(source, known)) is not None:
        source = known.models[made]
    if isinstance(source, str) and source in known.pins.used.values():
        try:
            source = str(described(source))
        except InputError as error:
            problems += [f"{where}.model: {problem}" for problem in error.problems]
    return StagePlan(
        name=table.name,
        trainer_name=table.trainer,
        trainer=trainer,
        config=config,
        written=written,
        preview=config if source == config.model else config.replace(model=source),
        inputs=fields.inputs,
        pins=known.pins.used,
        dir=file.dir / table.name,
        seed=file.seed if config.seed is None else config.seed,
    )


def _kinds(config: type[TrainerConfig], given: Mapping[str, Any], host: Host, dotted: str) -> tuple[str, ...]:
    """Return the kinds of artifact that a field takes, declared by the configuration or by the option's component."""
    for path, kind, owner, component in components(config, given):
        option = dotted.removeprefix(f"{path}.")
        if option != dotted and option not in owner.model_fields:
            field = host.registry.option_field(kind, component["name"], option)
            if field is not None and (noted := noted_kinds(field)):
                return noted
    return artifact_kinds(config, dotted)


def _with_default_names(config: type[TrainerConfig], given: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the default component's name where a table has options only, such as `loss = { epsilon = 0.1 }`."""
    table = dict(given)
    named_flat = {
        path.partition(".")[0]
        for name, path in config.aliases().items()
        if path.endswith(".name") and name in given
    }
    for name, value in given.items():
        default = config.model_fields[name].default if name in config.model_fields else None
        if isinstance(default, Component) and isinstance(value, Mapping) and name not in named_flat:
            table[name] = dict(value) if "name" in value else {**default.to_dict(), **value}
    return table


@dataclass
class _Fields:
    """The fields of one stage, while its references are resolved.

    where: the stage, in messages. outputs: of its trainer; None where that is unknown. kinds: returns the kinds of
    artifact that the field at a dotted path takes; none: any.
    """

    where: str
    outputs: Mapping[str, str] | None
    kinds: Callable[[str], tuple[str, ...]]
    known: _Known
    problems: list[str]
    inputs: dict[str, Input] = field(default_factory=dict)

    def resolve(self, key: str, value: Any, dotted: str, *, inside: bool = False) -> Any:
        """Replace STAGE.OUTPUT in model fields by paths, and add every input to `inputs`."""
        if isinstance(value, Mapping):
            return {
                k: v
                if names_remote_model(k, value)
                else self.resolve(k, v, f"{dotted}.{k}", inside=key != "model")
                for k, v in value.items()
            }
        if isinstance(value, list):
            return [self.resolve(key, v, f"{dotted}[{i}]", inside=True) for i, v in enumerate(value)]
        if not isinstance(value, str):
            return value
        if is_model_field(key):
            return self._model(value, dotted, of_reward=inside and key == "model")
        path = Path((split_file_name(value) or [value])[0])
        read = not is_written(dotted) and not only_measures(dotted)
        if read and path.is_absolute() and exists(path):
            self.inputs[dotted] = Input(path)
        return value

    def _model(self, value: str, dotted: str, *, of_reward: bool) -> str:
        reference, kind, path = None, None, Path(value)
        if not path.is_absolute():
            reference, problem = _find(value, self.known)
            if problem:
                self.problems.append(f"{self.where}.{dotted}: {problem}")
            if reference is None:
                return value
            stage, _, output = value.partition(".")
            kind = (self.known.outputs[stage] or {})[output]
            path = self.known.dir / stage / "artifacts" / output
        elif exists(path):
            kind = _artifact_kind(path)
        else:
            return value
        takes = self.kinds(dotted)
        needs = f"this field needs a {' or a '.join(takes)}"
        if dotted == "model":
            makes = () if self.outputs is None else tuple(self.outputs.values())
            takes = (LANGUAGE_MODEL, *makes) if self.outputs is not None else ()
            needs = f"a trainer that makes a {' and a '.join(makes)} starts from a {LANGUAGE_MODEL}"
        elif of_reward and dotted.startswith(f"{REWARD.name}s[") and not takes:
            takes, needs = (REWARD_MODEL,), f"a reward needs a {REWARD_MODEL}"
        if kind is not None and takes and kind not in takes:
            self.problems.append(f"{self.where}.{dotted}: {value} is a {kind}; {needs}")
        self.inputs[dotted] = Input(path, reference)
        return str(path)


def _find(value: str, known: _Known) -> tuple[str | None, str | None]:
    """Return (the reference, a problem); both None for a value that is no reference, such as a hub name."""
    stage, dot, output = value.partition(".")
    if value in known.references():
        return value, None
    if "/" in value or not dot or "." in output:
        return None, None
    if stage in known.outputs:
        outputs = known.outputs[stage]
        if outputs is None:
            return None, None  # its unknown trainer is already a problem
        return (
            None,
            f"stage '{stage}' has no output '{output}'.{suggest(output, outputs)} It has: {', '.join(outputs)}",
        )
    if stage in known.names:
        return (
            None,
            f"'{value}': stage '{stage}' is not before this one; move it up, stages run in file order",
        )
    available = ", ".join(known.references()) or "none"
    meant = [reference for reference in known.references() if suggest(stage, [reference.partition(".")[0]])]
    return None, f"no artifact '{value}' before this stage.{suggest(value, meant)} Available: {available}"


def _made_by(path: str, known: _Known) -> str | None:
    """Return the STAGE.OUTPUT whose artifact will be written to `path`; None if there is none or it exists."""
    for reference in known.models:
        stage, _, output = reference.partition(".")
        target = known.dir / stage / "artifacts" / output
        if Path(path) == target and not exists(target):
            return reference
    return None


def _artifact_kind(path: Path) -> str | None:
    try:
        manifest = json.loads((path / "rlhf_artifact.json").read_text(encoding="utf-8"))
    except UNREADABLE:
        return (
            None  # a plain Hugging Face directory; a damaged manifest is reported when the artifact is read
        )
    kind = manifest.get("kind") if isinstance(manifest, dict) else None
    return kind if isinstance(kind, str) else None
