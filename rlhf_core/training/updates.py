"""Updates from a fixed dataset, with the rows and the attention that suit its trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_core import data
from rlhf_core.config.warnings import batch_warnings
from rlhf_core.fit.batches import DatasetUpdates, choose_row_layout
from rlhf_core.training.attention import choose_attention
from rlhf_core.training.open import warn

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.fit.batches import EncodedRows
    from rlhf_core.models import Model
    from rlhf_core.packing.trees import Trees
    from rlhf_core.stage import Stage


def dataset_updates(
    model: Model,
    config: TrainerConfig,
    stage: Stage,
    rows: EncodedRows,
    trees: Trees,
    *,
    reads_tokens: bool,
    sequence_names: Sequence[str] = (),
    group: int = 1,
) -> tuple[Model, DatasetUpdates]:
    """Prepare training on `trees`: return the model with its attention chosen, and the source of updates.

    rows: what the trees were made of, one row each. reads_tokens: see `choose_row_layout`; the rest: see
    `DatasetUpdates`. Raises InputError naming the rows with tokens that the model has no embedding for.
    """
    data.require_vocabulary(trees, rows.where, model.definition.vocab_size)
    warn(stage, batch_warnings(config, len(trees)))
    width = model.definition.hidden_size
    layout = choose_row_layout(trees, config, stage.devices(), width, reads_tokens=reads_tokens)
    model = choose_attention(model, config, stage, trees, layout, group=group)
    updates = DatasetUpdates(
        trees, config, layout, seed=stage.seed, data=rows, sequence_names=sequence_names, group=group
    )
    return model, updates
