"""Estimate what a pass over a micro-batch takes in a device's memory, without compiling it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from rlhf_core.logprobs import CHUNK_BYTES_ACCELERATOR, CHUNK_TOKENS
from rlhf_core.mesh import ROW_AXES
from rlhf_core.models import Decoder, Definition
from rlhf_core.models.attention import attend_blocks
from rlhf_core.runtime.devices import platform
from rlhf_core.training.memory import SCORING_WIDTHS, remat_of, saved_bytes

FORWARD_SHARE = 0.6
"""Of what a layer computes with, what is in memory at the same time if nothing is saved for a backward pass."""
MERGED = 0.85
"""Of what layers save, what the compiler keeps; the rest it computes again from its neighbours."""


def pass_bytes(
    definition: Definition, shape: tuple[int, int], mesh: Mapping[str, int], *, trains: bool
) -> int:
    """Estimate the bytes per device that a pass over a micro-batch takes besides parameters and gradients.

    shape: rows and time of the micro-batch. mesh: {axis: devices}. trains: forward and backward; else forward alone.
    A device computes its rows, or with `context` a part of each, and with `tensor` its heads, columns of MLPs and
    words. In memory at the same time are what all layers save, what one layer computes with, its weights gathered, and
    what the head reads.
    """
    rows, cut = -(-shape[0] // math.prod(mesh.get(axis, 1) for axis in ROW_AXES)), mesh.get("context", 1)
    time = -(-shape[1] // cut)
    part = _share_of(definition, mesh["tensor"])
    if not isinstance(part, Decoder):
        return (
            saved_bytes(part, (rows, time)) if trains else rows * time * part.hidden_size * SCORING_WIDTHS * 4
        )
    if cut > 1:  # attention is then in blocks
        part = part.computing(attention=part.attention or attend_blocks)
    remat = remat_of(definition, shape)
    layer, kept = 0, 0
    for config, layers in part.config.stacks.values():
        alike = replace(part, config=config)
        whole, saved = (_layer_bytes(alike, (rows, time), each, platform()) for each in ("none", remat))
        if cut > 1:  # keys and values of whole rows, and their gradients
            whole += (1 + trains) * 2 * 2 * rows * shape[1] * config.num_kv_heads * config.head_dim
        layer, kept = max(layer, whole), kept + saved * len(layers)
    inside = layer * FORWARD_SHARE if not trains else 0 if remat == "none" else layer
    return round(MERGED * (kept * trains + inside) + _head_bytes(part, rows * time, trains))


def _head_bytes(part: Definition, tokens: int, trains: bool) -> int:
    """Estimate what the head takes: its weights in the compute dtype, their gradient, and logits of some tokens."""
    if part.head == "score":
        return 0
    words = part.vocab_size
    logits = 4 * min(tokens * words, max(CHUNK_BYTES_ACCELERATOR // 4, CHUNK_TOKENS * words))
    return words * part.hidden_size * (6 if trains else 2) + 2 * logits


@cache
def _layer_bytes(part: Decoder, shape: tuple[int, int], remat: str, platform: str) -> int:
    """Count the bytes that each layer saves: those of two layers less those of one.

    platform: what the default dtype of a family depends on.
    """

    def saved(layers: int) -> int:
        c = part.config
        windows, ropes = (2 * c.windows)[:layers], (2 * c.layer_ropes)[:layers]
        # By itself, a layer that attends to keys and values of another one has its own.
        config = replace(c, num_layers=layers, windows=windows, layer_ropes=ropes, source=None)
        changed = replace(part, config=config).computing(remat=remat)
        return saved_bytes(changed, shape)

    return saved(2) - saved(1)


def _share_of(definition: Definition, tensor: int) -> Definition:
    """Return the model of one of `tensor` devices that share each layer."""
    if tensor == 1 or not isinstance(definition, Decoder):
        return definition
    names = ("num_heads", "num_kv_heads", "intermediate_size", "shared_size", "vocab_size")
    c = definition.config

    def divided(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: max(n // tensor, 1) if name in names and n else n for name, n in fields.items()}

    variants = tuple((kind, tuple(divided(dict(fields)).items())) for kind, fields in c.variants)
    whole = {name: getattr(c, name) for name in names}
    return replace(definition, config=replace(c, **divided(whole), variants=variants))
