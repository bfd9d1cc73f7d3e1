"""What differs between a decoder's layers, as arrays to scan over."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlhf_core.models.config import DecoderConfig


class Kind(NamedTuple):
    """None: nothing differs."""

    window: jax.Array | None
    """int32 [layers], the largest number where a layer sees everything."""
    rope: jax.Array | None
    """int32 [layers], which of the config's ropes."""


def kinds(config: DecoderConfig) -> Kind:
    windows = [window or jnp.iinfo(jnp.int32).max for window in config.windows]
    return Kind(
        jnp.asarray(windows, jnp.int32) if any(config.windows) else None,
        jnp.asarray(config.layer_ropes, jnp.int32) if config.layer_ropes else None,
    )
