"""The SFT trainer: model, demonstrations and objective."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf_core.metrics import Mean, Metric
from rlhf_core.objective import trained_logps, trained_weight
from rlhf_core.training import Build, Context, Evaluate, define_trainer, python_trainer
from rlhf_sft.config import SFTConfig

if TYPE_CHECKING:
    import jax

    from rlhf_core.models import Definition
    from rlhf_core.packing import Packed


def objective(
    model: Definition, params: Any, batch: Packed
) -> tuple[Mean, Mapping[str, Metric], Mapping[str, jax.Array]]:
    """Compute the mean over trained tokens t of −w_t · log p(x_t | x_<t), in nats; the denominator is Σ w_t.

    The value `loss` of a row, in rows/ and evaluations/, is its own mean.
    """
    logps, entropies = trained_logps(model, params, batch, entropy=True)
    weight = trained_weight(batch)
    return Mean.of(-logps, weight), {"entropy": Mean.of(entropies, weight)}, {"loss": -logps}


def build(config: SFTConfig, context: Context) -> Build:
    """Train on the demonstrations of `config.train_data`; evaluate the same loss on those of `eval_data`."""
    model = context.model("lm")
    model, updates = context.updates(model, context.texts("train_data"), reads_tokens=True)
    loss = partial(objective, model.definition)

    def held_out(field: str) -> Evaluate | None:
        texts = context.texts(field)
        if texts is None:
            return None
        return context.held_out(model, texts, reads_tokens=True).evaluator(loss, {"loss": "token"})

    actions = [context.row_losses(updates, "token"), *context.evaluations(held_out)]
    return Build(model, updates, loss, actions)


trainer = define_trainer(SFTConfig, {"model": "language_model"}, build)
SFTTrainer = python_trainer("sft", SFTConfig, __name__)
