"""Updates over pairs, whose references are read before the first one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from rlhf_core import TrainState
    from rlhf_core.fit.batches import TreeFeed, Update
    from rlhf_core.packing.rows import Packed
    from rlhf_dpo.reference import Reference


class PairFeed:
    """A `TreeFeed` over the pairs, and the references that its trees carry; see `rlhf_core.fit.batches.Feed`."""

    def __init__(self, trees: TreeFeed, reference: Reference) -> None:
        self._trees, self._reference = trees, reference
        self.total, self.updates_per_epoch = trees.total, trees.updates_per_epoch
        self.data = trees.data

    def shapes(self) -> Sequence[Packed]:
        return self._trees.shapes()

    def needs_state(self, step: int) -> bool:
        return not self._reference.known

    def update(self, step: int, state: TrainState) -> Update:
        self._reference.ensure(state)
        return self._trees.update(step)

    def drawn(self, step: int, host: Mapping[str, Any]) -> np.ndarray:
        return self._trees.drawn(step, host)

    def snapshot(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return self._trees.snapshot(step)[0], self._reference.snapshot()

    def restore(self, step: int, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        self._trees.restore(step, host, arrays)
        self._reference.restore(arrays)
