"""Products of the rows of every expert in kernels for GPUs and TPUs, which multiply a row with its own expert alone."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from rlhf_core.models import platform

TILE = 512
"""The most rows, and columns, of a block of a gradient on TPUs."""
TILE_ROWS = 128


@dataclass(frozen=True)
class PallasExperts:
    """Compute the products of the rows of every expert: on GPUs in kernels for Triton; on TPUs, where XLA has a kernel
    for the products, the gradient in that of JAX's megablox.
    """

    def rows(
        self, x: jax.Array, weights: jax.Array, counts: jax.Array, *, transposed: bool = False
    ) -> jax.Array:
        """Compute x[rows of e] · weights[e] for every expert."""
        if platform() == "gpu":
            # Pallas takes a second to import.
            from rlhf_kernels.experts_gpu import expert_rows

            return expert_rows(x, weights, counts, transposed=transposed)
        return lax.ragged_dot(x, weights.swapaxes(1, 2) if transposed else weights, counts)

    def gradient(self, x: jax.Array, d_y: jax.Array, counts: jax.Array) -> jax.Array:
        """Compute x[rows of e]ᵀ · d_y[rows of e] for every expert, in float32."""
        if platform() == "gpu":
            from rlhf_kernels.experts_gpu import expert_kernels

            return expert_kernels(x, d_y, counts)
        return gradient_on_tpu(x, d_y, counts)


def gradient_on_tpu(x: jax.Array, d_y: jax.Array, counts: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Compute x[rows of e]ᵀ · d_y[rows of e] for every expert, float32 [experts, in, out].

    x: [N, in], d_y: [N, out], sorted by expert. counts: int32 [experts].
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    x, d_y = (jnp.pad(each, ((0, -len(each) % TILE_ROWS), (0, 0))) for each in (x, d_y))
    tiles = (TILE_ROWS, min(TILE, x.shape[1]), min(TILE, d_y.shape[1]))
    made: jax.Array = tgmm(x.T, d_y, counts, jnp.float32, tiles, interpret=interpret)
    return made
