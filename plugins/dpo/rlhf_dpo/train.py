"""The DPO trainer: model, pairs with their reference log-probabilities, objective and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.data import with_values
from rlhf_core.fit import EvaluationMetrics
from rlhf_core.metrics import Mean, Metric, fetch_metrics
from rlhf_core.training import Build, Context, Evaluate, define_trainer, python_trainer
from rlhf_dpo.config import DPOConfig
from rlhf_dpo.contract import DPO_LOSS, DPOInputs
from rlhf_dpo.objective import inputs_of, objective, pair_loss, sequence_logps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlhf_core import TrainState
    from rlhf_core.packing import Tree
    from rlhf_core.training import HeldOut
    from rlhf_dpo.contract import DPOLoss
    from rlhf_dpo.objective import Measure

ROWS: dict[str, Any] = {"reads_tokens": True, "sequence_names": ("tokens",), "group": 2}
"""How pairs lie in rows."""


def open_loss(config: DPOConfig, context: Context) -> tuple[DPOLoss, Measure]:
    """Make the config's loss, and what measures pairs with it. Raises InputError where it fails."""
    component = context.registry.get(DPO_LOSS, config.loss.name, **config.loss.options)
    measure = partial(pair_loss, component, name=config.loss.name)
    logps = jax.ShapeDtypeStruct((2,), jnp.float32)
    context.try_loss(lambda x: measure(DPOInputs(x, x, x, x, x, x, config.beta), x > 0), logps)
    if config.loss.name == "robust" and not config.loss.options.get("label_smoothing"):
        context.warn(
            "loss.label_smoothing is 0, which makes 'robust' the same as 'sigmoid'; set it to the share "
            "of flipped labels"
        )
    return component, measure


def build(config: DPOConfig, context: Context) -> Build:
    """Train on the pairs of `config.train_data`, compared with the model that training starts from."""
    _, measure = open_loss(config, context)
    model = context.model("lm")
    # With adapters the starting model is in memory anyway, so that its values need not be computed first.
    whole = config.lora is None and not context.is_stream("train_data")
    model, updates = context.updates(model, pairs_of(context, "train_data", whole=whole), **ROWS)

    def evaluation(field: str) -> Evaluate | None:
        pairs = pairs_of(context, field)
        if pairs is None:
            return None
        rows = context.held_out(model, pairs, **ROWS)
        own_metrics = context.own_metrics(len(rows.trees))
        return PairEvaluation(
            rows, measure, beta=config.beta, stored=model.as_stored, own_metrics=own_metrics
        )

    loss = partial(objective, model.definition, measure, beta=config.beta)
    return Build(model, updates, loss, context.evaluations(evaluation), held=updates.held)


def pairs_of(context: Context, field: str, **options: Any) -> Any:
    """Open the pairs of a field, with their reference log-probabilities and the tokens of their completions."""
    pairs = context.pairs(field, completions=True, margins=False, **options)
    if pairs is None:
        return None
    return with_values(
        pairs.map(count_tokens), "reference", sequence_logps, reads="frozen", what="log-probabilities"
    )


def count_tokens(tree: Tree) -> Tree:
    """Add the number of tokens of each completion to a pair's tree, as the sequence value `tokens`."""
    assert tree.weights is not None
    tokens = np.array([np.count_nonzero(weight) for weight in tree.weights], np.float32)
    return tree._replace(sequence_values={"tokens": tokens})


class PairEvaluation:
    """Compute the metrics and implicit rewards of held-out pairs, each counted once, from the state.

    Log-probabilities are gathered and measured together, so that packing, batch size and mesh change nothing but
    rounding.
    """

    def __init__(
        self,
        rows: HeldOut,
        measure: Measure,
        *,
        beta: float,
        stored: Callable[[Any], Any] = lambda params: params,
        own_metrics: Callable[..., dict[str, float]] = lambda rewards, others: {},
    ) -> None:
        """rows: the held-out pairs. stored: converts parameters to those that are saved, such as `Model.as_stored`.

        own_metrics: further metrics of the implicit rewards, float32 [pairs, 2]; it is also given the other metrics.
        """
        self.rows, self.beta, self.own_metrics, self.stored = rows, beta, own_metrics, stored
        self.reference = rows.values["reference"]
        self._measure = jax.jit(partial(_measure_pairs, measure, beta))

    @cached_property
    def _tokens(self) -> NDArray[np.float32]:
        """float32 [pairs, 2]: tokens of each completion."""
        return np.stack([tree.sequence_values["tokens"] for tree in self.rows.trees])

    def __call__(self, state: TrainState) -> EvaluationMetrics:
        reference = self.reference.of(state)
        logps = self.reference.read(self.stored(state.params))
        loss, metrics = self._measure(logps, reference, self._tokens)
        rewards = self.beta * (logps - reference)
        found = fetch_metrics({**metrics, "loss": loss})
        values = {"chosen": rewards[:, 0], "rejected": rewards[:, 1]}
        return EvaluationMetrics.of(found | self.own_metrics(rewards, found), self.rows.where, values)


def _measure_pairs(
    measure: Measure, beta: float, logps: jax.Array, reference: jax.Array, tokens: jax.Array
) -> tuple[Mean, Mapping[str, Metric]]:
    return measure(inputs_of(logps, reference, tokens, beta), jnp.ones(len(logps), bool))


trainer = define_trainer(DPOConfig, {"model": "language_model"}, build)
DPOTrainer = python_trainer("dpo", DPOConfig, __name__)
