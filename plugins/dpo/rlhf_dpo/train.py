"""The DPO trainer: model, pairs with their reference log-probabilities, objective and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core import Forecast
from rlhf_core.data import with_values
from rlhf_core.fit import EvaluationMetrics
from rlhf_core.metrics import Mean, Metric, fetch_metrics
from rlhf_core.training import Build, Context, Evaluate, define_trainer, python_trainer
from rlhf_dpo.config import BETA, DPOConfig
from rlhf_dpo.contract import DPO_LOSS, DPOInputs
from rlhf_dpo.objective import inputs_of, objective, pair_loss, sequence_logps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlhf_core import TrainState
    from rlhf_core.models import Model
    from rlhf_core.packing import Tree
    from rlhf_core.training import HeldOut
    from rlhf_dpo.objective import Measure

ROWS: dict[str, Any] = {"reads_tokens": True, "sequence_names": ("tokens",), "group": 2}
"""How pairs lie in rows."""


def open_loss(config: DPOConfig, context: Context) -> tuple[Measure, bool]:
    """Return what measures pairs with the config's loss, and whether it reads a reference. Raises InputError where the
    loss fails.
    """
    component = context.registry.get(DPO_LOSS, config.loss.name, **config.loss.options)
    measure = partial(pair_loss, component, name=config.loss.name)
    logps = jax.ShapeDtypeStruct((2,), jnp.float32)
    context.try_loss(lambda x: measure(DPOInputs(x, x, x, x, x, x, config.beta), x > 0), logps)
    warn_of_unread_options(config, context)
    reads_reference: bool = DPO_LOSS.attribute(component, "reads_reference")
    if not reads_reference:
        line = f"no reference: '{config.loss.name}' compares with none, and none is computed or kept"
        context.check(Forecast, (line,))
    return measure, reads_reference


def build(config: DPOConfig, context: Context) -> Build:
    """Train on the pairs of `config.train_data`, for most losses compared with the model that training starts from."""
    measure, reads_reference = open_loss(config, context)
    model = context.model("lm")
    # With adapters the starting model is in memory anyway, so that its values need not be computed first.
    whole = reads_reference and config.lora is None and not context.is_stream("train_data")
    pairs = pairs_of(context, "train_data", reads_reference=reads_reference, whole=whole)
    model, updates = context.updates(model, pairs, **ROWS)

    def evaluation(field: str) -> Evaluate | None:
        pairs = pairs_of(context, field, reads_reference=reads_reference)
        if pairs is None:
            return None
        rows = context.held_out(model, pairs, **ROWS)
        own_metrics = context.own_metrics(len(rows.trees))
        return PairEvaluation(rows, model, measure, beta=config.beta, own_metrics=own_metrics)

    loss = partial(objective, model.definition, measure, beta=config.beta)
    actions = [context.row_losses(updates, "sequence"), *context.evaluations(evaluation)]
    return Build(model, updates, loss, actions, held=updates.held)


def warn_of_unread_options(config: DPOConfig, context: Context) -> None:
    """Warn of options that are probably not what was meant."""
    if config.loss.name == "robust" and not config.loss.options.get("label_smoothing"):
        context.warn(
            "loss.label_smoothing is 0, which makes 'robust' the same as 'sigmoid'; set it to the share "
            "of flipped labels"
        )
    if config.loss.name == "orpo" and config.beta != BETA:
        context.warn(
            f"beta={config.beta:g}: 'orpo' does not read it; the weight of the odds ratio, which TRL calls beta, is "
            "loss.weight"
        )


def pairs_of(context: Context, field: str, *, reads_reference: bool, whole: bool = False) -> Any:
    """Open the pairs of a field, with the tokens of their completions and, where it is read, their log-probabilities
    under the reference.
    """
    pairs = context.pairs(field, completions=True, margins=False, whole=whole)
    if pairs is None:
        return None
    counted = pairs.map(count_tokens)
    if not reads_reference:
        return counted
    return with_values(counted, "reference", sequence_logps, reads="frozen", what="log-probabilities")


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
        model: Model,
        measure: Measure,
        *,
        beta: float,
        own_metrics: Callable[..., dict[str, float]],
    ) -> None:
        """rows: the held-out pairs, with their values `reference` where the loss reads them.

        own_metrics: further metrics of the implicit rewards, float32 [pairs, 2]; it is also given the other metrics.
        """
        self.rows, self.beta, self.own_metrics, self.stored = rows, beta, own_metrics, model.as_stored
        self.reference = rows.values.get("reference")
        if self.reference is None:
            self._read = rows.reader(partial(sequence_logps, model.definition))
        else:
            self._read = self.reference.read
        self._measure = jax.jit(partial(_measure_pairs, measure, beta))

    @cached_property
    def _tokens(self) -> NDArray[np.float32]:
        """float32 [pairs, 2]: tokens of each completion."""
        return np.stack([tree.sequence_values["tokens"] for tree in self.rows.trees])

    def __call__(self, state: TrainState) -> EvaluationMetrics:
        # The stored values are computed from the state that training starts from, before anything else is.
        reference = None if self.reference is None else self.reference.of(state)
        logps = self._read(self.stored(state.params)).reshape(-1, 2)
        loss, metrics = self._measure(logps, reference, self._tokens)
        rewards = self.beta * (logps if reference is None else logps - reference)
        found = fetch_metrics({**metrics, "loss": loss})
        values = {"chosen": rewards[:, 0], "rejected": rewards[:, 1]}
        return EvaluationMetrics.of(found | self.own_metrics(rewards, found), self.rows.where, values)


def _measure_pairs(
    measure: Measure, beta: float, logps: jax.Array, reference: jax.Array | None, tokens: jax.Array
) -> tuple[Mean, Mapping[str, Metric]]:
    loss, metrics, _ = measure(inputs_of(logps, reference, tokens, beta), jnp.ones(len(logps), bool))
    return loss, metrics


trainer = define_trainer(DPOConfig, {"model": "language_model"}, build)
DPOTrainer = python_trainer("dpo", DPOConfig, __name__)
