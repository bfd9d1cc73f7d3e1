"""Forecast what each stage of a pipeline would do, from its data alone, without a device."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_core.contracts import TRAINER, Forecast
from rlhf_core.errors import InputError, RunError, Stopped, disk_full, error_line, suggest_file
from rlhf_core.hub import is_hub_name
from rlhf_core.stage import Stage
from rlhf_core.stage.text_settings import day_begun
from rlhf_core.tokenizer import load_tokenizer, with_template_and_stop_ids
from rlhf_core.training.define import forecast
from rlhf_core.workers.pool import CORE

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from rlhf_core.config import TrainerConfig
    from rlhf_core.pipeline.plan import Plan
    from rlhf_core.plugins import Host
    from rlhf_core.stage.spec import StageSpec

T = TypeVar("T")


def stage_forecasts(
    plan: Plan, host: Host, without: Collection[str] = (), mesh: AbstractMesh | None = None
) -> dict[str, Forecast]:
    """Return {stage: its trainer's forecast}, except for the stages in `without`.

    mesh: the devices to forecast memory for, per device; None: memory in total.

    Raises InputError with every problem that the trainers find, such as malformed rows, and for every trainer whose
    `forecast` itself fails.
    """
    return each_stage(plan, host, partial(_forecast, host=host, mesh=mesh), without=without)


def each_stage(
    plan: Plan,
    host: Host,
    function: Callable[[StageSpec, Stage], T],
    *,
    without: Collection[str] = (),
    mesh: Mesh | None = None,
) -> dict[str, T]:
    """Return {stage: what `function` makes of its plan and a `Stage` that is only checked}, but for those in `without`.

    Raises InputError with the problems of all stages.
    """
    results: dict[str, T] = {}
    made = {
        str(planned.dir / "artifacts" / name): planned
        for planned in plan.stages
        for name in planned.trainer.outputs
    }
    of_stages = {
        "sources": {path: planned.preview.model for path, planned in made.items()},
        "system_prompts": {path: planned.config.system_prompt for path, planned in made.items()},
    }
    problems: list[str] = []
    told: set[str] = set()
    sources: dict[str, str | None] = {}
    templates: dict[str, str | None] = {}  # a model keeps the template that it was trained with
    day = day_begun(plan.dir)
    for planned in plan.stages:
        name = planned.name
        source = sources[name] = _tokenizer_source(planned.written.model, sources)
        earlier = planned.written.model.partition(".")[0] if isinstance(planned.written.model, str) else ""
        inherited = templates.get(earlier)
        templates[name] = planned.preview.chat_template or inherited
        inputs: dict[str, Any] = {**of_stages}
        try:
            if source is not None:
                sources[name] = None  # until it loads, so that later stages do not repeat the error
                inputs["tokenizer"] = _tokenizer(source, planned, inherited)
                sources[name] = source
            stage = Stage(
                name,
                planned.dir,
                planned.seed,
                mesh,
                mesh is None,
                host.registry,
                host.hook,
                inputs,
                template_date=day,
            )
            if name in without:
                continue
            results[name] = function(planned, stage)
        except InputError as error:
            prefix = f"stage '{name}'"
            # What is wrong with a fresh model is told where its table is, not again by the stages that train it on.
            new = [p for p in error.problems if p not in told or earlier not in sources]
            told.update(p for p in new if p.startswith("model: "))
            problems += [p if p.startswith(prefix) else f"{prefix}{_of_field(p, planned)}" for p in new]
    if problems:
        raise InputError(*dict.fromkeys(problems))
    return results


def _of_field(problem: str, planned: StageSpec) -> str:
    """Return what follows a stage's name: the path of a field, or else a problem of the stage as a whole."""
    field = re.match(r"(\w+)[\w.\[\]]*: ", problem)
    return f".{problem}" if field and field[1] in type(planned.config).model_fields else f": {problem}"


def _forecast(planned: StageSpec, stage: Stage, host: Host, mesh: AbstractMesh | None) -> Forecast:
    """Forecast a stage by its trainer's `build`; of a trainer without one, nothing but the settings is known."""
    elsewhere, build = _of_the_hub(planned), planned.trainer.build
    if build is None:
        return Forecast(elsewhere)
    made = call_trainer(planned, host, partial(forecast, build, planned=mesh), stage, "forecast")
    return replace(made, lines=(*made.lines, *elsewhere))


def _of_the_hub(planned: StageSpec) -> tuple[str, ...]:
    """Say that a model or tokenizer was not looked at, as only the hub can have it."""
    model = planned.preview.model
    field = "model.tokenizer" if isinstance(model, Mapping) else "model"
    name = model.get("tokenizer") if isinstance(model, Mapping) else model
    by_earlier_stage = model != planned.written.model
    if by_earlier_stage or not isinstance(name, str) or is_hub_name(name) or Path(name).expanduser().is_dir():
        return ()
    hint = suggest_file(Path(name)) if Path(name).parent.is_dir() else ""
    return (
        f"{field} '{name}' is not a directory here: the stage looks it up on the hub when it begins.{hint}",
    )


def call_trainer(
    planned: StageSpec, host: Host, function: Callable[[TrainerConfig, Stage], T], stage: Stage, what: str
) -> T:
    """Call what uses a trainer's `build`. Raises InputError that names the plugin and the line where it fails itself.

    what: it does, in the error.
    """
    try:
        return function(planned.preview, stage)
    except (InputError, RunError, Stopped):
        raise
    except Exception as error:
        if disk_full(error):
            raise
        owner = host.registry.owner(TRAINER, planned.trainer_name)
        raise InputError(
            f"stage '{planned.name}'.trainer: '{planned.trainer_name}' (from {owner}) failed to {what}: "
            f"it {error_line(error, CORE)}"
        ) from error


def _tokenizer(source: str, stage: StageSpec, template: str | None) -> Any:
    field = "model.tokenizer" if isinstance(stage.written.model, Mapping) else "model"
    try:
        tokenizer = load_tokenizer(source)
    except InputError as error:
        raise InputError(
            *(f"stage '{stage.name}'.{field}: {problem}" for problem in error.problems)
        ) from None
    return with_template_and_stop_ids(tokenizer, template, None)


def _tokenizer_source(model: Any, earlier: Mapping[str, str | None]) -> str | None:
    """Return the directory or hf:// name of the tokenizer of a stage's model; None if it is not known yet."""
    if isinstance(model, Mapping):
        model = model.get("tokenizer")
    if not isinstance(model, str):
        return None
    stage = model.partition(".")[0]
    if stage in earlier:
        return earlier[stage]
    return model if is_hub_name(model) or Path(model).is_dir() else None
