"""What the backward pass computes again instead of keeping it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from rlhf_core.models.config import DecoderConfig

REMAT_ABOVE = 2 << 30
"""Bytes of saved activations from which remat "auto" recomputes."""


def policy(config: DecoderConfig, tokens: int, itemsize: int) -> Callable[..., Any] | None:
    """What of a layer is kept for the backward pass over `tokens` tokens of `itemsize` bytes a number; None: all."""
    name = config.remat
    if name == "auto":
        widths = (
            8 * config.hidden_size
            + 4 * config.num_heads * config.head_dim
            + 4 * config.intermediate_size * max(config.experts_per_token, 1)
        )
        saved = tokens * config.num_layers * widths * itemsize
        name = "dots" if saved > REMAT_ABOVE else "none"
    if name == "none":
        return None
    policies = jax.checkpoint_policies
    return policies.dots_with_no_batch_dims_saveable if name == "dots" else policies.nothing_saveable
