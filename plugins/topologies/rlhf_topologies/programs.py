"""Describe the programs of a stage from shapes alone, for devices that need not exist."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from rlhf_core.fit.batches import FIRST_UPDATES
from rlhf_core.mesh import abstract_rows, with_shardings
from rlhf_core.metrics import Mean
from rlhf_core.models import Model
from rlhf_core.models.params import split
from rlhf_core.packing.rows import pack
from rlhf_core.pipeline.forecast import call_trainer, each_stage
from rlhf_core.rollouts import RolloutUpdates
from rlhf_core.rollouts.rollout_rows import full_groups
from rlhf_core.scoring import scoring_layout, scoring_reader
from rlhf_core.training.memory import device_bytes, host_bytes
from rlhf_core.training.starting_model import definition_of
from rlhf_topologies.description import PARAMETERS, Program, StagePrograms
from rlhf_topologies.roofline import token_weights
from rlhf_topologies.sampling import sampling_programs

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.config import TrainerConfig
    from rlhf_core.models import Definition
    from rlhf_core.packing.rows import Packed, Tree
    from rlhf_core.pipeline.plan import Plan
    from rlhf_core.plugins import Host
    from rlhf_core.stage.spec import StageSpec
    from rlhf_core.state import TrainState
    from rlhf_core.step import Objective, Programs
    from rlhf_core.training import Build, Context, OnShapes

NOT_HERE = "not compiled: its model or tokenizer is not on this machine yet"


class ProgramCalls(NamedTuple):
    """How often an update calls a program for micro-batches of one shape."""

    batch: Packed
    """An empty micro-batch."""
    calls: float
    """Per update."""
    tokens: float
    """That a call reads, padding left out."""

    @property
    def shape(self) -> str:
        rows, time = self.batch.rows.tokens.shape
        return f"{rows} × {time}"


def stage_programs(plan: Plan, host: Host, mesh: Mesh) -> dict[str, StagePrograms | None]:
    """Return {stage: its programs on a mesh of devices that need not exist}; None: its trainer has no `build`.

    Raises InputError with every problem that the trainers find.
    """

    def described(planned: StageSpec, context: OnShapes) -> StagePrograms | None:
        build = planned.trainer.build
        if build is None:
            return None
        describe = partial(built_programs, build)
        return call_trainer(planned, host, describe, context, "describe its programs")

    return each_stage(plan, host, described, mesh=mesh)


def built_programs(build: Callable[[Any, Context], Build], context: OnShapes) -> StagePrograms:
    """Describe the programs of what a trainer builds of shapes, on the stage's mesh, whose devices need not exist."""
    config = context.config
    made = context.build(build)
    if made is None:
        return StagePrograms(note=NOT_HERE)
    state, _ = made.state(config, context.stage)
    models: Any = made.models
    model: Model = models
    if not isinstance(models, Model):
        first, *_ = made.trains or models
        model = models[first]
    held = resident(state) | {name: tree for name, tree in made.held.items() if device_bytes(tree)}
    # By name: shapes on GPUs that need not exist do not say that they wait in the host's memory.
    waits: set[str] = {*config.offload}
    if "reference" in config.offload:
        waits.add("starting model")
    away = {name: host_bytes(tree) or device_bytes(tree) for name, tree in held.items() if name in waits}
    held = {name: tree for name, tree in held.items() if name not in waits}
    weights, sampled = token_weights(model.definition), _sampled(made.updates)
    if sampled is None:
        programs = _training_on_data(made, state, config)
        return StagePrograms(tuple(_from_host(programs, away)), held, weights)
    programs = _training_on_rollouts(made, sampled, state, config)
    more, notes = _rollout_programs(sampled, state, held, context)
    brought = _from_host(programs + more, away, 1 / sampled.collector.options.updates_per_rollout)
    return StagePrograms(tuple(brought), held, weights, "; ".join(notes) or None)


def _training_on_data(made: Build, state: TrainState, config: TrainerConfig) -> list[Program]:
    """Describe the programs of updates over data, whose first batches are known."""
    updates: Any = made.updates
    first = (updates.update(step, state).batches for step in range(min(FIRST_UPDATES, updates.total)))
    batches = loads(first, updates.shapes())
    trains = made.programs(state, config, from_zero=several_micro_batches(batches))
    return training_programs(trains, made.objective, state, batches)


def _training_on_rollouts(
    made: Build, sampled: RolloutUpdates, state: TrainState, config: TrainerConfig
) -> list[Program]:
    """Describe updates of rollouts, whose completions are as long as may be, with given examples if there are any."""
    options = sampled.collector.options
    sizes, group, length = sampled.collector.tree_sizes()
    per_update = (
        options.prompts_per_rollout * options.num_generations // _minibatches(sampled, config) // group
    )
    longest = full_groups(sizes[: max(per_update, 1)], group=group, length=length)
    batches = loads([pack(longest, sampled.layout)], sampled.shapes())
    # Updates are not known before the training: the first micro-batch is not added to zeros.
    trains = made.programs(state, config, from_zero=False)
    programs = training_programs(trains, made.objective, state, batches)
    if made.updates is sampled:
        return programs
    given: Any = getattr(made.updates, "given", None)
    first = (given.update(step).batches for step in range(min(FIRST_UPDATES, given.total)))
    extra = training_programs(trains, made.objective, state, loads(first, given.shapes()))
    programs += [replace(each, name=f"{each.name}, given") for each in extra if each.work == "train"]
    return programs


def _from_host(programs: Sequence[Program], away: Mapping[str, int], rollouts: float = 1.0) -> list[Program]:
    """Say what comes from the host's memory: the optimizer's state with every update, a reference with every rollout.

    away: bytes per device that wait there, by name.
    """
    brought = {"optimizer": away.get("optimizer", 0), "reference": rollouts * away.get("reference", 0)}
    calls = {name: sum(each.calls for each in programs if name in each.reads) for name in brought}

    def of(each: Program) -> float:
        return sum(brought[name] / calls[name] for name in brought if name in each.reads and calls[name])

    return [replace(each, host=of(each)) for each in programs]


def _sampled(updates: Any) -> RolloutUpdates | None:
    """Return the rollouts that updates are made of, or a part of them."""
    found = getattr(updates, "sampled", updates)
    return found if isinstance(found, RolloutUpdates) else None


def _minibatches(sampled: RolloutUpdates, config: TrainerConfig) -> int:
    """Count the parts of a rollout, each of which an update trains on."""
    completions = sampled.collector.options.prompts_per_rollout * sampled.collector.options.num_generations
    size = getattr(config, "sampled_per_update", config.total_batch_size)
    return max(completions // size, 1)


def _rollout_programs(
    sampled: RolloutUpdates, state: TrainState, held: dict[str, Any], context: Context
) -> tuple[list[Program], list[str]]:
    """Describe reading, sampling and scoring, and say what is left out; add the reward models to `held`."""
    collector, mesh, options = sampled.collector, context.mesh, sampled.collector.options
    rollouts = 1 / options.updates_per_rollout
    sizes, group, length = collector.tree_sizes()
    prompts = sizes[: options.prompts_per_rollout]
    groups = full_groups(np.repeat(prompts, options.num_generations // group), group=group, length=length)
    programs: list[Program] = []
    notes = []
    for reading in sampled.readings:
        programs += reading_programs(
            reading.reader.lower,
            reading.params(state.params),
            loads([pack(groups, sampled.layout)], reading.reader.shapes()),
            times=rollouts,
            reads=reading.held,
        )
    params = collector.policy(state.params)
    drawn = sampling_programs(collector.sampler, params, options.prompts_per_rollout)
    if drawn is not None:
        programs += [replace(each, calls=each.calls * rollouts) for each in drawn]
    else:
        notes.append("sampling is not compiled: its sampler is not a built-in one")
    for name, reward_model in _reward_models(context).items():
        if reward_model is None:
            notes.append(f"{name} is not compiled: its model is not on this machine yet")
            continue
        params = with_shardings(reward_model.abstract_params(), reward_model.shardings(mesh))
        held[name] = params
        programs += _scoring(name, reward_model, params, groups, rollouts, mesh)
    return programs, notes


def _reward_models(context: Context) -> Mapping[str, Definition | None]:
    """Return {label: definition} of the models that rewards read; None where nothing local describes one.

    One that an earlier stage has yet to train is described by what that stage starts from.
    """
    described: dict[str, Definition | None] = {}
    rewards: Any = getattr(context.config, "rewards", ())
    for reward in rewards:
        model = reward.options.get("model")
        if isinstance(model, str):
            found = definition_of(context.described_by(model), "score", context.tokenizer, context.registry)
            described[f"reward {reward.label or reward.name}"] = None if found is None else found[0]
    return described


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
    reader = scoring_reader(definition, layout, mesh)
    batches = loads([pack(groups, layout)], reader.shapes())
    return reading_programs(
        reader.lower,
        params,
        [load for load in batches if load.calls],
        times=rollouts,
        name=f"score by {name.removeprefix('reward ')}",
        reads=(name,),
    )


def loads(updates: Iterable[Sequence[Packed]], shapes: Sequence[Packed]) -> list[ProgramCalls]:
    """Count how often updates, each a sequence of micro-batches, use each of `shapes`, empty micro-batches."""
    calls: dict[tuple[int, ...], int] = defaultdict(int)
    tokens: dict[tuple[int, ...], int] = defaultdict(int)
    count = 0
    for count, batches in enumerate(updates, 1):  # noqa: B007  (how many there were)
        for batch in batches:
            calls[batch.rows.tokens.shape] += 1
            tokens[batch.rows.tokens.shape] += int(np.count_nonzero(batch.rows.visible_until))
    return [
        ProgramCalls(batch, calls[shape] / max(count, 1), tokens[shape] / max(calls[shape], 1))
        for batch in shapes
        for shape in [batch.rows.tokens.shape]
    ]


def several_micro_batches(batches: Sequence[ProgramCalls]) -> bool:
    """Return whether updates have more than one micro-batch."""
    return sum(load.calls for load in batches) > 1


def training_programs(
    programs: Programs, objective: Objective, state: TrainState, batches: Sequence[ProgramCalls]
) -> list[Program]:
    """Describe `accumulate` for each shape of micro-batches, `apply`, and `count` where there are several losses."""
    several = several_micro_batches(batches)
    described = [
        Program(
            f"accumulate {load.shape}",
            partial(programs.lower, state, load.batch, several),
            "train",
            load.calls,
            load.tokens,
            reads=PARAMETERS,
            rows=load.batch.rows.tokens.shape[0],
        )
        for load in batches
    ]

    def count(batch: Packed) -> Any:
        programs.lower(state, batch, False)  # finds out that there are several
        return programs.lower_count(state, batch)

    rows = abstract_rows(state.step.sharding.mesh, batches[0].batch)
    loss, *_ = jax.eval_shape(objective, state.params, rows)
    if not isinstance(loss, Mean):
        described += [
            # The compiler leaves the parameters out.
            Program(f"count {load.shape}", partial(count, load.batch), "update", load.calls)
            for load in batches
        ]

    def apply() -> Any:
        programs.lower(state, batches[0].batch, False)  # the shapes of its sums
        return programs.lower_apply(state)

    return [*described, Program("apply", apply, "update", reads=("parameters", "optimizer"))]


def reading_programs(
    lower_read: Callable[[Any, Any], Any],
    params: Any,
    batches: Sequence[ProgramCalls],
    *,
    times: float,
    name: str = "read",
    reads: Sequence[str] = PARAMETERS,
) -> list[Program]:
    """Describe a forward pass for each shape of micro-batches, called `times` as often as they say.

    lower_read: lowers a jitted (params, batch). reads: names what `params` are of the stage's residents.
    """
    mesh = jax.tree.leaves(params)[0].sharding.mesh

    def lower(batch: Packed) -> Any:
        return lower_read(params, abstract_rows(mesh, batch))

    return [
        Program(
            f"{name} {load.shape}",
            partial(lower, load.batch),
            "read",
            times * load.calls,
            load.tokens,
            reads=tuple(reads),
            rows=load.batch.rows.tokens.shape[0],
        )
        for load in batches
    ]


def resident(state: TrainState) -> dict[str, Any]:
    """Name what a state holds in memory during its stage."""
    trained, frozen = split(state.params, state.fixed)
    held = {"parameters": trained, "frozen parameters": frozen, "optimizer": state.opt_state}
    return {name: tree for name, tree in held.items() if device_bytes(tree)}
