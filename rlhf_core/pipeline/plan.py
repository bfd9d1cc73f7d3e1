"""Turn a pipeline file into stages ready to run, or report all of its problems together."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import Component, TrainerConfig, build
from rlhf_core.config.build import components
from rlhf_core.config.paths import (
    artifact_kinds,
    is_model_field,
    names_remote_model,
    noted_kinds,
)
from rlhf_core.contracts import REWARD, TRAINER, Trainer
from rlhf_core.errors import UNREADABLE, InputError, collected, exists, suggest
from rlhf_core.hub import Pins
from rlhf_core.models.loading import described
from rlhf_core.pipeline.file import PipelineFile
from rlhf_core.stage.record import recorded_pins
from rlhf_core.stage.spec import StageSpec

if TYPE_CHECKING:
    from rlhf_core.plugins import Host

LANGUAGE_MODEL, REWARD_MODEL = "language_model", "reward_model"


@dataclass(frozen=True)
class Plan:
    """A pipeline without known problems. dir: absolute. mesh: {axis: devices}, -1 for the rest."""

    path: Path | None
    dir: Path
    seed: int
    mesh: Mapping[str, int]
    stages: tuple[StageSpec, ...]


@dataclass
class _Earlier:
    """The stages that are before one in the file.

    outputs: {stage: {output: kind}}, None where the trainer is unknown. specs: those without problems.
    """

    names: Sequence[str]
    outputs: dict[str, Mapping[str, str] | None] = field(default_factory=dict)
    specs: dict[str, StageSpec] = field(default_factory=dict)

    def references(self) -> list[str]:
        return [f"{stage}.{output}" for stage, outputs in self.outputs.items() for output in outputs or ()]

    def source_of(self, model: Any, references: Mapping[str, tuple[str, Path]]) -> Any:
        """Return what describes a stage's model: itself, or what the stage starts from that has yet to make it."""
        if "model" not in references or exists(references["model"][1]):
            return model
        made_by = self.specs.get(references["model"][0].partition(".")[0])
        return model if made_by is None else made_by.preview.model


def plan(file: PipelineFile, host: Host) -> Plan:
    """Check everything that can be checked without a device.

    Raises InputError with every problem of every stage, one line each: unknown trainers, fields, components
    and options, wrong types, missing files, dangling references and references of the wrong kind.
    """
    problems = [*file.problems, *_directory_problems(file.dir)]
    earlier = _Earlier([table["name"] for table in file.stages])
    pins = recorded_pins([file.dir / name for name in earlier.names])
    for table in file.stages:
        spec = _stage(table, file, host, earlier, pins, problems)
        if spec is not None:
            earlier.specs.setdefault(
                spec.name, spec
            )  # of two with one name, already a problem, the first counts
    if problems:
        raise InputError(*_in_order(problems, earlier.names))
    return Plan(file.path, file.dir, file.seed, file.mesh, tuple(earlier.specs.values()))


def with_all_metrics(plan: Plan) -> Plan:
    """Give the console of every stage the option to show all metrics of evaluations."""
    return replace(plan, stages=tuple(_with_all_metrics(stage) for stage in plan.stages))


def _with_all_metrics(stage: StageSpec) -> StageSpec:
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
    table: Mapping[str, Any],
    file: PipelineFile,
    host: Host,
    earlier: _Earlier,
    pins: Pins,
    problems: list[str],
) -> StageSpec | None:
    """Specify a stage of its table; None if it cannot be, with the problems."""
    name, where = table["name"], f"stage '{table['name']}'"
    options = {key: value for key, value in table.items() if key not in ("name", "trainer")}
    trainer: Trainer | None = None
    if table["trainer"]:
        with collected(problems, f"{where}.trainer: "):
            trainer = host.registry.get(TRAINER, table["trainer"])
    written = None
    given = pins.pin(options, where, problems)
    if trainer is not None:
        with collected(problems):
            named = _with_default_names(trainer.config, given)
            written = build(trainer.config, named, where=where, registry=host.registry)
            given = written.to_dict()

    replaced, references = _resolve(given, file.dir, trainer, host, earlier, problems, where)
    earlier.outputs[name] = None if trainer is None else trainer.outputs
    if trainer is None or written is None:
        return None
    config = written.replace(**{key: value for key, value in replaced.items() if value != given[key]})
    source = earlier.source_of(config.model, references)
    with collected(problems, f"{where}.model: "):
        if isinstance(source, str) and source in pins.used.values():
            source = str(described(source))
    return StageSpec(
        name=name,
        dir=file.dir / name,
        run=file.dir,
        trainer_name=table["trainer"],
        trainer=trainer,
        seed=file.seed if config.seed is None else config.seed,
        written=written,
        config=config,
        preview=config if source == config.model else config.replace(model=source),
        references=references,
        pins=pins.used,
    )


def _resolve(
    given: Mapping[str, Any],
    run: Path,
    trainer: Trainer | None,
    host: Host,
    earlier: _Earlier,
    problems: list[str],
    where: str,
) -> tuple[dict[str, Any], dict[str, tuple[str, Path]]]:
    """Replace STAGE.OUTPUT by the path of the artifact; return the fields, and the references by their dotted path."""

    def kinds(dotted: str) -> tuple[str, ...]:
        return () if trainer is None else _kinds(trainer.config, given, host, dotted)

    references: dict[str, tuple[str, Path]] = {}
    replaced = dict(given)
    for dotted, steps, value in _model_fields(given):
        with collected(problems, f"{where}.{dotted}: "):
            reference = _find(value, earlier)
            if reference is not None:
                stage, _, output = reference.partition(".")
                path = run / stage / "artifacts" / output
                references[dotted] = (reference, path)
                replaced = _with_value(replaced, steps, str(path))
            _require_kind(dotted, value, reference, trainer, kinds, earlier)
    return replaced, references


def _kinds(config: type[TrainerConfig], given: Mapping[str, Any], host: Host, dotted: str) -> tuple[str, ...]:
    """Return the kinds of artifact that a field takes, declared by the configuration or by the option's component."""
    for path, kind, owner, component in components(config, given):
        option = dotted.removeprefix(f"{path}.")
        if option != dotted and option not in owner.model_fields:
            field = host.registry.option_field(kind, component["name"], option)
            kinds = () if field is None else noted_kinds(field)
            if kinds:
                return kinds
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


def _model_fields(
    value: Any, dotted: str = "", steps: tuple[str | int, ...] = ()
) -> Iterator[tuple[str, tuple[str | int, ...], str]]:
    """Yield (dotted path, steps, value) of every text that names a model here, as a path or as STAGE.OUTPUT."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not names_remote_model(key, value):
                yield from _model_fields(each, f"{dotted}.{key}".lstrip("."), (*steps, key))
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from _model_fields(each, f"{dotted}[{i}]", (*steps, i))
    elif isinstance(value, str):
        field = next(step for step in reversed(steps) if isinstance(step, str))
        if is_model_field(field):
            yield dotted, steps, value


def _with_value(table: Any, steps: Sequence[str | int], value: Any) -> Any:
    """Copy a table or list with another value at `steps`."""
    if not steps:
        return value
    copied: Any = list(table) if isinstance(table, list) else dict(table)
    copied[steps[0]] = _with_value(table[steps[0]], steps[1:], value)
    return copied


def _find(value: str, earlier: _Earlier) -> str | None:
    """Return a value that is a STAGE.OUTPUT; None for another one, such as a hub name. Raises InputError if neither."""
    stage, dot, output = value.partition(".")
    if Path(value).is_absolute():
        return None
    if value in earlier.references():
        return value
    if "/" in value or not dot or "." in output:
        return None
    if stage in earlier.outputs:
        outputs = earlier.outputs[stage]
        if outputs is None:
            return None  # its unknown trainer is already a problem
        raise InputError(
            f"stage '{stage}' has no output '{output}'.{suggest(output, outputs)} It has: {', '.join(outputs)}"
        )
    if stage in earlier.names:
        raise InputError(
            f"'{value}': stage '{stage}' is not before this one; move it up, stages run in file order"
        )
    known = earlier.references()
    meant = [reference for reference in known if suggest(stage, [reference.partition(".")[0]])]
    raise InputError(
        f"no artifact '{value}' before this stage.{suggest(value, meant)} Available: {', '.join(known) or 'none'}"
    )


def _require_kind(
    dotted: str,
    value: str,
    reference: str | None,
    trainer: Trainer | None,
    kinds: Callable[[str], tuple[str, ...]],
    earlier: _Earlier,
) -> None:
    """Raise InputError for an artifact of a kind that the field at a dotted path does not take."""
    if reference is not None:
        stage, _, output = reference.partition(".")
        kind: str | None = (earlier.outputs[stage] or {})[output]
    elif Path(value).is_absolute():
        kind = _artifact_kind(Path(value))
    else:
        return
    takes = kinds(dotted)
    needs = f"this field needs a {' or a '.join(takes)}"
    if dotted == "model":
        if trainer is None:
            return
        makes = tuple(trainer.outputs.values())
        takes = (LANGUAGE_MODEL, *makes)
        needs = f"a trainer that makes a {' and a '.join(makes)} starts from a {LANGUAGE_MODEL}"
    elif dotted.startswith(f"{REWARD.name}s[") and dotted.endswith(".model") and not takes:
        takes, needs = (REWARD_MODEL,), f"a reward needs a {REWARD_MODEL}"
    if kind is not None and takes and kind not in takes:
        raise InputError(f"{value} is a {kind}; {needs}")


def _artifact_kind(path: Path) -> str | None:
    try:
        manifest = json.loads((path / "rlhf_artifact.json").read_text(encoding="utf-8"))
    except UNREADABLE:
        return (
            None  # a plain Hugging Face directory; a damaged manifest is reported when the artifact is read
        )
    kind = manifest.get("kind") if isinstance(manifest, dict) else None
    return kind if isinstance(kind, str) else None
