"""What an SFT stage trains, on what, towards what."""

from __future__ import annotations

from functools import partial

from rlhf_core.rollouts import open_previews
from rlhf_core.training import Build, Context, python_trainer
from rlhf_sft.config import SFTConfig
from rlhf_sft.objective import objective


def build(config: SFTConfig, context: Context) -> Build:
    """Train on the demonstrations of `config.train_data`; evaluate the same loss on those of `eval_data`."""
    model = context.model("lm")
    model, updates = context.updates(model, context.texts("train_data"), reads_tokens=True)
    loss, evaluate = partial(objective, model.definition), None
    if (texts := context.texts("eval_data")) is not None:
        evaluate = context.held_out(model, texts, reads_tokens=True).evaluator(loss)
    return Build(model, updates, loss, evaluate=evaluate, previews=open_previews(context, model))


SFTTrainer = python_trainer("sft", SFTConfig, __name__)
