"""What an SFT stage trains, on what, towards what."""

from __future__ import annotations

from functools import partial

from rlhf_core.rollouts import open_previews
from rlhf_core.training import Build, Context, Evaluate, python_trainer
from rlhf_sft.config import SFTConfig
from rlhf_sft.objective import objective


def build(config: SFTConfig, context: Context) -> Build:
    """Train on the demonstrations of `config.train_data`; evaluate the same loss on those of `eval_data`."""
    model = context.model("lm")
    model, updates = context.updates(model, context.texts("train_data"), reads_tokens=True)
    loss = partial(objective, model.definition)

    def held_out(field: str) -> Evaluate | None:
        texts = context.texts(field)
        return None if texts is None else context.held_out(model, texts, reads_tokens=True).evaluator(loss)

    evaluate, previews = context.evaluations(held_out), open_previews(context, model)
    return Build(model, updates, loss, evaluate=evaluate, previews=previews)


SFTTrainer = python_trainer("sft", SFTConfig, __name__)
