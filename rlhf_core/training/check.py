"""Forecast a stage from what its trainer builds of shapes: examples, updates, tokens, memory, warnings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlhf_core.config.warnings import config_warnings
from rlhf_core.contracts import Forecast
from rlhf_core.mesh import rows_per_device
from rlhf_core.models import Model
from rlhf_core.packing.layout import MICRO_BATCH_TOKENS
from rlhf_core.training.context import Context, Expected, ModelNotHereError
from rlhf_core.training.memory import device_bytes, memory_forecast, saved_bytes

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.stage import Stage
    from rlhf_core.training.build import Build


def forecast(build: Callable[[Any, Context], Build], config: TrainerConfig, stage: Stage) -> Forecast:
    """Forecast a stage; no weights are read, and no device is touched.

    Raises InputError with what is wrong with the config, the data, or the files of the model.
    """
    context = Context(config, stage, shapes=True)
    try:
        made = build(config, context)
    except ModelNotHereError:
        made = None
    first, *others = context.expected
    lines = ["".join([first.lines[0], *context.notes]), *first.lines[1:]]
    cautions = list(context.warnings)
    if made is not None:
        memory = memory_forecast(held_bytes(made, context, first), config.dtype, stage.planned_mesh)
        lines += memory.lines
        cautions += memory.warnings
    lines += first.later
    lines += [f"{other.lines[0]}; an update also has {other.examples} of these" for other in others]
    return Forecast(tuple(lines), (*cautions, *config_warnings(config, first.updates)))


def held_bytes(made: Build, context: Context, expected: Expected) -> dict[str, int]:
    """Count the bytes that a stage holds, by part: in all, or per device of a mesh that is planned for."""
    config, mesh = context.config, context.mesh
    state, _ = made.state(config, context.stage)
    several = not isinstance(made.models, Model)
    models: Mapping[str, Model] = made.models if several else {"": made.models}  # type: ignore[assignment,dict-item]
    params = state.params if several else {"": state.params}
    trains = made.trains or models
    parts = {
        "parameters": sum(device_bytes(params[name]) for name in trains),
        "gradients": device_bytes(state.trained().params),
        "optimizer": device_bytes(state.opt_state),
    }
    # Activations are what the forward pass saves for the backward pass, before the compiler merges any of it: an upper
    # bound. A device holds those of its rows, whole along `tensor`.
    slots = min(MICRO_BATCH_TOKENS, -(-expected.tokens // config.gradient_accumulation_steps))
    rows = rows_per_device(mesh, -(-slots // expected.longest))
    parts["activations"] = sum(
        saved_bytes(models[name].definition, (rows, expected.longest), config.frozen_parameters)
        for name in trains
    )
    parts |= {name: device_bytes(tree) for name, tree in made.held.items()}
    parts |= {name: device_bytes(params[name]) for name in models if name not in trains}
    policy = models[next(iter(trains))].definition
    return parts | dict(expected.held(policy, parts["parameters"]))
