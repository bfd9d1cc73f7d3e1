"""Blocks of the vocabulary: logits of all tokens for some ids at a time.

Kernels lie as [D, parts, ids], one part for each device of the mesh's axis `tensor`, which shards the vocabulary: a
block takes the same ids of every part, so that no device needs another's columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

BLOCK_BYTES = 32 * 2**20
"""Bytes of one model's float32 logits at a time, per device."""
BLOCK_IDS = 128
"""The size of a block is a multiple of this."""
LOWEST = float(jnp.finfo(jnp.float32).min) / 4
"""Below every logit, but finite: it is multiplied by zeros, which must stay 0."""


class Cap(NamedTuple):
    """What logits go through after the product: softcap · tanh(x / softcap), unless None, then / temperature."""

    softcap: float | None
    temperature: float


def in_parts(kernel: jax.Array) -> jax.Array:
    """Cut the unembedding [D, V] into the parts that devices hold, [D, parts, V / parts]."""
    mesh = _mesh(kernel)
    parts = 1 if mesh is None or kernel.shape[1] % mesh.shape["tensor"] else mesh.shape["tensor"]
    return kernel.reshape(kernel.shape[0], parts, -1)


def gathered(kernel: jax.Array, dtype: Any) -> jax.Array:
    """Gather along `fsdp`, in the dtype that it is multiplied in, what `in_parts` returned; as it is on one device."""
    mesh = _mesh(kernel)
    return kernel if mesh is None else _placed(kernel.astype(dtype), mesh, None)


def sharded_gradient(d_kernel: jax.Array) -> jax.Array:
    """Shard the gradient of what `in_parts` returned like a parameter: devices then exchange their own parts."""
    mesh = _mesh(d_kernel)
    divides = mesh is not None and d_kernel.shape[0] % mesh.shape["fsdp"] == 0
    return _placed(d_kernel, mesh, "fsdp" if divides else None)


def block_size(tokens: int, kernel: jax.Array) -> int:
    """Choose the ids per block of each part: BLOCK_BYTES of logits per device, but at least BLOCK_IDS ids."""
    mesh, ids = _mesh(kernel), kernel.shape[2]
    # Rows are also sharded over `data`, unless the caller maps over its parts: here that cannot be told.
    on_device = -(-tokens // (1 if mesh is None else mesh.shape["fsdp"]))
    largest = max(BLOCK_IDS, BLOCK_BYTES // (4 * max(on_device, 1)))
    even = math.ceil(ids / math.ceil(ids / largest))
    return min(ids, math.ceil(even / BLOCK_IDS) * BLOCK_IDS)


def fold(ids: int, size: int, one: Callable[[Any, Any, int], Any], start: Any) -> Any:
    """Fold `one(carry, first id, ids)` over blocks of each part, the last of which may be smaller."""
    whole, done = ids // size, start
    if whole == 1:
        done = one(done, 0, size)
    elif whole:
        done = lax.fori_loop(0, whole, lambda i, carry: one(carry, i * size, size), done)
    return one(done, whole * size, ids % size) if ids % size else done


def cut(kernel: jax.Array, first: Any, ids: int) -> jax.Array:
    """Take a block of every part, [D, parts, ids]."""
    return lax.dynamic_slice_in_dim(kernel, first, ids, axis=2)


def capped(hidden: jax.Array, weights: jax.Array, cap: Cap) -> tuple[jax.Array, jax.Array | None]:
    """Compute logits, float32 [N, parts, ids], and tanh(x / softcap) for the backward pass.

    hidden: float32 or bfloat16 [N, D]. Products are computed in its dtype and summed in float32, as those of
    `rlhf_core.logprobs.token_logps` are.
    """
    product = _product("nd,dv->nv", hidden, _joined(weights).astype(hidden.dtype))
    product = product.reshape(len(hidden), *weights.shape[1:])
    if cap.softcap is None:
        return product / cap.temperature, None
    tanh = jnp.tanh(product / cap.softcap)
    return tanh * (cap.softcap / cap.temperature), tanh


def d_uncapped(d_logits: jax.Array, tanh: jax.Array | None, cap: Cap) -> jax.Array:
    """Return the cotangent of the product from that of the logits."""
    if tanh is not None:
        d_logits = d_logits * (1.0 - jnp.square(tanh))
    return d_logits / cap.temperature


class Normalizer(NamedTuple):
    """log Σ exp(l) over the blocks so far, float32 [N, parts]: sums are relative to the largest logit.

    Each part has its own, as all sums over blocks: devices exchange them once, after the last block.
    """

    top: jax.Array
    total: jax.Array

    @classmethod
    def empty(cls, tokens: int, parts: int) -> Normalizer:
        return cls(jnp.full((tokens, parts), LOWEST), jnp.zeros((tokens, parts)))

    def add(self, logits: jax.Array) -> Normalizer:
        """Add logits, [N, parts, ids]; −inf adds nothing."""
        top = jnp.maximum(self.top, logits.max(2))
        exp = jnp.exp(logits - top[:, :, None])
        return Normalizer(top, self.total * jnp.exp(self.top - top) + exp.sum(2))

    def log(self) -> jax.Array:
        """Return the logarithm over all parts, float32 [N]; −inf where nothing was added."""
        top = self.top.max(1)
        total = (self.total * jnp.exp(self.top - top[:, None])).sum(1)
        return jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)


class Gradients(NamedTuple):
    """Gradients over the blocks so far: of hidden, float32 [N, parts, D], and of the kernel, in its shape and dtype."""

    hidden: jax.Array
    kernel: jax.Array

    @classmethod
    def empty(cls, hidden: jax.Array, kernel: jax.Array) -> Gradients:
        of_hidden = jnp.zeros((len(hidden), kernel.shape[1], hidden.shape[1]))
        return cls(of_hidden, sharded_gradient(jnp.zeros(kernel.shape, kernel.dtype)))

    def add(self, hidden: jax.Array, weights: jax.Array, d_product: jax.Array, first: Any) -> Gradients:
        """Add what the cotangent of a block's product, float32 [N, parts, ids], gives."""
        d_product, weights = d_product.astype(hidden.dtype), weights.astype(hidden.dtype)
        d_hidden = _product("npv,dpv->npd", d_product, weights)
        d_block = _product("nd,nv->dv", hidden, _joined(d_product)).astype(self.kernel.dtype)
        d_block = sharded_gradient(d_block.reshape(weights.shape))
        return Gradients(
            self.hidden + d_hidden, lax.dynamic_update_slice_in_dim(self.kernel, d_block, first, axis=2)
        )

    def arrays(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the gradients of hidden, in its dtype, and of the kernel."""
        return self.hidden.sum(1).astype(hidden.dtype), self.kernel


def _joined(x: jax.Array) -> jax.Array:
    """Join parts and ids, [n, parts, ids] → [n, parts × ids]: XLA on CPU sums no bfloat16 products over two axes."""
    return x.reshape(x.shape[0], -1)


def _product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(axes, a, b, preferred_element_type=jnp.float32)


def _mesh(x: jax.Array) -> AbstractMesh | None:
    """Return the mesh that `x` is computed on; None on one device and within `jax.shard_map`."""
    mesh: AbstractMesh = jax.typeof(x).sharding.mesh
    if mesh.size <= 1 or not {"fsdp", "tensor"} <= set(mesh.axis_names):
        return None
    return mesh if set(mesh.axis_types) == {AxisType.Auto} else None


def _placed(x: jax.Array, mesh: AbstractMesh | None, of_hidden: str | None) -> jax.Array:
    """Shard [D, parts, …]: D over the axis `of_hidden`, the parts over `tensor` where there are several."""
    if mesh is None:
        return x
    spec = PartitionSpec(of_hidden, "tensor" if x.shape[1] == mesh.shape["tensor"] else None, None)
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
