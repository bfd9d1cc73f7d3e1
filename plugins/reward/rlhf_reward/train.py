"""The reward trainer: model, pairs and objective."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_core import PAIRWISE_LOSS, PairInputs, TrainState
from rlhf_core.artifacts import save_model
from rlhf_core.fit import TreeReader
from rlhf_core.objective import sequence_scores
from rlhf_core.scoring import Scorer
from rlhf_core.training import Build, Context, Evaluate, define_trainer, python_trainer
from rlhf_reward.config import RewardConfig
from rlhf_reward.evaluation import Preview, ScoreEvaluation, finite
from rlhf_reward.objective import objective, pair_loss

ROWS: dict[str, Any] = {"reads_tokens": False, "sequence_names": ("margin",), "group": 2}
"""How pairs lie in rows."""
STATISTICS_PAIRS = 128
"""Training pairs for the stored mean and deviation of scores where there is no evaluation data."""


def build(config: RewardConfig, context: Context) -> Build:
    """Train on the pairs of `config.train_data`; the artifact also records how its texts must be read."""
    component = context.registry.get(PAIRWISE_LOSS, config.loss.name, **config.loss.options)
    coefficient = config.center_rewards_coefficient
    measure = partial(pair_loss, component, coefficient=coefficient, name=config.loss.name)
    scores = jax.ShapeDtypeStruct((2,), jnp.float32)
    context.try_loss(lambda x: measure(PairInputs(x, x, x), x > 0), scores)

    model = context.model("score")
    train = context.pairs("train_data", read_at=config.read_at)
    model, updates = context.updates(model, train, **ROWS)
    held_out: list[ScoreEvaluation] = []

    def evaluation(field: str) -> Evaluate | None:
        pairs = context.pairs(field, read_at=config.read_at)
        if pairs is None:
            return None
        rows = context.held_out(model, pairs, reads_tokens=False, group=2)
        own_metrics = context.own_metrics(len(rows.trees))
        held_out.append(ScoreEvaluation(pairs.sample, rows, model, measure, own_metrics))
        if len(held_out) > 1:
            return held_out[-1]  # pairs of the first set are shown
        return Preview(held_out[0], model.tokenizer, context, config.num_preview_samples)

    actions = [context.row_losses(updates, "sequence"), *context.evaluations(evaluation)]

    def save(state: TrainState) -> None:
        if not held_out:
            score = partial(sequence_scores, model.definition)
            layout = updates.layout.largest()  # a single program to compile
            reader = TreeReader(score, layout, context.mesh, per="sequence")
            found = reader(model.as_stored(state.params), train.trees[:STATISTICS_PAIRS], group=2)
            metrics = None
        else:
            found = held_out[0].scores(state)
            metrics = finite(held_out[0].known(state))
        contract = Scorer.contract_of(
            context, model, read_at=config.read_at, scores=found, evaluation=metrics
        )
        trained = model.with_params(state.params)
        save_model(context.stage, "model", "reward_model", trained, contract=contract)

    return Build(model, updates, partial(objective, model.definition, measure), actions, save=save)


trainer = define_trainer(RewardConfig, {"model": "reward_model"}, build)
RewardTrainer = python_trainer("reward", RewardConfig, __name__)
