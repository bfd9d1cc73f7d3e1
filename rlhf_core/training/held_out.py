"""Evaluations on the rows of `eval_data`, packed once for the whole run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rlhf_core import data
from rlhf_core.fit.batches import choose_row_layout
from rlhf_core.fit.evaluation import EvaluationMetrics, evaluator
from rlhf_core.reading import TreeReader, pack_numbered
from rlhf_core.training.model_values import ModelValues, StoredValues

if TYPE_CHECKING:
    import jax
    from numpy.typing import NDArray

    from rlhf_core.data import Source
    from rlhf_core.models import Model
    from rlhf_core.packing.rows import Packed
    from rlhf_core.packing.trees import Tree
    from rlhf_core.state import TrainState
    from rlhf_core.step import Objective
    from rlhf_core.training.context import Context


class HeldOut:
    """Evaluate on the first `max_evaluation_steps` batches of `eval_batch_size` rows, or on all.

    trees: of these rows alone. layout: the rows that they are packed in. values: {name: those of `with_values`}.
    """

    def __init__(
        self,
        context: Context,
        model: Model,
        source: Source,
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
        trees = source.trees
        self.where: Callable[[int], str] = source.sample.where
        data.require_vocabulary(trees, self.where, model.definition.vocab_size)
        self._batch_size = config.eval_batch_size or config.total_batch_size
        if config.max_evaluation_steps is not None:
            trees = trees[: self._batch_size * config.max_evaluation_steps]
        self.trees, self._mesh = trees, context.mesh
        width = model.definition.hidden_size
        self.layout: Any = context.on_mesh(
            partial(choose_row_layout, trees, config, context.mesh, width, reads_tokens=reads_tokens)
        )
        self._sequence_names, self._group = sequence_names, group
        self._stored = stored or model.as_stored
        self._say = context.say
        self._rows = source.numbers[: len(trees)]
        self._packed: list[Packed] | None = None
        self._values: ModelValues | None = None
        if source.values:
            which = np.arange(len(trees))
            self._values = ModelValues(context, source, model, self.layout, group=group, which=which)

    @property
    def values(self) -> Mapping[str, StoredValues]:
        """The frozen values of `with_values`, by name."""
        return {} if self._values is None else self._values.stored

    def evaluator(
        self, objective: Objective, values: Mapping[str, Literal["token", "sequence"]] | None = None
    ) -> Callable[[TrainState], EvaluationMetrics]:
        """Make what `Context.evaluations` takes for a field: from a state to the objective's loss, metrics and values.

        values: {name: "token" or "sequence"} of the objective's values that become those of the rows, each a mean. It
        reads the parameters as they would be saved, see `stored`.
        """

        def batches() -> list[Packed]:
            assert self._packed is not None
            return self._packed

        evaluate = evaluator(
            objective,
            self._mesh,
            batches,
            where=self.where,
            values=values,
            stored=self._stored,
            say=self._say,
        )

        def evaluate_packed(state: TrainState) -> EvaluationMetrics:
            self._pack(state)
            return evaluate(state)

        return evaluate_packed

    def reader(self, function: Callable[[Any, Packed], jax.Array]) -> Callable[[Any], NDArray[Any]]:
        """Make the function from parameters to a value per sequence of `trees`, [branches]; see `TreeReader`."""
        reader = TreeReader(function, self.layout, self._mesh, per="sequence", say=self._say)

        def read(params: Any) -> NDArray[Any]:
            found: NDArray[Any] = reader.read(params, self._plain)
            return found

        return read

    def _pack(self, state: TrainState) -> None:
        """Pack the rows before the first evaluation: a build computes nothing; with values of each state again."""
        if self._values is None:
            self._packed = self._plain
        elif self._packed is None or self._values.live:
            trees = self._values.add(self.trees, self._rows, state)
            self._packed = self._batches(trees, self._values.names)

    @cached_property
    def _plain(self) -> list[Packed]:
        """The rows without values of models."""
        return self._batches(self.trees, {})

    def _batches(self, trees: Sequence[Tree], added: Mapping[str, str]) -> list[Packed]:
        """Pack trees. added: {name: "sequence" or "token"} of values that they carry besides those of their data."""
        of_sequences = [name for name, per in added.items() if per == "sequence"]
        packed = pack_numbered(
            trees,
            self.layout,
            chunk=self._batch_size,
            sequence_names=(*self._sequence_names, *of_sequences),
            token_names=[name for name, per in added.items() if per == "token"],
            group=self._group,
        )
        return list(packed)
