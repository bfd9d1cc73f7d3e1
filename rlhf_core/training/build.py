"""What a trainer is: a config, outputs, and a `build` that a run fits, a check counts and a compiler compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from rlhf_core.artifacts import save_model
from rlhf_core.contracts import Trainer
from rlhf_core.fit import fit
from rlhf_core.models import Model
from rlhf_core.optimizers import make_optimizer
from rlhf_core.state import create_state
from rlhf_core.training.context import Context

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.fit.batches import UpdateSource
    from rlhf_core.optimizers import Schedule
    from rlhf_core.stage import Stage
    from rlhf_core.state import TrainState
    from rlhf_core.step import Objective

POLICY = "policy"
"""Of several models, the one that becomes the output `model`."""


@dataclass(frozen=True)
class Build:
    """What a trainer's `build` returns. Parameters may be shapes: a build computes nothing with them.

    models: the model that is trained, or several by name, {"policy": …, "critic": …}; a state's parameters and the
        objective's are then keyed alike.
    updates: which examples make an update, in which rows. objective: (parameters, rows) → the loss and metrics.
    trains: of several models, {name: the config that it is trained by}; the others are not trained. Default: all are,
        by the stage's config.
    evaluate, preview, after_update, after_update_steps, stop_when: as for `rlhf_core.fit.fit`.
    held: {name: arrays or shapes} of what is in memory beside the state, such as a copy of what is trained.
    save: saves the outputs from the last state; None: the model, or the one called "policy", is the output `model`.
    """

    models: Model | Mapping[str, Model]
    updates: UpdateSource
    objective: Objective
    trains: Mapping[str, TrainerConfig] = field(default_factory=dict)
    evaluate: Callable[[TrainState], dict[str, float]] | None = None
    preview: Callable[[int, TrainState], None] | None = None
    after_update: Callable[[int, TrainState], None] | None = None
    after_update_steps: int = 1
    stop_when: Callable[[Mapping[str, float]], str | None] | None = None
    held: Mapping[str, Any] = field(default_factory=dict)
    save: Callable[[TrainState], None] | None = None

    def state(self, config: TrainerConfig, stage: Stage) -> tuple[TrainState, Schedule]:
        """Make the state that training starts from, of arrays or of shapes, and the learning rate's schedule."""
        models, total = self.models, self.updates.total
        if isinstance(models, Model):
            tx, schedule = make_optimizer(config, stage.registry, total)
            return create_state(models, tx, seed=stage.seed, frozen=config.frozen_parameters), schedule
        trains = self.trains or dict.fromkeys(models, config)
        made = {name: make_optimizer(each, stage.registry, total) for name, each in trains.items()}
        frozen: dict[str, Any] = dict.fromkeys(models.keys() - trains.keys(), ".*")
        frozen |= {name: each.frozen_parameters for name, each in trains.items() if each.frozen_parameters}
        txs = {name: tx for name, (tx, _) in made.items()}
        return create_state(models, txs, seed=stage.seed, frozen=frozen), next(iter(made.values()))[1]


BuildFunction: TypeAlias = Callable[[Any, Context], Build]
"""(config, context) → what is trained, on what, towards what."""


def define_trainer(config: type[TrainerConfig], outputs: Mapping[str, str], build: BuildFunction) -> Trainer:
    """Make the trainer that `build` describes: it runs, is checked, resumes and is compiled by that description.

    config: the class of its options. outputs: {output name: artifact kind}.
    """
    return Trainer(config, outputs, partial(run, build), build)


def run(build: BuildFunction, config: TrainerConfig, stage: Stage) -> None:
    """Build a stage on its devices, train, and save its outputs."""
    made = build(config, Context(config, stage))
    state, schedule = made.state(config, stage)
    fitted = fit(
        stage,
        config,
        state,
        made.objective,
        made.updates,
        schedule=schedule,
        evaluate=made.evaluate,
        preview=made.preview,
        after_update=made.after_update,
        after_update_steps=made.after_update_steps,
        stop_when=made.stop_when,
    )
    if made.save is not None:
        made.save(fitted.state)
        return
    model, params = made.models, fitted.state.params
    if not isinstance(model, Model):
        model, params = model[POLICY], params[POLICY]
    kind = "language_model" if model.definition.head == "lm" else "reward_model"
    save_model(stage, "model", kind, model.with_params(params))
