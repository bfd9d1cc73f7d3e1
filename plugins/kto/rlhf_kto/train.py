"""The KTO trainer: model, completions with their reference log-probabilities, objective and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core import InputError
from rlhf_core.data import with_values
from rlhf_core.fit import Action, EvaluationMetrics
from rlhf_core.metrics import fetch_metrics
from rlhf_core.training import Build, Context, Evaluate, define_trainer, python_trainer
from rlhf_kto.config import KTOConfig
from rlhf_kto.contract import KTO_LOSS, KTOInputs
from rlhf_kto.estimate import KLEstimate, WithEstimate
from rlhf_kto.objective import completion_loss, objective, sequence_logps
from rlhf_kto.rows import balance_warnings, open_rows

if TYPE_CHECKING:
    from rlhf_core import TrainState
    from rlhf_core.fit import ExampleUpdates
    from rlhf_core.models import Model
    from rlhf_core.training import HeldOut
    from rlhf_kto.objective import Measure


def build(config: KTOConfig, context: Context) -> Build:
    """Train on the completions of `config.train_data`, compared with the model that training starts from."""
    component = context.registry.get(KTO_LOSS, config.loss.name, **config.loss.options)
    weights = (config.desirable_weight, config.undesirable_weight)
    measure = partial(completion_loss, component, name=config.loss.name, weights=weights)
    logps = jax.ShapeDtypeStruct((2,), jnp.float32)
    context.try_loss(lambda x: measure(KTOInputs(x, x, x > 0, x, config.beta), x > 0), logps)
    reads_kl: bool = KTO_LOSS.attribute(component, "reads_kl")

    model = context.model("lm")
    rows = referenced(context, "train_data")
    desirable = int(rows.sample.values["label"].sum())
    context.warn(*balance_warnings(config, desirable, len(rows) - desirable))
    names = ("label", "kl") if reads_kl else ("label",)
    model, updates = context.updates(model, rows, reads_tokens=True, sequence_names=names)
    estimate = KLEstimate(context, model, updates.layout) if reads_kl else None
    if estimate is not None:
        require_partners(context, updates)
        updates.values = WithEstimate(updates.values, estimate)

    def evaluation(field: str) -> Evaluate | None:
        held_out = referenced(context, field)
        if held_out is None:
            return None
        opened = context.held_out(model, held_out, reads_tokens=True)
        if reads_kl and len(opened.trees) < 2:
            raise InputError(f"stage '{context.name}'.{field}: 1 row; the estimate of the KL needs 2 or more")
        return LabelEvaluation(opened, model, measure, estimate, config.beta)

    loss = partial(objective, model.definition, measure, beta=config.beta)
    margins = Action(lambda at: "rewards/chosen" in at.metrics, lambda at: margin(at.metrics))
    actions = [margins, context.row_losses(updates, "sequence"), *context.evaluations(evaluation)]
    return Build(model, updates, loss, actions, held=updates.held)


def referenced(context: Context, field: str) -> Any:
    """Open the completions of a field with their reference log-probabilities; None where none are given."""
    rows = open_rows(context, field)
    if rows is None:
        return None
    return with_values(rows, "reference", sequence_logps, reads="frozen", what="log-probabilities")


def margin(metrics: Mapping[str, float]) -> dict[str, float]:
    """Compute the difference of the mean rewards of both labels, which no sum over completions is."""
    return {"rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"]}


def require_partners(context: Context, updates: ExampleUpdates) -> None:
    """Raise InputError where an update has 1 row, whose prompt would be read with its own completion."""
    size = context.config.total_batch_size
    count = round(updates.epochs(updates.total) * len(updates.data))
    where, needs = f"stage '{context.name}'.total_batch_size", "the estimate of the KL needs 2 or more"
    if min(size, count) == 1:
        raise InputError(f"{where}: updates of 1 row, and {needs}")
    if count % size == 1:
        raise InputError(
            f"{where}: of {count:,} rows in updates of {size} the last update has 1, and {needs}: set "
            f"max_training_steps = {count // size}, or another size"
        )


class LabelEvaluation:
    """Compute the metrics and implicit rewards of held-out rows, with the KL estimate over all of them, from the state.

    Packing, batch size and mesh change nothing but rounding.
    """

    def __init__(
        self, rows: HeldOut, model: Model, measure: Measure, estimate: KLEstimate | None, beta: float
    ) -> None:
        self.rows, self.model, self.measure, self.estimate, self.beta = rows, model, measure, estimate, beta
        self.labels = np.array([tree.sequence_values["label"][0] for tree in rows.trees])

    def __call__(self, state: TrainState) -> EvaluationMetrics:
        params = self.model.as_stored(state.params)
        reference = self.rows.values["reference"]
        near, logps = (jnp.asarray(x[:, 0]) for x in (reference.of(state), reference.read(params)))
        numbers = np.arange(len(logps))
        kl = 0.0 if self.estimate is None else self.estimate(params, self.rows.trees, numbers)
        inputs = KTOInputs(logps, near, jnp.asarray(self.labels > 0), jnp.full_like(logps, kl), self.beta)
        loss, metrics, _ = self.measure(inputs, jnp.ones(len(logps), bool))
        found = fetch_metrics({**metrics, "loss": loss})
        values = {"reward": self.beta * inputs.ratio, "label": self.labels}
        return EvaluationMetrics.of(found | margin(found), self.rows.where, values)


trainer = define_trainer(KTOConfig, {"model": "language_model"}, build)
KTOTrainer = python_trainer("kto", KTOConfig, __name__)
