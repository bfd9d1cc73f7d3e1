"""One reward stage, top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlhf_core import PAIRWISE_LOSS, PairInputs, artifacts, data, optimizers
from rlhf_core.fit import fit
from rlhf_core.fit.batches import TreeFeed, layout_for
from rlhf_core.scoring import Contract, Scorer, base_identity
from rlhf_core.stage.alone import Result, door_inputs, run_alone
from rlhf_core.stage.text_settings import read_at_of, text_options
from rlhf_core.state import create_state
from rlhf_core.training.attention import with_attention
from rlhf_core.training.forecast import plan_lines
from rlhf_core.training.open import open_model, open_records, tell, told_of, try_loss
from rlhf_reward.config import RewardConfig
from rlhf_reward.evaluation import Evaluation, Preview, finite, subsets_of
from rlhf_reward.objective import SAME, marked, objective, pair_loss

if TYPE_CHECKING:
    from rlhf_core import Stage
    from rlhf_core.data import Pairs, Records
    from rlhf_core.models import Model
    from rlhf_core.tokenizer import TextOptions
    from rlhf_reward.objective import Measure


def run(config: RewardConfig, stage: Stage) -> None:
    """Train on the pairs of `config.train_data` and save the artifact `model`, with how it must be read."""
    model = open_model(config, stage, head="score")
    train = _pairs(config, stage, model.tokenizer, "train_data")
    assert train is not None
    trees = marked(train.trees())
    data.require_vocabulary(trees, train.where, model.definition.vocab_size)
    mesh, width = stage.devices(), model.definition.hidden_size
    layout = layout_for(trees, config, mesh, width, reads_tokens=False)
    model = with_attention(model, config, stage, trees, layout, group=2)
    feed = TreeFeed(
        trees,
        config,
        layout,
        seed=stage.seed,
        data=train,
        sequence_names=("margin", SAME),
        group=2,
    )
    measure = _measure(config, stage)
    loss = objective(model.definition, measure)
    evaluate = _evaluation(config, stage, model, measure)
    tx, schedule = optimizers.make_optimizer(config, stage.registry, feed.total)
    state = create_state(model, tx, seed=stage.seed, frozen=config.frozen_parameters)
    preview = evaluate and Preview(evaluate, model.tokenizer, stage, config.num_preview_samples)
    fitted = fit(stage, config, state, loss, feed, schedule=schedule, evaluate=preview)
    trained = model.with_params(fitted.state.params)
    contract = Contract.of(
        trained.tokenizer,
        max_length=config.max_sequence_length,
        truncation_mode=config.truncation_mode,
        chat_template=_text_options(config, stage),
    )
    if evaluate is None:
        seen = train.pairs[:STATISTICS_PAIRS]
        replies = [ids for pair in seen for ids in (pair.chosen, pair.rejected)]
        scorer = Scorer(model.with_params(model.as_stored(fitted.state.params)), contract)
        scorer.layout = layout.largest()  # chosen for this data, and a single program to compile
        scores = scorer.score_ids(replies, group=2)
    else:
        scores = evaluate.scores(fitted.state)
        contract = replace(contract, evaluation=finite(evaluate(fitted.state)))
    contract = replace(
        contract,
        mean=float(scores.mean()),
        std=float(scores.std()),
        compute_dtype=model.computes_in,
        base=base_identity(trained),
    )
    artifacts.save_model(stage, "model", "reward_model", trained, contract=contract.to_dict())


STATISTICS_PAIRS = 128
"""Pairs of the training data that the stored mean and deviation are taken over where there is no evaluation data."""


def _measure(config: RewardConfig, stage: Stage) -> Measure:
    component = stage.registry.get(PAIRWISE_LOSS, config.loss.name, **config.loss.options)
    return partial(pair_loss, component, coefficient=config.center_rewards_coefficient, name=config.loss.name)


def _text_options(config: RewardConfig, stage: Stage) -> TextOptions:
    return text_options(config, stage, read_at=read_at_of(config, stage, config.read_at))


def _evaluation(config: RewardConfig, stage: Stage, model: Model, measure: Measure) -> Evaluation | None:
    records = open_records(config, stage, "eval_data", needed=False)
    if records is None:
        return None
    pairs = _encoded(records, config, stage, model.tokenizer, "eval_data")
    data.require_vocabulary(pairs.trees(), pairs.where, model.definition.vocab_size)
    return Evaluation(
        pairs,
        config,
        model.definition,
        stage.devices(),
        measure,
        subsets=subsets_of(records, pairs),
        stored=model.as_stored,
        say=stage.say,
    )


def plan(config: RewardConfig, stage: Stage) -> Sequence[str]:
    """What `run` would do, from the data alone."""
    measure, pairs = _measure(config, stage), jax.ShapeDtypeStruct((2,), jnp.float32)
    try_loss(stage, lambda x: measure(PairInputs(x, x, x), x > 0), pairs)
    tokenizer = stage.inputs.get("tokenizer")
    encode = tokenizer and (
        lambda field: _pairs(config, stage, tokenizer, field, needed=field == "train_data")
    )
    return plan_lines(config, stage, unit="pairs", head="score", encode=encode)


def _pairs(
    config: RewardConfig, stage: Stage, tokenizer: Any, field: str, *, needed: bool = True
) -> Pairs | None:
    records = open_records(config, stage, field, needed=needed)
    return None if records is None else _encoded(records, config, stage, tokenizer, field)


def _encoded(records: Records, config: RewardConfig, stage: Stage, tokenizer: Any, field: str) -> Pairs:
    with told_of(stage, field):
        encoded = data.encode_pairs(
            records,
            tokenizer,
            max_length=config.max_sequence_length,
            overlong=config.overlong,
            truncation_mode=config.truncation_mode,
            chat_template=_text_options(config, stage),
        )
        if field == "train_data":
            encoded.report.require_differences(records.name)
    tell(encoded.report, stage, field)
    return encoded


class RewardTrainer:
    """The Python door: `RewardTrainer(config, model=path_or_model, train_dataset=rows).train()`."""

    def __init__(self, config: RewardConfig | None = None, **inputs: Any) -> None:
        """inputs: `model`, `train_dataset`, `eval_dataset`, `tokenizer`, `callbacks`; `args`, `processing_class`."""
        self.config, self.inputs = door_inputs(RewardConfig, config, inputs)

    def train(self) -> Result:
        """Train; returns the artifact and the last metrics."""
        return run_alone("reward", self.config, **self.inputs)
