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
from rlhf_core.training.context import Unmade
from rlhf_core.training.on_shapes import OnShapes, forecast
from rlhf_core.workers.pool import CORE

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

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
    return each_stage(plan, host, partial(_forecast, host), without=without, planned=mesh)


def each_stage(
    plan: Plan,
    host: Host,
    function: Callable[[StageSpec, OnShapes], T],
    *,
    without: Collection[str] = (),
    mesh: Mesh | None = None,
    planned: AbstractMesh | None = None,
) -> dict[str, T]:
    """Return {stage: what `function` makes of its plan and of what opens it as shapes}, but for those in `without`.

    mesh: devices that need not exist, to lay out rows and programs for. planned: devices to count the memory of.
    Raises InputError with the problems of all stages.
    """
    results: dict[str, T] = {}
    unmade = {
        str(stage.dir / "artifacts" / name): Unmade(stage.preview.model, stage.config.system_prompt)
        for stage in plan.stages
        for name in stage.trainer.outputs
    }
    problems: list[str] = []
    told: set[str] = set()
    tokenizers = _Tokenizers()
    day = day_begun(plan.dir)
    for each in plan.stages:
        name = each.name
        try:
            tokenizer = tokenizers.of(each)
            if name in without:
                continue
            stage = Stage(
                name,
                each.dir,
                each.seed,
                mesh,
                mesh is None,
                host.registry,
                host.hook,
                template_date=day,
            )
            context = OnShapes(each.preview, stage, tokenizer=tokenizer, unmade=unmade, planned=planned)
            results[name] = function(each, context)
        except InputError as error:
            prefix = f"stage '{name}'"
            # What is wrong with a fresh model is told where its table is, not again by the stages that train it on.
            new = [p for p in error.problems if p not in told or tokenizers.earlier(each) is None]
            told.update(p for p in new if p.startswith("model: "))
            problems += [p if p.startswith(prefix) else f"{prefix}{_of_field(p, each)}" for p in new]
    if problems:
        raise InputError(*dict.fromkeys(problems))
    return results


def _of_field(problem: str, planned: StageSpec) -> str:
    """Return what follows a stage's name: the path of a field, or else a problem of the stage as a whole."""
    field = re.match(r"(\w+)[\w.\[\]]*: ", problem)
    return f".{problem}" if field and field[1] in type(planned.config).model_fields else f": {problem}"


def _forecast(host: Host, planned: StageSpec, context: OnShapes) -> Forecast:
    """Forecast a stage by its trainer's `build`; of a trainer without one, nothing but the settings is known."""
    elsewhere = _of_the_hub(planned)
    build = planned.trainer.build
    if build is None:
        return Forecast(elsewhere)
    made = call_trainer(planned, host, partial(forecast, build), context, "forecast")
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
    planned: StageSpec, host: Host, function: Callable[[OnShapes], T], context: OnShapes, what: str
) -> T:
    """Call what uses a trainer's `build`. Raises InputError that names the plugin and the line where it fails itself.

    what: it does, in the error.
    """
    try:
        return function(context)
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


class _Tokenizers:
    """The tokenizers of stages' models, as far as they are here.

    A model keeps its tokenizer, and the template that it was trained with, in the stages that train it on.
    """

    def __init__(self) -> None:
        self._sources: dict[str, str | None] = {}
        self._templates: dict[str, str | None] = {}

    def earlier(self, stage: StageSpec) -> str | None:
        """Return the name of the earlier stage whose output a stage starts from."""
        model = stage.written.model
        name = model.partition(".")[0] if isinstance(model, str) else ""
        return name if name in self._sources and name != stage.name else None

    def of(self, stage: StageSpec) -> Any:
        """Load the tokenizer of a stage's model; None where it is not here. Raises InputError, once for each."""
        earlier = self.earlier(stage)
        model = stage.written.model
        inherited = None if earlier is None else self._templates[earlier]
        self._templates[stage.name] = stage.preview.chat_template or inherited
        source = self._source(model)
        # Until it loads, so that later stages do not repeat the error.
        self._sources[stage.name] = None
        if source is None:
            return None
        field = "model.tokenizer" if isinstance(model, Mapping) else "model"
        try:
            tokenizer = load_tokenizer(source)
        except InputError as error:
            raise InputError(
                *(f"stage '{stage.name}'.{field}: {problem}" for problem in error.problems)
            ) from None
        tokenizer = with_template_and_stop_ids(tokenizer, inherited, None)
        self._sources[stage.name] = source
        return tokenizer

    def _source(self, model: Any) -> str | None:
        """Return the directory or hf:// name of a model's tokenizer; None if it is not known yet."""
        if isinstance(model, Mapping):
            model = model.get("tokenizer")
        if not isinstance(model, str):
            return None
        stage = model.partition(".")[0]
        if stage in self._sources:
            return self._sources[stage]
        return model if is_hub_name(model) or Path(model).is_dir() else None
