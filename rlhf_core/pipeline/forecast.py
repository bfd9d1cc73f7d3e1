"""What the trainers of a planned pipeline say they would do, from the data alone."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import Component
from rlhf_core.contracts import TRAINER, Forecast
from rlhf_core.errors import InputError, RunError, Stopped, disk_full
from rlhf_core.stage import Stage
from rlhf_core.stage.text_settings import day_begun
from rlhf_core.tokenizer import load_tokenizer, settled

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh

    from rlhf_core.config import TrainerConfig
    from rlhf_core.pipeline.plan import Plan, StagePlan
    from rlhf_core.plugins import Host


def previews(
    plan: Plan, host: Host, without: Collection[str] = (), mesh: AbstractMesh | None = None
) -> dict[str, Forecast]:
    """{stage: its trainer's forecast}, without a device, but for the stages `without`.

    mesh: of the devices that memory is told for, each; None: memory in all.

    Raises InputError with every problem that the trainers find, such as malformed rows, and for every `forecast` that
    fails of itself.
    """
    forecasts: dict[str, Forecast] = {}
    problems: list[str] = []
    sources: dict[str, str | None] = {}
    templates: dict[str, str | None] = {}  # what a model is trained with is its own from then on
    day = day_begun(plan.dir)
    for each in plan.stages:
        source = sources[each.name] = _tokenizer_source(each.written.model, sources)
        earlier = each.written.model.partition(".")[0] if isinstance(each.written.model, str) else ""
        inherited = templates.get(earlier)
        templates[each.name] = each.preview.chat_template or inherited
        inputs: dict[str, Any] = {}
        try:
            if source is not None:
                sources[each.name] = None  # until it has loaded: a stage built on this one has nothing to add
                inputs["tokenizer"] = _tokenizer(source, each, inherited)
                sources[each.name] = source
            stage = Stage(
                each.name, each.dir, each.seed, None, True, host.registry, host.hook, inputs, mesh, day
            )
            if each.name in without:
                continue
            forecasts[each.name] = _forecast(each, stage, host)
        except InputError as error:
            prefix = f"stage '{each.name}'"
            problems += [p if p.startswith(prefix) else f"{prefix}: {p}" for p in error.problems]
    if problems:
        raise InputError(*dict.fromkeys(problems))
    return forecasts


def _forecast(planned: StagePlan, stage: Stage, host: Host) -> Forecast:
    """Call the trainer's `forecast`. Raises InputError where it fails of itself, with the plugin and the place."""
    forecast = planned.trainer.forecast
    if forecast is None:
        return Forecast()
    try:
        made = forecast(planned.preview, stage)
        if isinstance(made, Forecast):
            return made
        return Forecast(tuple(line if isinstance(line, str) else str(line) for line in made))
    except (InputError, RunError, Stopped):
        raise
    except Exception as error:
        if disk_full(error):
            raise
        owner = host.registry.owner(TRAINER, planned.trainer_name)
        raise InputError(
            f"stage '{planned.name}'.trainer: '{planned.trainer_name}' (from {owner}) failed to forecast: "
            f"{type(error).__name__}: {' '.join(str(error).split())}{_place(error, forecast)}"
        ) from error


def _place(error: Exception, forecast: Any) -> str:
    """` (FILE line N)`: the innermost line of the package of `forecast`."""
    package = str(getattr(forecast, "__module__", "")).partition(".")[0]
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] == package
    ]
    return " ({} line {})".format(*frames[-1]) if frames else ""


def _tokenizer(source: str, stage: StagePlan, template: str | None) -> Any:
    field = "model.tokenizer" if isinstance(stage.written.model, Mapping) else "model"
    try:
        tokenizer = load_tokenizer(source)
    except InputError as error:
        raise InputError(
            *(f"stage '{stage.name}'.{field}: {problem}" for problem in error.problems)
        ) from None
    return settled(tokenizer, template, None)


def _tokenizer_source(model: Any, earlier: Mapping[str, str | None]) -> str | None:
    """The directory of the tokenizer that a stage's model comes with; None where nothing local says so yet."""
    if isinstance(model, Mapping):
        model = model.get("tokenizer")
    if not isinstance(model, str):
        return None
    stage = model.partition(".")[0]
    if stage in earlier:
        return earlier[stage]
    return model if Path(model).is_dir() else None


def components(config: TrainerConfig) -> list[str]:
    """A line with the components that the file names, field by field; none where it names none."""
    named = []
    for field in config.model_fields_set:
        value = getattr(config, field)
        each = [
            x for x in (value if isinstance(value, list | tuple) else [value]) if isinstance(x, Component)
        ]
        named += [f"{field} {', '.join(Path(x.name).name for x in each)}"] if each else []
    return ["; ".join(sorted(named))] if named else []


def inputs_line(stage: StagePlan) -> str:
    """Name a stage's trainer, model and data in one line."""
    data = _data(stage.written.train_data)
    return f"{stage.trainer_name} from {_model(stage)}{f' on {data}' if data else ''}"


def _model(stage: StagePlan) -> str:
    model = stage.written.model
    if isinstance(model, Mapping):
        shape = ", ".join(f"{k} {v}" for k, v in model.items() if k in ("hidden_size", "num_hidden_layers"))
        return f"a fresh {model.get('model_type', 'model')} ({shape})"
    return "" if model is None else short_path(str(model))


def _data(data: Any) -> str:
    if isinstance(data, list):
        return ", ".join(_data(part) for part in data)
    if isinstance(data, Mapping):
        return short_path(str(data.get("path", data.get("name", ""))))
    return "" if data is None else short_path(str(data))


def short_path(path: str) -> str:
    """A path inside the current directory as the user would type it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
