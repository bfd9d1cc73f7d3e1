"""Held-out pairs: the loss and metrics of training, and what the scores of all of them say together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rlhf_core import PairInputs
from rlhf_core.fit.batches import evaluation_batches
from rlhf_core.fit.in_turn import in_turn
from rlhf_core.mesh import replicated
from rlhf_core.metrics import read
from rlhf_core.objective import sequence_scores
from rlhf_reward.measures import measures

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core import TrainState
    from rlhf_core.data import Pairs, Records
    from rlhf_core.models import Definition
    from rlhf_reward.config import RewardConfig
    from rlhf_reward.objective import Measure


class Evaluation:
    """A function of the state: metrics of held-out pairs, each of which counts once.

    The scores are gathered on the host and measured all at once, so that packing, batch size and mesh change nothing
    but rounding. What was found is kept: for the same parameters nothing is computed twice.
    """

    def __init__(
        self,
        pairs: Pairs,
        config: RewardConfig,
        model: Definition,
        mesh: Mesh,
        measure: Measure,
        subsets: Sequence[str | None] = (),
        stored: Callable[[Any], Any] = lambda params: params,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """stored: makes of the state's parameters what is read, such as `Model.as_stored`. say: see `in_turn`.

        subsets: of each pair, see `subsets_of`. `max_evaluation_steps` and `eval_batch_size` are the config's."""
        trees = pairs.trees().changed(
            lambda i, tree: tree._replace(sequence_values={"pair": np.full(2, i, np.float32)})
        )
        self.batches = evaluation_batches(
            trees, config, mesh, model.hidden_size, reads_tokens=False, sequence_names=("pair",), group=2
        )
        count = sum(int((batch.example >= 0).sum()) for batch in self.batches) // 2
        self.pairs = pairs
        self.margins = pairs.margins[:count].astype(np.float32)
        lengths = np.stack([pairs.chosen.lengths, pairs.rejected.lengths], 1)[:count]
        self.same = (pairs.digests[:count, 0] == pairs.digests[:count, 1]) & (lengths[:, 0] == lengths[:, 1])
        self.lengths = lengths - trees.prefixes[:count, None]
        self.subsets = subsets[:count]
        self.mesh = mesh
        self.stored, self.say = stored, say
        self._score = jax.jit(partial(sequence_scores, model), out_shardings=replicated(mesh))
        self._measure = jax.jit(measure)
        self._found: tuple[Any, NDArray[np.float32], dict[str, float]] | None = None

    def __call__(self, state: TrainState) -> dict[str, float]:
        return self._of(state)[1]

    def scores(self, state: TrainState) -> NDArray[np.float32]:
        """Of the chosen and of the rejected reply, float32 [pairs, 2], reward units."""
        return self._of(state)[0]

    def _of(self, state: TrainState) -> tuple[NDArray[np.float32], dict[str, float]]:
        if self._found is None or self._found[0] is not state.params:
            self._found = None  # before the arrays of the last one are needed no more
            scores = self._gather(self.stored(state.params))
            self._found = state.params, scores, self._metrics(scores)
        return self._found[1:]

    def _gather(self, params: Any) -> NDArray[np.float32]:
        scores = np.full((len(self.margins), 2), np.nan, np.float32)
        compute = partial(self._score, params)
        for batch, found in in_turn(compute, self.mesh, self.batches, self.say):
            there = batch.example[:, 0::2] >= 0
            at = batch.sequence_values["pair"][:, 0::2][there].astype(np.intp)
            scores[at] = np.stack([found[:, side::2][there] for side in (0, 1)], 1)
        # Where in its row a sequence lies changes the last bits: replies that are the same must tie.
        scores[self.same, 1] = scores[self.same, 0]
        return scores

    def _metrics(self, scores: NDArray[np.float32]) -> dict[str, float]:
        chosen, rejected = scores[:, 0], scores[:, 1]
        # As a loss gets them in training: what NumPy's arrays lack, `.at` for one, is there.
        pairs = PairInputs(*map(jnp.asarray, (chosen, rejected, self.margins)))
        loss, metrics = self._measure(pairs, np.ones(len(scores), bool))
        return read({**metrics, "loss": loss}) | measures(chosen, rejected, self.lengths, self.subsets)


def subsets_of(records: Records, pairs: Pairs) -> list[str | None]:
    """The text in the column `subset` of the row that each pair comes from, None where it has none; empty without
    such a column.
    """
    if "subset" not in records.columns:
        return []
    values = [records[i].get("subset") for i in pairs.rows.tolist()]
    return [None if value is None or value == "" else str(value) for value in values]


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without what JSON cannot hold: a correlation with something constant."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
