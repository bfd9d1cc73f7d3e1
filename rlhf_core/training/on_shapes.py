"""A stage before it begins: its build opens models as shapes, and what it opened describes itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from rlhf_core.config.warnings import config_warnings
from rlhf_core.contracts import Forecast
from rlhf_core.errors import counted
from rlhf_core.fit.progress import require_rest
from rlhf_core.fit.weights import chosen
from rlhf_core.mesh import planned_mesh, rows_per_device
from rlhf_core.models import Head, Model, check_model
from rlhf_core.models.lora import module_paths, resolve
from rlhf_core.models.params import absent_lines, named, paths
from rlhf_core.packing.layout import MICRO_BATCH_TOKENS
from rlhf_core.runtime.machine import format_bytes, platform
from rlhf_core.training.context import Context, Unmade, require_readers
from rlhf_core.training.memory import device_bytes, host_bytes, memory_forecast, saved_bytes
from rlhf_core.training.starting_model import (
    default_warnings,
    error_context,
    model_of_shapes,
    model_source,
)

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh

    from rlhf_core.config import TrainerConfig
    from rlhf_core.data.report import Report
    from rlhf_core.fit import Build
    from rlhf_core.stage import Stage
    from rlhf_core.training.rows import Describes, Description


class NotHereError(Exception):
    """Raised where a build cannot continue, since this machine has no model or tokenizer yet.

    Everything that the data and the config alone show has been counted by then.
    """


class OnShapes(Context):
    """Opens models as shapes, computes nothing, and keeps what sources of updates say of themselves.

    The stage's mesh is of devices that need not exist; without one, rows are not laid out.

    sources: of updates, each with the context that opened it. warnings: lines that begin with a field.
    later: lines that follow the memory. reports: (field, which of its rows are not used as given).
    """

    def __init__(
        self,
        config: TrainerConfig,
        stage: Stage,
        *,
        tokenizer: Any = None,
        unmade: Mapping[str, Unmade] | None = None,
        planned: AbstractMesh | None = None,
    ) -> None:
        """tokenizer: of the stage's model, where it is known and not among the stage's inputs.

        unmade: {path: what is known of an artifact that an earlier stage makes}. planned: devices to count the memory
        of, which need not exist; None: the stage's.
        """
        super().__init__(config, stage, stage.mesh or planned or planned_mesh(1), unmade)
        if tokenizer is not None:
            self.tokenizer = tokenizer
        self.planned = planned
        self.sources: list[tuple[Describes, OnShapes]] = []
        self.warnings: list[str] = []
        self.later: list[str] = []
        self.reports: list[tuple[str, str]] = []
        self._absent = False

    def build(self, build: Callable[[Any, Context], Build]) -> Build | None:
        """Return what a trainer builds; None where this machine has no model or tokenizer yet."""
        try:
            made = build(self.config, self)
        except NotHereError:
            return None
        require_readers(self)
        return made

    def model(self, head: Head) -> Model:
        config, stage = self.config, self.stage
        self.warn(*default_warnings(config, stage))
        if stage.mesh is None:
            source = model_source(config, stage)
            if isinstance(source, str) and Path(source).exists():
                with error_context(stage, "model"):
                    # Devices that need not exist are chosen before weights are fetched.
                    check_model(source, head, registry=self.registry, needs_weights=self.planned is None)
        return self._of_shapes(config.model, head)

    def other_model(self, source: Any, **options: Any) -> Model:
        return self._of_shapes(self.described_by(source), "lm", adapters=False)

    def _of_shapes(self, source: Any, head: Head, *, adapters: bool = True) -> Model:
        model = model_of_shapes(source, head, self, adapters=adapters)
        self._absent = self._absent or model.definition is None
        return model

    def compute(self, function: Callable[..., Any], *args: Any, otherwise: Any = None) -> Any:
        return otherwise

    def check(self, function: Callable[..., Any], *args: Any) -> None:
        found = function(*args)
        if isinstance(found, Forecast):
            self.warn(*found.warnings)
            self.later.extend(found.lines)

    def on_mesh(self, function: Callable[[], Any], *, otherwise: Any = None) -> Any:
        return function() if isinstance(self.mesh, Mesh) else otherwise

    def warn(self, *lines: str, first: bool = False) -> None:
        at = 0 if first else len(self.warnings)
        self.warnings[at:at] = lines

    def say(self, line: str) -> None:
        """Print nothing."""

    def trains_on(self, source: Describes) -> None:
        """Keep a source. Raises NotHereError where the model or its tokenizer is not here."""
        self.sources.append((source, self))
        if self._absent or self.tokenizer is None:
            raise NotHereError

    def not_as_given(self, field: str, report: Report | str) -> None:
        self.reports.append((field, str(report)))


def forecast(build: Callable[[Any, Context], Build], context: OnShapes) -> Forecast:
    """Forecast a stage; no weights are read, and no device is touched.

    Raises InputError with what is wrong with the config, the data, or the files of the model.
    """
    config = context.config
    made = context.build(build)
    models = list(_models(made).values()) if made is not None else []
    first, *others = [source.describe(opener, models) for source, opener in context.sources]
    require_rest(context.name, config.checkpoints.start, first.updates)
    held_out = [f"{field}: {report}" for field, report in context.reports if field != "train_data"]
    lines = [first.lines[0], *held_out, *first.lines[1:]]
    cautions = list(context.warnings)
    memory = Forecast()
    if made is not None:
        for name, model in _models(made).items():
            lines += carried_lines(name, model)
        memory = memory_forecast(held_bytes(made, context, first), config.dtype, context.planned)
        lines += memory.lines
        if context.planned is not None or platform() != "cpu":
            lines += _waiting_lines(made, context)
        cautions += [*memory.warnings, *_absent(made, context)]
    lines += [*first.later, *context.later]
    lines += [f"{other.lines[0]}; an update also takes {other.examples} of these" for other in others]
    cautions += config_warnings(config, first.updates, planned=context.planned is not None)
    told = tuple(f"{field}: {report}" for field, report in context.reports)
    return Forecast(tuple(lines), tuple(cautions), memory.memory, told)


def _models(made: Build) -> Mapping[str, Model]:
    return {"": made.models} if isinstance(made.models, Model) else made.models


def _absent(made: Build, context: OnShapes) -> Iterator[str]:
    """Describe the alternatives of expressions that name no parameter."""
    config = context.config
    models = _models(made)
    for name, each in (made.trains or dict.fromkeys(models, config)).items():
        model = models[name]
        if each.frozen_parameters:
            lost = named(model.params, each.frozen_parameters, model.definition).absent
            yield from (f"frozen_parameters: {line}" for line in absent_lines(lost))
        if each.lora is not None:
            lines = resolve(each.lora.targets, module_paths(model.definition)).absent
            yield from (f"lora.targets: {line}" for line in lines)
    if config.log_weights is not None:
        state, _ = made.state(config, context.stage)
        lines = chosen(state, config.log_weights.pattern, context.name)[1]
        yield from (f"log_weights.pattern: {line}" for line in lines)


def _waiting_lines(made: Build, context: OnShapes) -> Iterator[str]:
    """Say what waits in the host's memory."""
    state, _ = made.state(context.config, context.stage)
    held = {"optimizer": state.opt_state, **made.held}
    sizes = {name: host_bytes(tree) for name, tree in held.items()}
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
    if listed:
        yield f"in the host's memory, for each device: {listed}"


def carried_lines(name: str, model: Model) -> Iterator[str]:
    """Say what the files of a model hold besides the model itself. name: among several models, else empty."""
    if model.kept is None or not model.kept.carried:
        return
    carried = model.kept.carried
    parts = dict.fromkeys(tensor.removeprefix("model.").split(".")[0] for tensor in carried)
    whose = f"{name}: " if name else ""
    kept = "and not saved again"
    if model.definition.lora is None:
        kept = "and saved with the model unchanged"
    size = format_bytes(model.kept.carried_bytes)
    yield f"{whose}{counted(len(carried), 'tensors')} of {', '.join(parts)}, {size}, not loaded, {kept}"


def held_bytes(made: Build, context: OnShapes, described: Description) -> dict[str, int]:
    """Count the bytes that a stage holds, by part: in all, or per device of a mesh that is planned for."""
    config, mesh = context.config, context.mesh
    state, _ = made.state(config, context.stage)
    models = _models(made)
    params = state.params if models is made.models else {"": state.params}
    trains = made.trains or models
    parts = {
        "parameters": sum(device_bytes(params[name]) for name in trains),
        "gradients": device_bytes(state.trained().params),
        "optimizer": device_bytes(state.opt_state),
    }
    # Activations are what the forward pass saves for the backward pass, before the compiler merges any of it: an upper
    # bound. A device holds those of its rows, whole along `tensor`.
    slots = min(MICRO_BATCH_TOKENS, -(-described.tokens // config.gradient_accumulation_steps))
    rows = rows_per_device(mesh, -(-slots // described.longest))
    time = -(-described.longest // mesh.shape["context"])
    parts["activations"] = sum(
        saved_bytes(models[name].definition, (rows, time), config.frozen_parameters) for name in trains
    )
    parts |= {name: device_bytes(tree) for name, tree in made.held.items()}
    if config.log_weights is not None:
        layers = chosen(state, config.log_weights.pattern, context.name)[0]
        copied = [leaf for path, leaf in paths(state.params) if ".".join(path) in layers]
        parts["logged weights"] = device_bytes(copied)
    parts |= {action.name: action.bytes for action in made.actions if action.bytes}
    parts |= {name: device_bytes(params[name]) for name in models if name not in trains}
    policy = models[next(iter(trains))].definition
    source, opener = context.sources[0]
    return parts | dict(source.held(opener, policy, parts["parameters"]))
