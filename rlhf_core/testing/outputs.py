"""What a loss must return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from rlhf_core.contracts import LossOutput
from rlhf_core.testing.findings import Broken


def require_output(out: Any, shape: tuple[int, ...], element: str) -> None:
    """Raise Broken where `out` is no LossOutput with one value an element."""
    if not isinstance(out, LossOutput):
        raise Broken(f"it returned {type(out).__name__}; return LossOutput(values, {{name: metric}})")
    if jnp.shape(out.loss) != shape:
        raise Broken(
            f"the loss has shape {list(jnp.shape(out.loss))}; return one value a {element}, {list(shape)}: the "
            "trainer masks, weighs and averages"
        )
    if not isinstance(out.metrics, Mapping):
        raise Broken(f"its metrics are a {type(out.metrics).__name__}; return a dict of names and arrays")
