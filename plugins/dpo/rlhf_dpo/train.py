"""One DPO stage, top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core import artifacts, data, optimizers
from rlhf_core.fit import fit
from rlhf_core.fit.batches import TreeFeed, layout_for
from rlhf_core.stage.alone import Result, door_inputs, run_alone
from rlhf_core.stage.text_settings import text_options
from rlhf_core.state import create_state
from rlhf_core.training.attention import with_attention
from rlhf_core.training.forecast import plan_lines
from rlhf_core.training.open import open_model, open_records, tell, told_of, try_loss
from rlhf_dpo.config import DPOConfig
from rlhf_dpo.evaluation import Evaluation
from rlhf_dpo.losses import DPO_LOSS, DPOInputs
from rlhf_dpo.objective import SAME, objective, pair_loss
from rlhf_dpo.reference import PairFeed, PairSet, Reader, Reference, reached

if TYPE_CHECKING:
    from rlhf_core import Stage
    from rlhf_core.data import Pairs
    from rlhf_core.models import Model
    from rlhf_dpo.objective import Measure


def run(config: DPOConfig, stage: Stage) -> None:
    """Train on the pairs of `config.train_data` and save the artifact `model`."""
    model = open_model(config, stage, head="lm")
    mesh = stage.devices()
    train = _pairs(config, stage, model.tokenizer, "train_data")
    assert train is not None
    pairs = PairSet.of(train)
    data.require_vocabulary(pairs.trees, train.where, model.definition.vocab_size)
    layout = layout_for(pairs.trees, config, mesh, model.definition.hidden_size, reads_tokens=True)
    model = with_attention(model, config, stage, pairs.trees, layout, group=2)
    definition = model.definition
    trees = TreeFeed(
        pairs.trees,
        config,
        layout,
        seed=stage.seed,
        data=train,
        sequence_names=("reference", "tokens", SAME),
        group=2,
    )
    readers = {"train_data": Reader(definition, mesh, pairs, layout, reached(trees), config.total_batch_size)}
    if (held_out := _held_out(config, stage, model)) is not None:
        readers["eval_data"] = held_out
    reference = Reference(stage, readers, model.params)
    measure = _measure(config, stage)
    evaluate = None
    if held_out is not None:
        evaluate = Evaluation(held_out, reference, measure, beta=config.beta, stored=model.as_stored)
    tx, schedule = optimizers.make_optimizer(config, stage.registry, trees.total)
    fitted = fit(
        stage,
        config,
        create_state(model, tx, seed=stage.seed, frozen=config.frozen_parameters),
        objective(definition, measure, beta=config.beta),
        PairFeed(trees, reference),
        schedule=schedule,
        evaluate=evaluate,
    )
    artifacts.save_model(stage, "model", "language_model", model.with_params(fitted.state.params))


def _measure(config: DPOConfig, stage: Stage) -> Measure:
    component = stage.registry.get(DPO_LOSS, config.loss.name, **config.loss.options)
    return partial(pair_loss, component, name=config.loss.name)


def _held_out(config: DPOConfig, stage: Stage, model: Model) -> Reader | None:
    """Reads the first `max_evaluation_steps` batches of `eval_data`; None without it."""
    encoded = _pairs(config, stage, model.tokenizer, "eval_data", needed=False)
    if encoded is None:
        return None
    definition, mesh = model.definition, stage.devices()
    pairs = PairSet.of(encoded)
    data.require_vocabulary(pairs.trees, encoded.where, definition.vocab_size)
    at_once = config.eval_batch_size or config.total_batch_size
    most = len(encoded) if config.max_evaluation_steps is None else at_once * config.max_evaluation_steps
    which = np.arange(min(most, len(encoded)))
    layout = layout_for(pairs.trees[: len(which)], config, mesh, definition.hidden_size, reads_tokens=True)
    return Reader(definition, mesh, pairs, layout, which, at_once)


def plan(config: DPOConfig, stage: Stage) -> Sequence[str]:
    """What `run` would do, from the data alone."""
    measure, pairs = _measure(config, stage), jax.ShapeDtypeStruct((2,), jnp.float32)
    try_loss(stage, lambda x: measure(DPOInputs(x, x, x, x, x, x, config.beta), x > 0), pairs)
    tokenizer = stage.inputs.get("tokenizer")
    encode = tokenizer and (
        lambda field: _pairs(config, stage, tokenizer, field, needed=field == "train_data")
    )
    lines = list(plan_lines(config, stage, unit="pairs", head="lm", encode=encode))
    if config.loss.name == "robust" and not config.loss.options.get("label_smoothing"):
        lines.append(
            "warning: loss.label_smoothing is 0, at which 'robust' is 'sigmoid'; set the share of flipped labels"
        )
    return lines


def _pairs(
    config: DPOConfig, stage: Stage, tokenizer: Any, field: str, *, needed: bool = True
) -> Pairs | None:
    records = open_records(config, stage, field, needed=needed)
    if records is None:
        return None
    with told_of(stage, field):
        encoded = data.encode_pairs(
            records,
            tokenizer,
            max_length=config.max_sequence_length,
            overlong=config.overlong,
            truncation_mode=config.truncation_mode,
            chat_template=text_options(config, stage),
            completions=True,
        )
        if field == "train_data":
            encoded.report.require_differences(records.name)
    encoded.report.unread += [encoded.where(i) for i in np.flatnonzero(encoded.margins).tolist()]
    tell(encoded.report, stage, field)
    return encoded


class DPOTrainer:
    """The Python door: `DPOTrainer(config, model=path_or_model, train_dataset=rows).train()`."""

    def __init__(self, config: DPOConfig | None = None, **inputs: Any) -> None:
        """inputs: `model`, `train_dataset`, `eval_dataset`, `tokenizer`, `callbacks`; `args`, `processing_class`."""
        self.config, self.inputs = door_inputs(DPOConfig, config, inputs)

    def train(self) -> Result:
        """Train; returns the artifact and the last metrics."""
        return run_alone("dpo", self.config, **self.inputs)
