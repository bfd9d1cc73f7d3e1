"""Which attention suits the rows of a stage."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from rlhf_core.contracts import ATTENTION
from rlhf_core.models import DECODER
from rlhf_core.models.attention_blocks import attend_blocks, in_blocks
from rlhf_core.packing.rows import Packed, pack

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.models import Model
    from rlhf_core.packing.rows import Layout, Tree
    from rlhf_core.stage import Stage

WORTH_BLOCKS = 0.7
"""Share of the blocks at or before the queries that may be visited for loops over them to be the faster way on CPUs."""
SIZES = (64, 128, 256)
"""Queries, and keys, of a block that are tried."""
VISIT = 1536
"""What a step of the loops over blocks takes beside its products, in products of queries with keys."""
SAMPLE = 64  # trees that are tried
log = logging.getLogger("rlhf_core")


def choose_attention(
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
    asked = config.attention
    if asked.name != "auto":
        chosen = stage.registry.get(ATTENTION, asked.name, **asked.options)
        name, why = getattr(chosen, "__name__", asked.name), "as asked"
    # On several devices, which blocks are visited would have to be agreed on in every layer.
    elif jax.default_backend() != "cpu" or stage.devices().size > 1 or model.definition.family is not DECODER:
        return model
    else:
        chosen = attend_blocks
    if chosen is attend_blocks:
        batches = pack(trees[:SAMPLE], layout, group=group)
        block = suited_block(batches)
        share = visited_share(batches, block)
        if asked.name == "auto" and share > WORTH_BLOCKS:
            return model
        chosen = in_blocks(block)
        name, why = f"attend_blocks, {block} x {block}", f"{share:.0%} of blocks are visited"
    log.info("stage '%s': attention %s (%s)", stage.name, name, why)
    return model.computing(attention=chosen)


def suited_block(batches: Sequence[Packed]) -> int:
    """Queries, and keys, of a block with which `blockwise` takes least time over these rows."""

    def cost(block: int) -> int:
        return sum(
            visited * (VISIT + batch.rows.tokens.shape[0] * block * block)
            for batch in batches
            for visited, _ in [_visits(batch, block)]
        )

    return min(SIZES, key=cost)


def visited_share(batches: Sequence[Packed], block: int) -> float:
    """Of all blocks at or before the queries, the share that `blockwise` visits; 1.0 where rows are one block."""
    visited, every = np.sum([_visits(batch, block) for batch in batches], axis=0).tolist()
    return visited / every if every > len(batches) else 1.0


def _visits(batch: Packed, block: int) -> tuple[int, int]:
    """Pairs of blocks that are visited, and all of those at or before the queries."""
    until = np.asarray(batch.rows.visible_until)
    count = -(-until.shape[1] // block)
    filled = np.pad(until, ((0, 0), (0, count * block - until.shape[1])))
    last = filled.reshape(len(until), count, block).max((0, 2))
    start = np.arange(count) * block
    return int(((last > start[:, None]) & (start <= start[:, None])).sum()), count * (count + 1) // 2
