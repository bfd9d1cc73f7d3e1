"""What a DPO stage trains, on what, towards what."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.rollouts import open_previews
from rlhf_core.training import Build, Context, Evaluate, python_trainer
from rlhf_dpo.config import DPOConfig
from rlhf_dpo.evaluation import Evaluation
from rlhf_dpo.losses import DPO_LOSS, DPOInputs
from rlhf_dpo.objective import objective, pair_loss
from rlhf_dpo.reference import PairSet, PairUpdates, Reader, ReferenceLogps

ROWS: dict[str, Any] = {
    "reads_tokens": True,
    "sequence_names": ("reference", "tokens"),
    "group": 2,
}
"""How pairs lie in rows."""
PAIRS: dict[str, Any] = {"completions": True, "margins": False}
"""How pairs are encoded."""


def build(config: DPOConfig, context: Context) -> Build:
    """Train on the pairs of `config.train_data`, compared with the model that training starts from."""
    component = context.registry.get(DPO_LOSS, config.loss.name, **config.loss.options)
    measure = partial(pair_loss, component, name=config.loss.name)
    logps = jax.ShapeDtypeStruct((2,), jnp.float32)
    context.try_loss(lambda x: measure(DPOInputs(x, x, x, x, x, x, config.beta), x > 0), logps)
    if config.loss.name == "robust" and not config.loss.options.get("label_smoothing"):
        context.warn(
            "loss.label_smoothing is 0, which makes 'robust' the same as 'sigmoid'; set it to the share "
            "of flipped labels"
        )

    model = context.model("lm")
    train = context.pairs("train_data", whole=True, **PAIRS)
    pairs = PairSet.of(train)
    model, updates = context.updates(model, train, pairs.trees, **ROWS)
    readers = {
        "train_data": Reader(model.definition, context.mesh, pairs, updates.layout, updates.rows_reached())
    }
    reference = ReferenceLogps(context, readers, model.params)

    def evaluation(field: str) -> Evaluate | None:
        if (given := context.pairs(field, **PAIRS)) is None:
            return None
        pairs = PairSet.of(given)
        rows = context.held_out(model, given, pairs.trees, reads_tokens=True, group=2)
        every = np.arange(len(rows.trees))
        readers[field] = Reader(model.definition, context.mesh, pairs, rows.layout, every)
        own_metrics = context.own_metrics()
        return Evaluation(
            readers[field],
            reference,
            measure,
            beta=config.beta,
            stored=model.as_stored,
            own_metrics=own_metrics,
        )

    evaluate = context.evaluations(evaluation)
    loss = partial(objective, model.definition, measure, beta=config.beta)
    previews = open_previews(context, model)
    return Build(model, PairUpdates(updates, reference), loss, evaluate=evaluate, previews=previews)


DPOTrainer = python_trainer("dpo", DPOConfig, __name__)
