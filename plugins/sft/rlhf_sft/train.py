"""One SFT stage, top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core import artifacts, data, optimizers
from rlhf_core.fit import evaluator, fit
from rlhf_core.fit.batches import TreeFeed, evaluation_batches, layout_for
from rlhf_core.stage.alone import Result, door_inputs, run_alone
from rlhf_core.stage.text_settings import text_options
from rlhf_core.state import create_state
from rlhf_core.training.attention import with_attention
from rlhf_core.training.forecast import plan_lines
from rlhf_core.training.open import open_model, open_records, tell
from rlhf_sft.config import SFTConfig
from rlhf_sft.objective import objective

if TYPE_CHECKING:
    from rlhf_core import Stage


def run(config: SFTConfig, stage: Stage) -> None:
    """Train on the demonstrations of `config.train_data` and save the artifact `model`."""
    model = open_model(config, stage, head="lm")
    train = _texts(config, stage, model.tokenizer, "train_data")
    trees = train.trees()
    data.require_vocabulary(trees, train.where, model.definition.vocab_size)
    layout = layout_for(trees, config, stage.devices(), model.definition.hidden_size, reads_tokens=True)
    model = with_attention(model, config, stage, trees, layout)
    feed = TreeFeed(trees, config, layout, seed=stage.seed, data=train)
    tx, schedule = optimizers.make_optimizer(config, stage.registry, feed.total)
    state = create_state(model, tx, seed=stage.seed, frozen=config.frozen_parameters)
    loss = objective(model.definition)
    evaluate = None
    if (held_out := _texts(config, stage, model.tokenizer, "eval_data", needed=False)) is not None:
        trees = held_out.trees()
        data.require_vocabulary(trees, held_out.where, model.definition.vocab_size)
        batches = evaluation_batches(
            trees, config, stage.devices(), model.definition.hidden_size, reads_tokens=True
        )
        evaluate = evaluator(loss, stage.devices(), batches, stored=model.as_stored, say=stage.say)
    fitted = fit(stage, config, state, loss, feed, schedule=schedule, evaluate=evaluate)
    artifacts.save_model(stage, "model", "language_model", model.with_params(fitted.state.params))


def plan(config: SFTConfig, stage: Stage) -> Sequence[str]:
    """What `run` would do, from the data alone."""
    tokenizer = stage.inputs.get("tokenizer")
    encode = tokenizer and (
        lambda field: _texts(config, stage, tokenizer, field, needed=field == "train_data")
    )
    return plan_lines(config, stage, unit="demonstrations", head="lm", encode=encode)


def _texts(config: SFTConfig, stage: Stage, tokenizer: Any, field: str, *, needed: bool = True) -> Any:
    records = open_records(config, stage, field, needed=needed)
    if records is None:
        return None
    encoded = data.encode_texts(
        records,
        tokenizer,
        max_length=config.max_sequence_length,
        overlong=config.overlong,
        truncation_mode=config.truncation_mode,
        chat_template=text_options(config, stage),
    )
    tell(encoded.report, stage, field)
    return encoded


class SFTTrainer:
    """The Python door: `SFTTrainer(config, model=path_or_model, train_dataset=rows).train()`."""

    def __init__(self, config: SFTConfig | None = None, **inputs: Any) -> None:
        """inputs: `model`, `train_dataset`, `eval_dataset`, `tokenizer`, `callbacks`."""
        self.config, self.inputs = door_inputs(SFTConfig, config, inputs)

    def train(self) -> Result:
        """Train; returns the artifact and the last metrics."""
        return run_alone("sft", self.config, **self.inputs)
