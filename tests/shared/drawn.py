"""Parameters drawn by NumPy: compiling how a model draws its own takes longer than most tests compute."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from rlhf_core.mesh import with_shardings
from rlhf_core.models import Model


def params_of(definition: Any, seed: int, scale: float) -> Any:
    """Draw parameters of which none is 0 or 1: kernels and embeddings with the deviation `scale`, others around 0.3."""
    draw = np.random.default_rng(seed)

    def leaf(path: Any, leaf: Any) -> np.ndarray:
        of_products = path[-1].key in ("kernel", "embedding")
        mean, deviation = (0.0, scale) if of_products else (0.3, 0.1)
        return (mean + deviation * draw.standard_normal(leaf.shape)).astype(np.float32)

    return jax.device_put(jax.tree.map_with_path(leaf, definition.abstract_params()))


def with_adapters_drawn(model: Any, seed: int, scale: float) -> Any:
    """Return the model with adapters that change something: B is no longer zero."""
    draw = np.random.default_rng(seed)

    def leaf(path: Any, leaf: Any) -> Any:
        if path[-1].key != "lora_b":
            return leaf
        return jax.device_put(draw.normal(0, scale, leaf.shape).astype(np.float32), leaf.sharding)

    return model.with_params(jax.tree.map_with_path(leaf, model.params))


def of_shapes(definition: Any, mesh: Any) -> Model:
    """Return a model whose parameters are shapes on a mesh, for what is compiled and not run."""
    params = with_shardings(definition.abstract_params(), definition.shardings(mesh))
    return Model(definition, params, None, {}, None, mesh)
