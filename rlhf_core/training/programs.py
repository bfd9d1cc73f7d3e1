"""Describe the programs of a stage from shapes alone, for devices that need not exist."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from rlhf_core import optimizers
from rlhf_core.contracts import PARAMETERS, Program, ProgramShape, StagePrograms
from rlhf_core.fit.batches import FIRST_UPDATES, empty_batches
from rlhf_core.fit.sequence_values import BRANCH
from rlhf_core.mesh import abstract_rows, replicated_sharding, with_shardings
from rlhf_core.metrics import Mean
from rlhf_core.models import Model
from rlhf_core.models.lora import linear_modules
from rlhf_core.models.params import paths, split
from rlhf_core.state import create_state
from rlhf_core.step import Programs
from rlhf_core.training.context import Context, ModelNotHereError
from rlhf_core.training.memory import definition_of, frozen_definitions
from rlhf_core.training.open import asked_lora
from rlhf_core.training.updates import dataset_updates

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.models import Definition, Head
    from rlhf_core.packing.rows import Packed
    from rlhf_core.packing.trees import Trees
    from rlhf_core.stage import Stage
    from rlhf_core.state import TrainState
    from rlhf_core.step import Objective
    from rlhf_core.training.build import Build

NOT_HERE = "not compiled: its model or tokenizer is not on this machine yet"


class Load(NamedTuple):
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

    def with_model(self, definition: Definition) -> ProgramShape:
        return ProgramShape(definition, *self.batch.rows.tokens.shape)


def planned_model(config: TrainerConfig, stage: Stage, head: Head) -> Model | None:
    """Make the model of a stage with shapes in place of its parameters, sharded over the stage's mesh.

    Returns None where nothing local describes the model or its tokenizer.
    """
    tokenizer = stage.inputs.get("tokenizer")
    described = definition_of(
        config.model, head, tokenizer, stage.registry, dtype=config.dtype, remat=config.remat
    )
    if described is None or tokenizer is None:
        return None
    definition, hf_config = described
    if config.lora is not None:
        definition = definition.with_lora(
            asked_lora(config.lora, linear_modules(definition.abstract_params()))
        )
    mesh = stage.devices()
    return Model(definition, planned_params(definition, mesh), tokenizer, hf_config, None, mesh)


def built_programs(
    build: Callable[[Any, Context], Build], config: TrainerConfig, stage: Stage
) -> StagePrograms:
    """Describe the programs of what a trainer builds of shapes, on the stage's mesh, whose devices need not exist."""
    context = Context(config, stage, shapes=True)
    try:
        made = build(config, context)
    except ModelNotHereError:
        return StagePrograms(note=NOT_HERE)
    state, _ = made.state(config, stage)
    model = (
        made.models if isinstance(made.models, Model) else made.models[next(iter(made.trains or made.models))]
    )
    updates = made.updates
    first = (updates.update(step, state).batches for step in range(min(FIRST_UPDATES, updates.total)))
    batches = loads(first, updates.shapes())
    programs = training_programs(made.objective, model.definition, state, batches)
    return StagePrograms(tuple(programs), resident(state), token_weights(model.definition))


def planned_params(definition: Definition, mesh: Any) -> Any:
    """Describe a model's parameters as they lie on a mesh."""
    return with_shardings(definition.abstract_params(), definition.shardings(mesh))


def planned_state(
    model: Model, frozen_models: Mapping[str, Definition], config: TrainerConfig, stage: Stage, total: int
) -> tuple[TrainState, Definition | dict[str, Definition]]:
    """Describe the state of a stage of `total` updates; return it with what its objective is made for.

    With frozen models that is {"policy": the definition of `model`, name: definition}, and the state's parameters are
    named alike; else it is the model's definition alone.
    """
    tx, _ = optimizers.make_optimizer(config, stage.registry, total)
    patterns = config.frozen_parameters
    if not frozen_models:
        return create_state(model, tx, seed=stage.seed, frozen=patterns), model.definition
    mesh = stage.devices()
    models = {"policy": model}
    for name, each in frozen_models.items():
        models[name] = replace(model, definition=each, params=planned_params(each, mesh))
    frozen = {**({"policy": patterns} if patterns else {}), **dict.fromkeys(frozen_models, ".*")}
    state = create_state(models, {"policy": tx}, seed=stage.seed, frozen=frozen)
    return state, {name: each.definition for name, each in models.items()}


def loads(updates: Iterable[Sequence[Packed]], shapes: Sequence[Packed]) -> list[Load]:
    """Count how often updates, each a sequence of micro-batches, use each of `shapes`, empty micro-batches."""
    calls: dict[tuple[int, ...], int] = defaultdict(int)
    tokens: dict[tuple[int, ...], int] = defaultdict(int)
    count = 0
    for count, batches in enumerate(updates, 1):  # noqa: B007  (how many there were)
        for batch in batches:
            calls[batch.rows.tokens.shape] += 1
            tokens[batch.rows.tokens.shape] += int(np.count_nonzero(batch.rows.visible_until))
    return [
        Load(batch, calls[shape] / max(count, 1), tokens[shape] / max(calls[shape], 1))
        for batch in shapes
        for shape in [batch.rows.tokens.shape]
    ]


def training_programs(
    objective: Objective,
    definition: Definition,
    state: TrainState,
    batches: Sequence[Load],
    *,
    known: bool = True,
) -> list[Program]:
    """Describe `accumulate` for each shape of micro-batches, `apply`, and `count` where there are several losses.

    definition: of the model that the objective computes with. known: whether updates are known before training, so that
    an update of several micro-batches begins from zeros.
    """
    several = sum(load.calls for load in batches) > 1
    programs = Programs(objective, state, from_zero=several and known)
    described = [
        Program(
            f"accumulate {load.shape}",
            partial(programs.lower, state, load.batch, several),
            "train",
            load.calls,
            load.tokens,
            reads=PARAMETERS,
            shape=load.with_model(definition),
        )
        for load in batches
    ]

    def count(batch: Packed) -> Any:
        programs.lower(state, batch, False)  # finds out that there are several
        return programs.lower_count(state, batch)

    rows = abstract_rows(state.step.sharding.mesh, batches[0].batch)
    loss, _ = jax.eval_shape(objective, state.params, rows)
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


def dataset_programs(
    config: TrainerConfig,
    stage: Stage,
    *,
    head: Head,
    open_data: Callable[..., Any],
    objective: Callable[[Any], Objective],
    reads_tokens: bool,
    trees: Callable[[Any], Trees] | None = None,
    sequence_names: Sequence[str] = (),
    group: int = 1,
    reader: Callable[[Definition], Any] | None = None,
    frozen_models: Mapping[str, Any] = {},
) -> StagePrograms:
    """Describe the programs of a trainer on a fixed dataset; a `Trainer`'s `programs` calls it.

    open_data: as in `forecast_lines`. objective: makes the objective for a model. trees: makes the trees of what
    open_data returned; default: its `trees()`. reader: makes the function of `per_sequence` for a model, with which
    every training row is read once before the first update. frozen_models: {name: directory, hub name or table} of
    models that the objective reads beside the one that is trained: it is then made for {name: definition}, and its
    parameters are named alike, those that are trained "policy". The rest: see `dataset_updates`.
    """
    model = planned_model(config, stage, head)
    frozen = {name: each for name, each in frozen_definitions(frozen_models, config, stage).items() if each}
    if model is None or len(frozen) < len(frozen_models):
        return StagePrograms(note=NOT_HERE)
    rows = open_data(config, stage, model.tokenizer, "train_data")
    model, updates = dataset_updates(
        model,
        config,
        stage,
        rows,
        rows.trees() if trees is None else trees(rows),
        reads_tokens=reads_tokens,
        sequence_names=sequence_names,
        group=group,
    )
    state, definitions = planned_state(model, frozen, config, stage, updates.total)
    first = (updates.update(step).batches for step in range(min(FIRST_UPDATES, updates.total)))
    batches = loads(first, updates.shapes())
    programs = training_programs(objective(definitions), model.definition, state, batches)
    if reader is not None:
        read = jax.jit(reader(model.definition), out_shardings=replicated_sharding(stage.devices()))
        numbered = loads((), empty_batches(updates.layout, sequence_names=(BRANCH,)))
        programs += reading_programs(read.lower, model.definition, state.params, numbered, times=0.0)
    return StagePrograms(tuple(programs), resident(state), token_weights(model.definition))


def reading_programs(
    lower_read: Callable[[Any, Any], Any],
    definition: Definition,
    params: Any,
    batches: Sequence[Load],
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
            shape=load.with_model(definition),
        )
        for load in batches
    ]


def resident(state: TrainState) -> dict[str, Any]:
    """Name what a state holds in memory during its stage."""
    trained, frozen = split(state.params, state.fixed)
    held = {"parameters": trained, "frozen parameters": frozen, "optimizer": state.opt_state}
    return {name: tree for name, tree in held.items() if jax.tree.leaves(tree)}


def token_weights(definition: Definition) -> int:
    """Count the parameters that each token is multiplied with: all but the embedding table, unless that is the head's,
    too, and of experts those that a token is sent to.
    """
    config = getattr(definition, "config", None)
    is_head = definition.head == "lm" and getattr(config, "tied", False)
    experts, used = getattr(config, "experts", 0), getattr(config, "experts_per_token", 0)
    total = 0.0
    for path, leaf in paths(definition.abstract_params()):
        if len(leaf.shape) < 2 or ("embed" in path[0] and not is_head):
            continue
        share = used / experts if experts and any("expert" in part for part in path) else 1.0
        total += share * float(np.prod(leaf.shape))
    return round(total)
