"""One SFT stage, top to bottom."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

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
    open_texts,
    python_trainer,
)
from rlhf_sft.config import SFTConfig
from rlhf_sft.objective import objective

if TYPE_CHECKING:
    from rlhf_core import Forecast, Stage, StagePrograms


def run(config: SFTConfig, stage: Stage) -> None:
    """Train on the demonstrations of `config.train_data` and save the artifact `model`."""
    model = open_model(config, stage, head="lm")
    train = open_texts(config, stage, model.tokenizer, "train_data")
    assert train is not None
    model, updates = dataset_updates(model, config, stage, train, train.trees(), reads_tokens=True)
    tx, schedule = make_optimizer(config, stage.registry, updates.total)
    state = create_state(model, tx, seed=stage.seed, frozen=config.frozen_parameters)
    loss = partial(objective, model.definition)
    evaluate = None
    if (texts := open_texts(config, stage, model.tokenizer, "eval_data", needed=False)) is not None:
        evaluate = HeldOut(model, config, stage, texts, texts.trees(), reads_tokens=True).evaluator(loss)
    fitted = fit(stage, config, state, loss, updates, schedule=schedule, evaluate=evaluate)
    save_model(stage, "model", "language_model", model.with_params(fitted.state.params))


def forecast(config: SFTConfig, stage: Stage) -> Forecast:
    """Forecast `run` from the data alone."""
    return forecast_lines(config, stage, unit="demonstrations", head="lm", open_data=open_texts)


def programs(config: SFTConfig, stage: Stage) -> StagePrograms:
    """Describe the programs of `run` from shapes alone."""
    return dataset_programs(
        config,
        stage,
        head="lm",
        open_data=open_texts,
        objective=lambda model: partial(objective, model),
        reads_tokens=True,
    )


SFTTrainer = python_trainer("sft", SFTConfig, __name__)
