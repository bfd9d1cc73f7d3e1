"""Choose the attention that suits the rows of a stage."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import Mesh

from rlhf_core.contracts import ATTENTION
from rlhf_core.errors import InputError
from rlhf_core.mesh import rows_per_device
from rlhf_core.models import Blocks, Decoder, attend_blocks, find_kernels, in_blocks, visible_blocks
from rlhf_core.models.config import remat_policy
from rlhf_core.packing.rows import Packed, pack
from rlhf_core.runtime.machine import device_memory, format_bytes, platform

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.mesh import AnyMesh
    from rlhf_core.models import Definition, Model
    from rlhf_core.packing.rows import Layout, Tree
    from rlhf_core.stage import Stage

WORTH_BLOCKS = 0.7
"""Loops over blocks are faster on CPUs while they visit at most this share of the causal blocks."""
SIZES = (64, 128, 256)
"""Block sizes to try: queries, and keys, per block."""
VISIT = 1536
"""Overhead of visiting a block, in query-key products."""
SAMPLE = 64  # trees packed to measure the share
DENSE_BYTES = 10
"""Bytes that dense attention takes per query, key before it, and head, in a backward pass."""
DENSE_SHARE = 0.25
"""Of a device's memory, what dense attention may take; the rest is for training state and other activations."""
FASTER_FROM: dict[str, int] = {}
"""{kind of device in JAX's words: row length from which `pallas` was measured to be faster than dense attention}."""
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
        chosen = _named_attention(model, config, stage)
        name = getattr(chosen, "__name__", asked.name)
        why = "as asked"
        dense_suits = False
    else:
        found = _suited_attention(model, stage, layout)
        if found is None:
            return model
        chosen, why = found
        name = "pallas"
        dense_suits = platform() == "cpu" and stage.devices().shape["context"] == 1
    if chosen is attend_blocks:
        batches = pack(trees[:SAMPLE], layout, group=group)
        block = fastest_block(batches)
        share = visited_share(batches, block)
        if dense_suits and share > WORTH_BLOCKS:
            return model
        chosen = in_blocks(block)
        name, why = f"attend_blocks, {block} x {block}", f"{share:.0%} of blocks are visited"
    log.info("stage '%s': attention %s (%s)", stage.name, name, why)
    return model.computing(attention=chosen)


def _named_attention(model: Model, config: TrainerConfig, stage: Stage) -> Any:
    """Return the attention that a config names. Raises InputError where the model has sinks that it cannot compute."""
    asked = config.attention
    chosen = stage.registry.get(ATTENTION, asked.name, **asked.options)
    sinks = isinstance(model.definition, Decoder) and model.definition.config.sinks
    if sinks and "sinks" not in signature(chosen).parameters:
        raise InputError(
            f"stage '{stage.name}'.attention: '{asked.name}' cannot compute the sinks of this model; leave it out, "
            'or write "xla", "blocks" or "pallas"'
        )
    return chosen


def _suited_attention(model: Model, stage: Stage, layout: Layout) -> tuple[Any, str] | None:
    """Return the attention that the devices compute such rows with, and why; None: dense attention."""
    mesh = stage.devices()
    cut = mesh.shape["context"] > 1
    if platform() != "cpu":
        cuts = "mesh.context cuts rows" if cut else None
        reason = cuts or why_kernels(model.definition, layout, mesh)
        return None if reason is None else (find_kernels(ATTENTION, stage.registry) or attend_blocks, reason)
    # Several devices would have to agree in every layer on the blocks to visit, unless each computes its own queries.
    if (mesh.size > 1 and not cut) or not isinstance(model.definition, Decoder):
        return None
    return attend_blocks, "few blocks are visited"


def why_kernels(definition: Definition, layout: Layout, mesh: AnyMesh) -> str | None:
    """Return why rows of this layout take kernels on an accelerator, or blocks where none are installed; None: dense
    attention suits them.
    """
    if not isinstance(definition, Decoder):
        return None
    config = definition.config
    heads = -(-config.num_heads // mesh.shape["tensor"])
    layers = config.num_layers if remat_of(definition, (max(layout.rows), max(layout.time))) == "none" else 1
    logits = max(
        DENSE_BYTES * rows_per_device(mesh, rows) * heads * time**2 // 2 * layers
        for rows, time in zip(layout.rows, layout.time, strict=True)
    )
    memory = device_memory()
    if memory is not None and logits > DENSE_SHARE * memory:
        return f"dense attention would take {format_bytes(logits)} of each device"
    faster = FASTER_FROM.get(mesh.devices.flat[0].device_kind) if isinstance(mesh, Mesh) else None
    if faster is not None and max(layout.time) >= faster:
        return f"faster on this device from rows of {faster} tokens"
    return None


def remat_of(definition: Definition, shape: tuple[int, int]) -> str:
    """Return what "auto" stands for on a micro-batch of rows × time tokens, else the setting."""
    if not isinstance(definition, Decoder):
        return "none"
    if definition.remat != "auto":
        return definition.remat
    tokens = shape[0] * shape[1]
    itemsize = definition.compute_dtype.itemsize
    return "none" if remat_policy(definition.config, "auto", tokens, itemsize) is None else "dots"


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
