"""Describe the programs of a stage that samples, from its prompts and the shapes of its models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core import data
from rlhf_core.contracts import PARAMETERS, Program, StagePrograms
from rlhf_core.fit.batches import empty_batches
from rlhf_core.fit.token_reader import TokenReader
from rlhf_core.packing.rows import pack
from rlhf_core.rollouts.layout import full_groups, group_layout, longest_groups, tree_sizes
from rlhf_core.scoring import scoring_function, scoring_layout
from rlhf_core.training.attention import choose_attention
from rlhf_core.training.memory import definition_of, frozen_definitions, sampling_memory
from rlhf_core.training.open import open_episode_rows, open_prompts, open_sampler
from rlhf_core.training.programs import (
    NOT_HERE,
    loads,
    planned_model,
    planned_params,
    planned_state,
    reading_programs,
    resident,
    token_weights,
    training_programs,
)

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.config import Component, TrainerConfig
    from rlhf_core.data import EpisodeRows, Prompts
    from rlhf_core.environments import EnvironmentOptions
    from rlhf_core.models import Definition
    from rlhf_core.packing.rows import Tree
    from rlhf_core.rewards.reward import WeightedReward
    from rlhf_core.sampling import SamplingOptions
    from rlhf_core.stage import Stage
    from rlhf_core.step import Objective


def rollout_programs(
    config: TrainerConfig,
    stage: Stage,
    *,
    objective: Callable[[Any], Objective],
    token_names: Sequence[str] = (),
    sequence_names: Sequence[str] = (),
    rewards: Sequence[WeightedReward] | None,
    max_prompt_length: int,
    num_generations: int,
    sampling: SamplingOptions,
    sampler: Component | None = None,
    updates_per_rollout: int = 1,
    minibatches: int = 1,
    copies: Sequence[str] = (),
    reader: Callable[[Definition], Any] | None = None,
    policies: Sequence[str] = (),
    environment: EnvironmentOptions | None = None,
    frozen_models: Mapping[str, Any] = {},
) -> StagePrograms:
    """Describe the programs of a trainer that samples, with completions of full length; its `programs` calls it.

    objective: makes the objective for a model; its micro-batches carry the values `token_names` and `sequence_names`.
    copies: names of copies of the trained parameters, such as "reference". reader: makes the function of a
    `TokenReader` for a model, which reads every rollout; its params are {name: parameters}, of "policy" and `copies`.
    policies: those of them that it uses. environment: of the stage's episodes, if any. frozen_models: as for
    `rlhf_core.training.dataset_programs`. The rest: see
    `forecast_rollouts` and `open_collector`.
    """
    model = planned_model(config, stage, "lm")
    frozen = {name: each for name, each in frozen_definitions(frozen_models, config, stage).items() if each}
    if model is None or len(frozen) < len(frozen_models):
        return StagePrograms(note=NOT_HERE)
    rewards = rewards or ()
    prompts: Prompts | EpisodeRows | None
    if environment is None:
        prompts = open_prompts(
            config, stage, model.tokenizer, "train_data", max_prompt_length=max_prompt_length
        )
    else:
        prompts = open_episode_rows(config, stage, "train_data", max_prompt_length=max_prompt_length)
    assert prompts is not None
    mesh, width = stage.devices(), model.definition.hidden_size
    sizes, members, length = tree_sizes(prompts.sizes, num_generations, sampling, environment)
    group = {"group": members, "length": length}
    layout = group_layout(config, sizes, width, mesh, **group)
    longest = longest_groups(config, sizes, **group)
    model = choose_attention(model, config, stage, longest, layout)
    shapes = empty_batches(layout, token_names=token_names, sequence_names=sequence_names)
    batches = loads([pack(longest, layout)], shapes)
    per_rollout = config.total_batch_size * minibatches // num_generations
    total = config.max_training_steps or updates_per_rollout * data.count_updates(
        len(prompts), per_rollout, config.num_train_epochs, None
    )
    state, definitions = planned_state(model, frozen, config, stage, total)
    programs = training_programs(objective(definitions), model.definition, state, batches, known=False)
    params = state.params["policy"] if frozen else state.params
    held = resident(state)
    held |= dict.fromkeys(copies, state.trained().params)
    rollouts = 1 / updates_per_rollout
    groups = full_groups(np.repeat(sizes[:per_rollout], num_generations // members), **group)
    if reader is not None and policies:
        read = TokenReader(reader(model.definition), layout, mesh)
        programs += reading_programs(
            read.lower,
            model.definition,
            dict.fromkeys(("policy", *copies), params),
            loads([pack(groups, layout)], read.shapes()),
            times=rollouts,
            # Copies share the frozen parameters.
            reads=[
                part
                for name in policies
                for part in (name if name in copies else PARAMETERS[0], PARAMETERS[1])
            ],
        )
    draws = open_sampler(
        stage,
        model,
        prompts,
        sampling,
        num_generations=num_generations,
        prompts_per_call=per_rollout,
        sampler=sampler,
        memory=sampling_memory(
            config, stage, model, [*_reward_sources(rewards, stage).values(), *frozen_models.values()]
        ),
        conversation_length=None
        if environment is None
        else environment.length(sampling.max_completion_length),
    )
    notes = []
    if hasattr(draws, "programs"):
        programs += [
            replace(each, calls=each.calls * rollouts) for each in draws.programs(params, per_rollout)
        ]
    else:
        notes.append("sampling is not compiled: its sampler does not describe its programs")
    for name, definition in _reward_models(rewards, stage, model.tokenizer).items():
        if definition is None:
            notes.append(f"{name} is not compiled: its model is not on this machine yet")
            continue
        params = planned_params(definition, mesh)
        held[name] = params
        programs += _scoring(name, definition, params, groups, rollouts, mesh)
    note = "; ".join(notes) or None
    return StagePrograms(tuple(programs), held, token_weights(model.definition), note)


def _reward_models(
    rewards: Sequence[WeightedReward], stage: Stage, tokenizer: Any
) -> Mapping[str, Definition | None]:
    """Return {label: definition} of the models that rewards read; None where nothing local describes one."""
    described: dict[str, Definition | None] = {}
    for label, source in _reward_sources(rewards, stage).items():
        found = definition_of(source, "score", tokenizer, stage.registry)
        described[label] = None if found is None else found[0]
    return described


def _reward_sources(rewards: Sequence[WeightedReward], stage: Stage) -> dict[str, Any]:
    """Return {label: model} of the models that rewards read.

    One that an earlier stage has yet to train is described by what that stage starts from.
    """
    sources = stage.inputs.get("sources", {})
    named = {f"reward {reward.label or reward.name}": reward.options.get("model") for reward in rewards}
    return {label: sources.get(model, model) for label, model in named.items() if isinstance(model, str)}


def _scoring(
    name: str,
    definition: Definition,
    params: Any,
    groups: Sequence[Tree],
    rollouts: float,
    mesh: Mesh,
) -> list[Program]:
    """Describe the scoring of a rollout's groups."""
    branches = len(groups[0].branches)
    longest = max(len(tree.prefix) + max(map(len, tree.branches)) for tree in groups)
    layout = scoring_layout(definition, mesh, [tree.size for tree in groups], branches, longest=longest)
    batches = loads([pack(groups, layout)], empty_batches(layout, sequence_names=("place",)))
    return reading_programs(
        scoring_function(definition, mesh).lower,
        definition,
        params,
        [load for load in batches if load.calls],
        times=rollouts,
        name=f"score by {name.removeprefix('reward ')}",
        reads=(name,),
    )
