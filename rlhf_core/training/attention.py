"""Choose the attention that suits the rows of a stage."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlhf_core.contracts import ATTENTION
from rlhf_core.models import DECODER
from rlhf_core.models.attention_blocks import attend_blocks, in_blocks
from rlhf_core.models.attention_plan import Blocks, visible_blocks
from rlhf_core.packing.rows import Packed, pack
from rlhf_core.runtime.devices import platform

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.models import Model
    from rlhf_core.packing.rows import Layout, Tree
    from rlhf_core.stage import Stage

WORTH_BLOCKS = 0.7
"""Loops over blocks are faster on CPUs while they visit at most this share of the causal blocks."""
SIZES = (64, 128, 256)
"""Block sizes to try: queries, and keys, per block."""
VISIT = 1536
"""Overhead of visiting a block, in query-key products."""
SAMPLE = 64  # trees packed to measure the share
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
    """Return the model with the attention that `config.attention` names, or the faster one for these trees.

    trees, layout, group: see `pack`. The choice is logged; it changes results by rounding only.
    """
    asked = config.attention
    if asked.name != "auto":
        chosen = stage.registry.get(ATTENTION, asked.name, **asked.options)
        name, why = getattr(chosen, "__name__", asked.name), "as asked"
    # Several devices would have to agree in every layer on the blocks to visit.
    elif platform() != "cpu" or stage.devices().size > 1 or model.definition.family is not DECODER:
        return model
    else:
        chosen = attend_blocks
    if chosen is attend_blocks:
        batches = pack(trees[:SAMPLE], layout, group=group)
        block = fastest_block(batches)
        share = visited_share(batches, block)
        if asked.name == "auto" and share > WORTH_BLOCKS:
            return model
        chosen = in_blocks(block)
        name, why = f"attend_blocks, {block} x {block}", f"{share:.0%} of blocks are visited"
    log.info("stage '%s': attention %s (%s)", stage.name, name, why)
    return model.computing(attention=chosen)


def fastest_block(batches: Sequence[Packed]) -> int:
    """Return the block size with the lowest estimated time over these rows."""

    def cost(block: int) -> int:
        return sum(
            visited * (VISIT + batch.rows.tokens.shape[0] * block * block)
            for batch in batches
            for visited, _ in [_count_blocks(batch, block)]
        )

    return min(SIZES, key=cost)


def visited_share(batches: Sequence[Packed], block: int) -> float:
    """Return the share of the causal blocks that is visited; 1.0 where a row is one block."""
    visited, causal = np.sum([_count_blocks(batch, block) for batch in batches], axis=0).tolist()
    return visited / causal if causal > len(batches) else 1.0


def _count_blocks(batch: Packed, block: int) -> tuple[int, int]:
    """Count the visited pairs of query and key blocks, and all causal pairs."""
    until, positions = (np.asarray(x) for x in (batch.rows.visible_until, batch.rows.positions))
    blocks = Blocks(block, block)
    fill = ((0, 0), (0, blocks.fill(until.shape[1])))
    visible = visible_blocks(np.pad(positions, fill), np.pad(until, fill), None, blocks).any(0)
    return int(visible.sum()), len(visible) * (len(visible) + 1) // 2
