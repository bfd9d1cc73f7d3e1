"""Which attention suits the rows of a stage."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from rlhf_core.attention_kind import ATTENTION
from rlhf_core.models import DECODER
from rlhf_core.models.blockwise import attend_blocks, block_size
from rlhf_core.rows import Packed, pack

if TYPE_CHECKING:
    from rlhf_core.models import Model
    from rlhf_core.options import TrainerConfig
    from rlhf_core.rows import Layout, Tree
    from rlhf_core.stage import Stage

WORTH_BLOCKS = 0.7
"""Share of the blocks at or before the queries that may be visited for loops over them to be the faster way on CPUs."""
SAMPLE = 64  # trees that are tried
log = logging.getLogger("rlhf_core")


def with_attention(
    model: Model,
    config: TrainerConfig,
    stage: Stage,
    trees: Sequence[Tree],
    layout: Layout,
    *,
    group: int = 1,
) -> Model:
    """The model with the attention that `config.attention` names, or that is faster on rows of such trees.

    trees, layout, group: as they go to `pack`. What is chosen is logged; the result is the same to rounding.
    """
    asked, source = config.attention, "as asked"
    if asked.name == "auto":
        # On several devices, which blocks are visited would have to be agreed on in every layer.
        if (
            jax.default_backend() != "cpu"
            or stage.devices().size > 1
            or model.definition.family is not DECODER
        ):
            return model
        share = visited_share(pack(trees[:SAMPLE], layout, group=group))
        chosen, source = attend_blocks, f"{share:.0%} of blocks are visited"
        if share > WORTH_BLOCKS:
            return model
    else:
        chosen = stage.registry.get(ATTENTION, asked.name, **asked.options)
    log.info("stage '%s': attention %s (%s)", stage.name, getattr(chosen, "__name__", asked.name), source)
    return model.computing(attention=chosen)


def visited_share(batches: Sequence[Packed]) -> float:
    """Of all blocks at or before the queries, the share that `blockwise` visits; 1.0 where rows are one block."""
    visited = total = 0
    for batch in batches:
        until = np.asarray(batch.rows.visible_until)
        time = until.shape[1]
        block = block_size(time)
        count = -(-time // block)
        filled = np.pad(until, ((0, 0), (0, count * block - time)))
        last = filled.reshape(len(until), count, block).max((0, 2))
        start = np.arange(count) * block
        visited += int(((last > start[:, None]) & (start <= start[:, None])).sum())
        total += count * (count + 1) // 2
    return visited / total if total > len(batches) else 1.0
