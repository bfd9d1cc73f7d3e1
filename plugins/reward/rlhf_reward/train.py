"""One reward stage, top to bottom."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlhf_core import PAIRWISE_LOSS, PairInputs, create_state
from rlhf_core.artifacts import save_model
from rlhf_core.fit import fit, per_sequence
from rlhf_core.objective import sequence_scores
from rlhf_core.optimizers import make_optimizer
from rlhf_core.training import (
    HeldOut,
    dataset_programs,
    dataset_updates,
    forecast_lines,
    open_model,
    open_pairs,
    python_trainer,
    scoring_contract,
    try_loss,
)
from rlhf_reward.config import RewardConfig
from rlhf_reward.evaluation import Evaluation, Preview, finite
from rlhf_reward.objective import SAME, mark_equal_pairs, objective, pair_loss

if TYPE_CHECKING:
    from rlhf_core import Forecast, Stage, StagePrograms
    from rlhf_core.data import Pairs
    from rlhf_core.models import Model
    from rlhf_reward.objective import Measure


ROWS: dict[str, Any] = {"reads_tokens": False, "sequence_names": ("margin", SAME), "group": 2}
"""How pairs lie in rows."""


def run(config: RewardConfig, stage: Stage) -> None:
    """Train on the pairs of `config.train_data` and save the artifact `model`, with how it must be read."""
    model = open_model(config, stage, head="score")
    train = _open_pairs(config, stage, model.tokenizer, "train_data")
    assert train is not None
    trees = mark_equal_pairs(train.trees())
    model, updates = dataset_updates(model, config, stage, train, trees, **ROWS)
    measure = _measure(config, stage)
    loss = partial(objective, model.definition, measure)
    evaluate = _evaluation(config, stage, model, measure)
    tx, schedule = make_optimizer(config, stage.registry, updates.total)
    state = create_state(model, tx, seed=stage.seed, frozen=config.frozen_parameters)
    preview = evaluate and Preview(evaluate, model.tokenizer, stage, config.num_preview_samples)
    fitted = fit(stage, config, state, loss, updates, schedule=schedule, evaluate=preview)
    if evaluate is None:
        params = model.as_stored(fitted.state.params)
        layout = updates.layout.largest()  # a single program to compile
        score = partial(sequence_scores, model.definition)
        scores = per_sequence(score, params, trees[:STATISTICS_PAIRS], layout, stage.devices(), group=2)
        metrics = None
    else:
        scores = evaluate.scores(fitted.state)
        metrics = finite(evaluate(fitted.state))
    contract = scoring_contract(
        config, stage, model, read_at=config.read_at, scores=scores, evaluation=metrics
    )
    trained = model.with_params(fitted.state.params)
    save_model(stage, "model", "reward_model", trained, contract=contract)


STATISTICS_PAIRS = 128
"""Training pairs for the stored mean and deviation of scores where there is no evaluation data."""


def _measure(config: RewardConfig, stage: Stage) -> Measure:
    component = stage.registry.get(PAIRWISE_LOSS, config.loss.name, **config.loss.options)
    return partial(pair_loss, component, coefficient=config.center_rewards_coefficient, name=config.loss.name)


def _evaluation(config: RewardConfig, stage: Stage, model: Model, measure: Measure) -> Evaluation | None:
    pairs = _open_pairs(config, stage, model.tokenizer, "eval_data", needed=False)
    if pairs is None:
        return None
    held_out = HeldOut(model, config, stage, pairs, pairs.trees(), reads_tokens=False, group=2)
    return Evaluation(pairs, held_out, model, measure)


def forecast(config: RewardConfig, stage: Stage) -> Forecast:
    """Forecast `run` from the data alone."""
    measure, pairs = _measure(config, stage), jax.ShapeDtypeStruct((2,), jnp.float32)
    try_loss(stage, lambda x: measure(PairInputs(x, x, x), x > 0), pairs)
    return forecast_lines(config, stage, unit="pairs", head="score", open_data=_open_pairs)


def programs(config: RewardConfig, stage: Stage) -> StagePrograms:
    """Describe the programs of `run` from shapes alone."""
    return dataset_programs(
        config,
        stage,
        head="score",
        open_data=_open_pairs,
        objective=lambda model: partial(objective, model, _measure(config, stage)),
        trees=lambda pairs: mark_equal_pairs(pairs.trees()),
        **ROWS,
    )


def _open_pairs(
    config: RewardConfig, stage: Stage, tokenizer: Any, field: str, **options: Any
) -> Pairs | None:
    return open_pairs(config, stage, tokenizer, field, read_at=config.read_at, **options)


RewardTrainer = python_trainer("reward", RewardConfig, __name__)
