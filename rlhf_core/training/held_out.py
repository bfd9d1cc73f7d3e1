"""Evaluations on the rows of `eval_data`, packed once for the whole run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from rlhf_core import data
from rlhf_core.fit.batches import choose_row_layout
from rlhf_core.fit.evaluation import EvaluationMetrics, evaluator
from rlhf_core.reading import TreeReader, pack_numbered

if TYPE_CHECKING:
    import jax
    from numpy.typing import NDArray

    from rlhf_core.fit.batches import EncodedRows
    from rlhf_core.models import Model
    from rlhf_core.packing.rows import Packed
    from rlhf_core.packing.trees import Trees
    from rlhf_core.state import TrainState
    from rlhf_core.step import Objective
    from rlhf_core.training.context import Context


class HeldOut:
    """Evaluate on the first `max_evaluation_steps` batches of `eval_batch_size` rows, or on all.

    trees: of these rows alone. layout: the rows that they are packed in.
    """

    def __init__(
        self,
        context: Context,
        model: Model,
        rows: EncodedRows,
        trees: Trees,
        *,
        reads_tokens: bool,
        sequence_names: Sequence[str] = (),
        group: int = 1,
        stored: Callable[[Any], Any] | None = None,
    ) -> None:
        """Choose the rows. Arguments: as for `Context.updates`.

        stored: makes the parameters that are read from a state's; None: `model.as_stored`.
        Raises InputError naming the rows with tokens that the model has no embedding for.
        """
        config = context.config
        data.require_vocabulary(trees, rows.where, model.definition.vocab_size)
        self._batch_size = config.eval_batch_size or config.total_batch_size
        if config.max_evaluation_steps is not None:
            trees = trees[: self._batch_size * config.max_evaluation_steps]
        self.trees, self._mesh = trees, context.mesh
        width = model.definition.hidden_size
        self.layout: Any = context.on_mesh(
            partial(choose_row_layout, trees, config, context.mesh, width, reads_tokens=reads_tokens)
        )
        self._sequence_names, self._group = sequence_names, group
        self.where = rows.where
        self._stored, self._say = stored or model.as_stored, context.say

    def evaluator(
        self, objective: Objective, values: Mapping[str, Literal["token", "sequence"]] | None = None
    ) -> Callable[[TrainState], EvaluationMetrics]:
        """Make what `Context.evaluations` takes for a field: from a state to the objective's loss, metrics and values.

        values: {name: "token" or "sequence"} of the objective's values that become those of the rows, each a mean. It
        reads the parameters as they would be saved, see `stored`.
        """

        def batches() -> list[Packed]:
            return self._batches  # packed when they are first read: a build computes nothing

        return evaluator(
            objective,
            self._mesh,
            batches,
            where=self.where,
            values=values,
            stored=self._stored,
            say=self._say,
        )

    def reader(self, function: Callable[[Any, Packed], jax.Array]) -> Callable[[Any], NDArray[Any]]:
        """Make the function from parameters to a value per sequence of `trees`, [branches]; see `TreeReader`."""
        reader = TreeReader(function, self.layout, self._mesh, per="sequence", say=self._say)
        return lambda params: reader.read(params, self._batches)

    @cached_property
    def _batches(self) -> list[Packed]:
        names, group = self._sequence_names, self._group
        packed = pack_numbered(
            self.trees, self.layout, chunk=self._batch_size, sequence_names=names, group=group
        )
        return list(packed)
