"""One DPO stage, top to bottom."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core import create_state
from rlhf_core.artifacts import save_model
from rlhf_core.fit import fit
from rlhf_core.optimizers import make_optimizer
from rlhf_core.training import (
    HeldOut,
    dataset_programs,
    dataset_updates,
    forecast_lines,
    open_model,
    open_pairs,
    python_trainer,
    try_loss,
)
from rlhf_dpo.config import DPOConfig
from rlhf_dpo.evaluation import Evaluation
from rlhf_dpo.losses import DPO_LOSS, DPOInputs
from rlhf_dpo.objective import SAME, objective, pair_loss, sequence_logps
from rlhf_dpo.reference import PairSet, PairUpdates, Reader, Reference

if TYPE_CHECKING:
    from rlhf_core import Forecast, Stage, StagePrograms
    from rlhf_core.models import Model
    from rlhf_dpo.objective import Measure

OPEN_PAIRS = partial(open_pairs, completions=True, margins=False)
ROWS: dict[str, Any] = {
    "reads_tokens": True,
    "sequence_names": ("reference", "tokens", SAME),
    "group": 2,
}
"""How pairs lie in rows."""


def run(config: DPOConfig, stage: Stage) -> None:
    """Train on the pairs of `config.train_data` and save the artifact `model`."""
    model = open_model(config, stage, head="lm")
    train = OPEN_PAIRS(config, stage, model.tokenizer, "train_data")
    assert train is not None
    pairs = PairSet.of(train)
    model, updates = dataset_updates(model, config, stage, train, pairs.trees, **ROWS)
    definition, mesh = model.definition, stage.devices()
    readers = {"train_data": Reader(definition, mesh, pairs, updates.layout, updates.rows_reached())}
    if (held_out := _held_out(config, stage, model)) is not None:
        readers["eval_data"] = held_out
    reference = Reference(stage, readers, model.params)
    measure = _measure(config, stage)
    evaluate = None
    if held_out is not None:
        evaluate = Evaluation(held_out, reference, measure, beta=config.beta, stored=model.as_stored)
    tx, schedule = make_optimizer(config, stage.registry, updates.total)
    fitted = fit(
        stage,
        config,
        create_state(model, tx, seed=stage.seed, frozen=config.frozen_parameters),
        partial(objective, definition, measure, beta=config.beta),
        PairUpdates(updates, reference),
        schedule=schedule,
        evaluate=evaluate,
    )
    save_model(stage, "model", "language_model", model.with_params(fitted.state.params))


def _measure(config: DPOConfig, stage: Stage) -> Measure:
    component = stage.registry.get(DPO_LOSS, config.loss.name, **config.loss.options)
    return partial(pair_loss, component, name=config.loss.name)


def _held_out(config: DPOConfig, stage: Stage, model: Model) -> Reader | None:
    """Prepare to read the pairs of `eval_data`; None without it."""
    encoded = OPEN_PAIRS(config, stage, model.tokenizer, "eval_data", needed=False)
    if encoded is None:
        return None
    pairs = PairSet.of(encoded)
    rows = HeldOut(model, config, stage, encoded, pairs.trees, reads_tokens=True, group=2)
    return Reader(model.definition, stage.devices(), pairs, rows.layout, np.arange(len(rows.trees)))


def forecast(config: DPOConfig, stage: Stage) -> Forecast:
    """Forecast `run` from the data alone."""
    measure, pairs = _measure(config, stage), jax.ShapeDtypeStruct((2,), jnp.float32)
    try_loss(stage, lambda x: measure(DPOInputs(x, x, x, x, x, x, config.beta), x > 0), pairs)
    made = forecast_lines(config, stage, unit="pairs", head="lm", open_data=OPEN_PAIRS)
    if config.loss.name == "robust" and not config.loss.options.get("label_smoothing"):
        line = "loss.label_smoothing is 0, at which 'robust' is 'sigmoid'; set the share of flipped labels"
        return replace(made, warnings=(*made.warnings, line))
    return made


def programs(config: DPOConfig, stage: Stage) -> StagePrograms:
    """Describe the programs of `run` from shapes alone."""
    return dataset_programs(
        config,
        stage,
        head="lm",
        open_data=OPEN_PAIRS,
        objective=lambda model: partial(objective, model, _measure(config, stage), beta=config.beta),
        trees=lambda pairs: PairSet.of(pairs).trees,
        reader=lambda definition: partial(sequence_logps, definition),
        **ROWS,
    )


DPOTrainer = python_trainer("dpo", DPOConfig, __name__)
