"""Define a trainer by its `build`: `rlhf run` fits what it returns, `rlhf check` counts it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeAlias

from rlhf_core.config import TrainerConfig
from rlhf_core.contracts import ACTION, ATTENTION, Trainer
from rlhf_core.errors import InputError
from rlhf_core.fit import PREVIEWS, Build, fit
from rlhf_core.models import Decoder, Model
from rlhf_core.models.experts import expert_count, has_corrections, move_biases
from rlhf_core.objective import with_experts
from rlhf_core.runtime.machine import platform
from rlhf_core.stage import Stage
from rlhf_core.training.context import Context, OnDevices, require_readers

BuildFunction: TypeAlias = Callable[[Any, Context], Build]
"""(config, context) → what is trained, on what, towards what."""


def define_trainer(config: type[TrainerConfig], outputs: Mapping[str, str], build: BuildFunction) -> Trainer:
    """Make the trainer that `build` describes: it runs, is checked, resumes and is compiled by that description.

    config: the class of its options. outputs: {output name: artifact kind}.
    """

    @wraps(build)  # a trainer's code is that of its own `build`
    def built(config: Any, context: Context) -> Build:
        made = _with_previews(_with_experts(build, config, context), config, context)
        if "reference" in config.offload and not {"reference", "starting model"} & made.held.keys():
            context.warn("offload: reference has no effect: the stage keeps no copy of the model")
        return made

    return Trainer(config, outputs, partial(run, built), built)


def _with_previews(made: Build, config: TrainerConfig, context: Context) -> Build:
    """Add the action that completes the prompts of `previews`, where a language model is trained."""
    if config.previews is None:
        return made
    action = context.registry.get(ACTION, PREVIEWS)(context, made)
    return made if action is None else replace(made, actions=(*made.actions, action))


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
    _require_even_experts(context, trained)
    weights = {name: _balance(configs[name], models[name]) for name in trained}
    definitions = {name: model.definition for name, model in trained.items()}
    made = replace(made, objective=with_experts(made.objective, definitions, weights))
    rates = {name: configs[name].router_bias_rate for name in trained}
    if not any(rates.values()):
        return made
    _require_corrections(context, definitions, rates)
    several = not isinstance(made.models, Model)
    return replace(made, adjust=partial(_move_biases, definitions, rates, several))


def _require_even_experts(context: Context, models: Mapping[str, Model]) -> None:
    """Raise InputError where the devices along `mesh.expert` would hold unequal numbers of experts."""
    size = context.mesh.shape["expert"]
    for model in models.values():
        count = expert_count(model.definition)
        if count % size:
            fits = ", ".join(str(n) for n in range(2, count + 1) if count % n == 0)
            raise InputError(f"mesh.expert: {size} does not divide the model's {count} experts; {fits} do")


def _require_corrections(
    context: Context, definitions: Mapping[str, Any], rates: Mapping[str, float]
) -> None:
    """Raise InputError where `router_bias_rate` moves a correction that a model's routers or adapters do not have."""
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
    context = OnDevices(config, stage)
    made = build(config, context)
    require_readers(context)
    fit(stage, config, made)
