"""The estimate of the policy's KL to the reference, from the mismatched completions of a whole update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.fit import TreeReader
from rlhf_core.packing import Tree
from rlhf_core.training import Reference
from rlhf_kto.objective import sequence_logps

if TYPE_CHECKING:
    import jax
    from numpy.typing import NDArray

    from rlhf_core import TrainState
    from rlhf_core.models import Definition, Model
    from rlhf_core.packing import Layout, Packed
    from rlhf_core.training import Context


class KLEstimate:
    """Estimate z0 = max(0, mean of log π − log π_ref of every prompt with the next row's completion), nats."""

    def __init__(self, context: Context, model: Model, layout: Layout) -> None:
        config, definition = context.config, model.definition
        given = (model.params, config.frozen_parameters, context.mesh)
        offload = "reference" in config.offload
        self.reference = Reference(*given, offload=offload, definition=definition)
        self._longest = config.max_sequence_length or model.max_positions
        read = partial(_log_ratios, definition)
        self._read = TreeReader(read, layout, context.mesh, per="sequence", say=context.say)

    def __call__(self, params: Any, trees: Sequence[Tree], rows: NDArray[np.int64]) -> float:
        """Estimate the KL of parameters from an update's trees, in order. rows: the number of each in the data."""
        models = {"policy": params, "reference": self.reference.params}
        ratios = self._read(models, mismatched(trees, self._longest))
        # Where an epoch ends within the update, a row may follow itself.
        others = rows != np.roll(rows, -1)
        return max(0.0, float(np.sum(ratios[others], dtype=np.float64)) / max(others.sum(), 1))


def _log_ratios(model: Definition, models: Mapping[str, Any], batch: Packed) -> jax.Array:
    policy, reference = (sequence_logps(model, models[name], batch) for name in ("policy", "reference"))
    return policy - reference


def mismatched(trees: Sequence[Tree], longest: int | None) -> list[Tree]:
    """Join every prompt with the completion of the next row, the last with the first's; cut to `longest` tokens."""
    texts = [(tree.branches[0], tree.weights[0]) for tree in trees if tree.weights is not None]
    starts = [int(np.argmax(weights != 0)) for _, weights in texts]
    joined = []
    for i, (own, _) in enumerate(texts):
        following = (i + 1) % len(texts)
        tokens, weights = (array[starts[following] :] for array in texts[following])
        ids = np.concatenate([own[: starts[i]], tokens])[:longest]
        weight = np.concatenate([np.zeros(starts[i], np.float32), weights])[:longest]
        joined.append(Tree(ids[:0], (ids,), (weight,)))
    return joined


class WithEstimate:
    """Values of an update's rows: those that they have without it, and the KL estimate before the update, `kl`."""

    def __init__(self, values: Any, estimate: KLEstimate) -> None:
        self._values, self._estimate = values, estimate
        self.names, self.needs_state = {**values.names, "kl": "sequence"}, True
        self.held = {**values.held, "starting model": estimate.reference.copied}
        self.snapshot, self.restore = values.snapshot, values.restore

    def add(self, trees: Sequence[Tree], rows: NDArray[np.int64], state: TrainState | None) -> list[Tree]:
        """Return the trees of an update with their values."""
        assert state is not None
        kl = np.full(1, self._estimate(state.params, trees, rows), np.float32)
        known = self._values.add(trees, rows, state)
        return [tree._replace(sequence_values={**tree.sequence_values, "kl": kl}) for tree in known]
