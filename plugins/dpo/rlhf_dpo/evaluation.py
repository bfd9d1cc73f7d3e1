"""Evaluate on held-out pairs: the loss and metrics of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlhf_core.metrics import Mean, Metric, fetch_metrics
from rlhf_dpo.objective import inputs_of

if TYPE_CHECKING:
    from rlhf_core import TrainState
    from rlhf_dpo.objective import Measure
    from rlhf_dpo.reference import Reader, ReferenceLogps


class Evaluation:
    """Compute the metrics of held-out pairs, each counted once, from the state.

    Log-probabilities are gathered and measured together, so that packing, batch size and mesh change nothing but
    rounding.
    """

    def __init__(
        self,
        reader: Reader,
        reference: ReferenceLogps,
        measure: Measure,
        *,
        beta: float,
        stored: Callable[[Any], Any] = lambda params: params,
        own_metrics: Callable[[Any], dict[str, float]] = lambda rewards: {},
    ) -> None:
        """stored: converts parameters to those that are saved, such as `Model.as_stored`.

        own_metrics: further metrics of the implicit rewards, float32 [pairs, 2].
        """
        self.beta, self.own_metrics = beta, own_metrics
        self.reader, self.reference, self.stored = reader, reference, stored
        self._measure = jax.jit(partial(_measure_pairs, measure, beta))

    def __call__(self, state: TrainState) -> dict[str, float]:
        self.reference.ensure(state)
        pairs, which = self.reader.pairs, self.reader.which
        logps = self.reader(self.stored(state.params))
        loss, metrics = self._measure(logps, pairs.reference[which], pairs.tokens[which])
        rewards = self.beta * (logps - pairs.reference[which])
        return fetch_metrics({**metrics, "loss": loss}) | self.own_metrics(rewards)


def _measure_pairs(
    measure: Measure, beta: float, logps: jax.Array, reference: jax.Array, tokens: jax.Array
) -> tuple[Mean, Mapping[str, Metric]]:
    return measure(inputs_of(logps, reference, tokens, beta), jnp.ones(len(logps), bool))
