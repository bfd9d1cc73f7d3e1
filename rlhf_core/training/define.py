"""Define a trainer by its `build`: `rlhf run` fits what it returns, `rlhf check` counts it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeAlias

from jax.sharding import AbstractMesh

from rlhf_core.config import TrainerConfig
from rlhf_core.config.warnings import config_warnings
from rlhf_core.contracts import ATTENTION, Forecast, Trainer
from rlhf_core.errors import InputError, counted
from rlhf_core.fit import Build, fit
from rlhf_core.fit.progress import require_rest
from rlhf_core.fit.weights import chosen
from rlhf_core.mesh import rows_per_device
from rlhf_core.models import Decoder, Model
from rlhf_core.models.experts import expert_count, has_corrections, move_biases
from rlhf_core.models.lora import module_paths, resolve
from rlhf_core.models.params import absent_lines, named, paths
from rlhf_core.objective import with_experts
from rlhf_core.packing.layout import MICRO_BATCH_TOKENS
from rlhf_core.runtime.devices import platform
from rlhf_core.runtime.peak_memory import format_bytes
from rlhf_core.stage import Stage
from rlhf_core.training.context import Context
from rlhf_core.training.expected import Expected, ModelNotHereError
from rlhf_core.training.memory import device_bytes, host_bytes, memory_forecast, saved_bytes

BuildFunction: TypeAlias = Callable[[Any, Context], Build]
"""(config, context) → what is trained, on what, towards what."""


def define_trainer(config: type[TrainerConfig], outputs: Mapping[str, str], build: BuildFunction) -> Trainer:
    """Make the trainer that `build` describes: it runs, is checked, resumes and is compiled by that description.

    config: the class of its options. outputs: {output name: artifact kind}.
    """

    @wraps(build)  # a trainer's code is that of its own `build`
    def built(config: Any, context: Context) -> Build:
        made = _with_experts(build, config, context)
        if "reference" in config.offload and not {"reference", "starting model"} & made.held.keys():
            context.warn("offload: reference has no effect: the stage keeps no copy of the model")
        return made

    return Trainer(config, outputs, partial(run, built), built)


def _with_experts(build: BuildFunction, config: TrainerConfig, context: Context) -> Build:
    """Build a stage, and have it report the load of experts and train their balance."""
    made = build(config, context)
    models: Mapping[str, Model] = {"": made.models} if isinstance(made.models, Model) else made.models
    if context.mesh.shape["context"] > 1:
        _check_cut_rows(config, context, models)
    configs = made.trains or dict.fromkeys(models, config)
    trained = {name: models[name] for name in configs if expert_count(models[name].definition)}
    for name in configs.keys() - trained.keys():
        if configs[name].router_aux_loss_coef:
            context.warn(
                f"router_aux_loss_coef has no effect: the model{f' {name!r}' * bool(name)} has no experts"
            )
    if not trained:
        return made
    size = context.mesh.shape["expert"]
    for model in trained.values():
        if (count := expert_count(model.definition)) % size:
            fits = ", ".join(str(n) for n in range(2, count + 1) if count % n == 0)
            raise InputError(f"mesh.expert: {size} does not divide the model's {count} experts; {fits} do")
    weights = {name: _balance(configs[name], models[name]) for name in trained}
    definitions = {name: model.definition for name, model in trained.items()}
    objective = with_experts(made.objective, definitions, weights)
    rates = {name: configs[name].router_bias_rate for name in trained}
    if not any(rates.values()):
        return replace(made, objective=objective)
    for name, rate in rates.items():
        if rate and not has_corrections(definitions[name]):
            raise InputError(
                f"stage '{context.name}'.router_bias_rate: the model's routers have no correction; leave it out, or "
                "set router_aux_loss_coef"
            )
        if rate and definitions[name].lora is not None:
            raise InputError(
                f"stage '{context.name}'.router_bias_rate: adapters do not hold the routers' correction; leave it out"
            )
    several = not isinstance(made.models, Model)
    return replace(made, objective=objective, adjust=partial(_move_biases, definitions, rates, several))


def _check_cut_rows(config: TrainerConfig, context: Context, models: Mapping[str, Model]) -> None:
    """Raise InputError for a model, or attention, that cannot compute rows that `mesh.context` cuts along time."""
    for model in models.values():
        if not isinstance(model.definition, Decoder):
            raise InputError(
                f"mesh.context: models of type {model.hf_config.get('model_type')!r} compute whole rows; leave it out"
            )
    asked = config.attention
    over = context.registry.get(ATTENTION, asked.name, **asked.options)
    if asked.name != "auto" and "starts" not in inspect.signature(over).parameters:
        raise InputError(
            f"stage '{context.name}'.attention: {asked.name!r} computes whole rows, which mesh.context cuts in time; "
            f'leave it out, or write "{"blocks" if platform() == "cpu" else "pallas"}"'
        )


def _move_biases(
    definitions: Mapping[str, Any], rates: Mapping[str, float], several: bool, params: Any, metrics: Any
) -> Any:
    """Move the routers' corrections by the load of the update."""
    params = {**params}
    for name, definition in definitions.items():
        load = metrics[f"experts/load_max{f'/{name}' if len(definitions) > 1 else ''}"].totals
        if several:
            params[name] = move_biases(definition, params[name], load, rates[name])
        else:
            params = move_biases(definition, params, load, rates[name])
    return params


def _balance(config: TrainerConfig, model: Model) -> float:
    """Return the weight of the loss of the experts' balance."""
    own = {**model.hf_config, **model.hf_config.get("text_config", {})}
    chosen = config.router_aux_loss_coef
    if chosen == "model" or (chosen is None and own.get("output_router_logits")):
        return float(own.get("router_aux_loss_coef", UNNAMED.get(own["model_type"], 0.001)))
    return 0.0 if chosen is None else float(chosen)


UNNAMED = {"glm4_moe": 0.0}
"""The weight of the balance in transformers where config.json does not name it, unless that is 0.001."""


def run(build: BuildFunction, config: TrainerConfig, stage: Stage) -> None:
    """Build a stage on its devices, train, and save its outputs."""
    context = Context(config, stage)
    made = build(config, context)
    require_readers(context)
    fit(stage, config, made)


def require_readers(context: Context) -> None:
    """Raise InputError for metrics of the user's own that the stage has no held-out pairs for."""
    given = [name for name in ("compute_metrics",) if name in context.stage.inputs]
    given += ["metrics"] if context.config.metrics else []
    if given and not context.reads_metrics:
        raise InputError(
            f"stage '{context.name}'.{given[0]}: nothing calls it: it takes the scores of held-out pairs, which "
            f"need {'eval_data' if given[0] == 'metrics' else 'eval_dataset'}, and a trainer of pairs"
        )


def forecast(
    build: BuildFunction, config: TrainerConfig, stage: Stage, planned: AbstractMesh | None = None
) -> Forecast:
    """Forecast a stage; no weights are read, and no device is touched.

    planned: the devices of `rlhf check --devices`, which need not exist.
    Raises InputError with what is wrong with the config, the data, or the files of the model.
    """
    context = Context(config, stage, shapes=True, planned=planned)
    try:
        made = build(config, context)
        require_readers(context)
    except ModelNotHereError:
        made = None
    first, *others = context.expected
    require_rest(context.name, config.checkpoints.start, first.updates)
    lines = ["".join([first.lines[0], *context.notes]), *context.held_out_lines, *first.lines[1:]]
    cautions = list(context.warnings)
    memory = Forecast()
    if made is not None:
        lines += carried_lines(made)
        memory = memory_forecast(held_bytes(made, context, first), config.dtype, planned)
        lines += memory.lines
        if planned is not None or platform() != "cpu":
            lines += _waiting_lines(made, context)
        cautions += [*memory.warnings, *_absent(made, context)]
    lines += first.later
    lines += [f"{other.lines[0]}; an update also takes {other.examples} of these" for other in others]
    cautions += config_warnings(config, first.updates, planned=planned is not None)
    return Forecast(tuple(lines), tuple(cautions), memory.memory, tuple(context.told))


def _absent(made: Build, context: Context) -> Iterator[str]:
    """Describe the alternatives of expressions that name no parameter."""
    config = context.config
    models = {"": made.models} if isinstance(made.models, Model) else made.models
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


def _waiting_lines(made: Build, context: Context) -> Iterator[str]:
    """Say what waits in the host's memory."""
    state, _ = made.state(context.config, context.stage)
    held = {"optimizer": state.opt_state, **made.held}
    sizes = {name: host_bytes(tree) for name, tree in held.items()}
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
    if listed:
        yield f"in the host's memory, for each device: {listed}"


def carried_lines(made: Build) -> Iterator[str]:
    """Say what the files of the models hold besides the models themselves."""
    models = {"": made.models} if isinstance(made.models, Model) else made.models
    for name, model in models.items():
        if model.kept is not None and model.kept.carried:
            parts = dict.fromkeys(
                tensor.removeprefix("model.").split(".")[0] for tensor in model.kept.carried
            )
            tensors, size = (
                counted(len(model.kept.carried), "tensors"),
                format_bytes(model.kept.carried_bytes),
            )
            whose = f"{name}: " if name else ""
            kept = (
                "and saved with the model unchanged"
                if model.definition.lora is None
                else "and not saved again"
            )
            yield f"{whose}{tensors} of {', '.join(parts)}, {size}, not loaded, {kept}"


def held_bytes(made: Build, context: Context, expected: Expected) -> dict[str, int]:
    """Count the bytes that a stage holds, by part: in all, or per device of a mesh that is planned for."""
    config, mesh = context.config, context.mesh
    state, _ = made.state(config, context.stage)
    models: Mapping[str, Model] = {"": made.models} if isinstance(made.models, Model) else made.models
    params = state.params if models is made.models else {"": state.params}
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
    time = -(-expected.longest // mesh.shape["context"])
    parts["activations"] = sum(
        saved_bytes(models[name].definition, (rows, time), config.frozen_parameters) for name in trains
    )
    parts |= {name: device_bytes(tree) for name, tree in made.held.items()}
    if config.log_weights is not None:
        layers = chosen(state, config.log_weights.pattern, context.name)[0]
        copied = [leaf for path, leaf in paths(state.params) if ".".join(path) in layers]
        parts["logged weights"] = device_bytes(copied)
    parts |= {"previews": made.previews.bytes} if made.previews is not None else {}
    parts |= {name: device_bytes(params[name]) for name in models if name not in trains}
    policy = models[next(iter(trains))].definition
    return parts | dict(expected.held(policy, parts["parameters"]))
