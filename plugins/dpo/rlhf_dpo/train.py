"""The DPO trainer: model, pairs with their reference log-probabilities, objective and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.data import Examples
from rlhf_core.fit import EvaluationMetrics
from rlhf_core.metrics import Mean, Metric, fetch_metrics
from rlhf_core.training import Build, Context, Evaluate, define_trainer, python_trainer
from rlhf_dpo.config import DPOConfig
from rlhf_dpo.contract import DPO_LOSS, DPOInputs
from rlhf_dpo.objective import inputs_of, objective, pair_loss
from rlhf_dpo.reference import PairReader, PairSet, PairUpdates, ReferenceLogps, StartingModel

if TYPE_CHECKING:
    from rlhf_core import TrainState
    from rlhf_dpo.objective import Measure

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
    # With adapters the starting model is in memory anyway.
    whole = config.lora is None and not context.is_stream("train_data")
    train = context.pairs("train_data", whole=whole, **PAIRS)
    readers: dict[str, PairReader] = {}
    start = None
    if isinstance(train, Examples):
        pairs = PairSet.of(train)
        model, updates = context.updates(model, train, pairs.trees, **ROWS)
        reached = updates.rows_reached()
        readers["train_data"] = PairReader(model.definition, context.mesh, pairs, updates.layout, reached)
    else:
        model, updates = context.updates(model, train, **ROWS)
        start = StartingModel(context, model, updates.layout)
    reference = ReferenceLogps(context, readers, model.params)

    def evaluation(field: str) -> Evaluate | None:
        if (given := context.pairs(field, **PAIRS)) is None:
            return None
        pairs = PairSet.of(given)
        rows = context.held_out(model, given, pairs.trees, reads_tokens=True, group=2)
        every = np.arange(len(rows.trees))
        readers[field] = PairReader(model.definition, context.mesh, pairs, rows.layout, every)
        own_metrics = context.own_metrics(len(rows.trees))
        return PairEvaluation(
            readers[field],
            reference,
            measure,
            beta=config.beta,
            where=given.where,
            stored=model.as_stored,
            own_metrics=own_metrics,
        )

    actions = context.evaluations(evaluation)
    loss = partial(objective, model.definition, measure, beta=config.beta)
    held = {} if start is None else {"starting model": start.copied}
    source = PairUpdates(updates, reference, start)
    return Build(model, source, loss, actions, held=held)


class PairEvaluation:
    """Compute the metrics and implicit rewards of held-out pairs, each counted once, from the state.

    Log-probabilities are gathered and measured together, so that packing, batch size and mesh change nothing but
    rounding.
    """

    def __init__(
        self,
        reader: PairReader,
        reference: ReferenceLogps,
        measure: Measure,
        *,
        beta: float,
        where: Callable[[int], str],
        stored: Callable[[Any], Any] = lambda params: params,
        own_metrics: Callable[..., dict[str, float]] = lambda rewards, others: {},
    ) -> None:
        """where: names a pair's row. stored: converts parameters to those that are saved, such as `Model.as_stored`.

        own_metrics: further metrics of the implicit rewards, float32 [pairs, 2]; it is also given the other metrics.
        """
        self.beta, self.own_metrics, self.where = beta, own_metrics, where
        self.reader, self.reference, self.stored = reader, reference, stored
        self._measure = jax.jit(partial(_measure_pairs, measure, beta))

    def __call__(self, state: TrainState) -> EvaluationMetrics:
        self.reference.ensure(state)
        pairs, which = self.reader.pairs, self.reader.which
        logps = self.reader(self.stored(state.params))
        loss, metrics = self._measure(logps, pairs.reference[which], pairs.tokens[which])
        rewards = self.beta * (logps - pairs.reference[which])
        found = fetch_metrics({**metrics, "loss": loss})
        values = {"chosen": rewards[:, 0], "rejected": rewards[:, 1]}
        return EvaluationMetrics.of(found | self.own_metrics(rewards, found), self.where, values)


def _measure_pairs(
    measure: Measure, beta: float, logps: jax.Array, reference: jax.Array, tokens: jax.Array
) -> tuple[Mean, Mapping[str, Metric]]:
    return measure(inputs_of(logps, reference, tokens, beta), jnp.ones(len(logps), bool))


trainer = define_trainer(DPOConfig, {"model": "language_model"}, build)
DPOTrainer = python_trainer("dpo", DPOConfig, __name__)
