"""Log-probabilities by chunks of tokens, each over the whole vocabulary, which may be sharded over devices.

The loop over chunks sends nothing of the kernel's size between devices: a kernel that `fsdp` shards is gathered before
the loop, and the gradient that each device sums over its own rows is summed over devices after it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from rlhf_core.logprobs.logits import Settings, capped, d_uncapped
from rlhf_core.mesh import mesh_of_rows, row_axes, row_multiple


def _chunks(x: jax.Array, size: int) -> jax.Array:
    """[rows, K, ...] → [chunks, rows, size, ...], padded with zeros."""
    rows, length = x.shape[:2]
    count = -(-length // size)
    x = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(rows, count, size, *x.shape[2:]), 1, 0)


def _joined(x: jax.Array, length: int) -> jax.Array:
    """Invert `_chunks`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _placed(x: jax.Array, mesh: AbstractMesh | None, *axes: Any) -> jax.Array:
    """Shard all axes of `x` [..., V] but the last over these axes of the mesh; do not constrain the vocabulary."""
    if mesh is None:
        return x
    spec = PartitionSpec(*axes, PartitionSpec.UNCONSTRAINED)
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def over_tokens(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, settings: Settings
) -> tuple[jax.Array, jax.Array]:
    results, _ = _forward(hidden, kernel, targets, settings)
    return results


def _forward(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, settings: Settings
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    weights = _placed(kernel.astype(hidden.dtype), mesh_of_rows(hidden), None)

    def one(xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        chunk, target = xs
        logits, _ = capped(chunk, weights, settings, kernel.shape[1])
        # All relative to the largest logit, so that large logits do not cancel.
        top = logits.max(-1, keepdims=True)
        exp = jnp.exp(logits - top)
        total = exp.sum(-1)
        used = target >= 0
        chosen = jnp.take_along_axis(logits - top, jnp.maximum(target, 0)[..., None], axis=-1)[..., 0]
        logps = jnp.where(used, chosen - jnp.log(total), 0.0)
        entropies = jnp.zeros_like(total)
        if settings.entropy:
            mean = (exp * (logits - top)).sum(-1) / total
            entropies = jnp.where(used, jnp.log(total) - mean, 0.0)
        return logps, entropies, top[..., 0] + jnp.log(total)

    length = hidden.shape[1]
    chunks = lax.map(one, (_chunks(hidden, settings.size), _chunks(targets, settings.size)))
    logps, entropies, normalizers = (_joined(x, length) for x in chunks)
    return (logps, entropies), (hidden, kernel, targets, normalizers, entropies)


def _backward(settings: Settings, residuals: Any, cotangents: Any) -> tuple[jax.Array, jax.Array, Any]:
    hidden, kernel, targets, normalizers, entropies = residuals
    used = targets >= 0
    d_logps, d_entropies = (jnp.where(used, d, 0.0) for d in cotangents)
    mesh = mesh_of_rows(hidden)
    weights = _placed(kernel.astype(hidden.dtype), mesh, None)
    shards = 1 if mesh is None else row_multiple(mesh)
    vocabulary = jnp.arange(kernel.shape[1], dtype=jnp.int32)

    def one(d_kernels: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        chunk, target = xs[:2]
        normalizer, entropy, d_logp, d_entropy = (x[..., None] for x in xs[2:])
        logits, tanh = capped(chunk, weights, settings, kernel.shape[1])
        is_target = vocabulary == target[..., None]
        d_logits = d_uncapped(
            logits, tanh, is_target, normalizer, entropy, d_logp, d_entropy, settings
        ).astype(hidden.dtype)
        d_chunk = jnp.einsum("rkv,dv->rkd", d_logits, weights, preferred_element_type=jnp.float32)
        # One gradient per shard of the rows, so that no device needs another's before the last chunk. A shard's tokens
        # are one axis: XLA on CPU cannot run the bfloat16 product over two axes that it makes for a tied kernel.
        flat, d_flat = (x.reshape(shards, -1, x.shape[-1]) for x in (chunk, d_logits))
        d_kernels += jnp.einsum("snd,snv->sdv", flat, d_flat, preferred_element_type=jnp.float32)
        return _placed(d_kernels, mesh, row_axes(), None), d_chunk.astype(hidden.dtype)

    arrays = (hidden, targets, normalizers, entropies, d_logps, d_entropies)
    xs = tuple(_chunks(x, settings.size) for x in arrays)
    d_kernels, d_hidden = lax.scan(one, jnp.zeros((shards, *kernel.shape), jnp.float32), xs)
    no_gradient = np.zeros(targets.shape, jax.dtypes.float0)
    return _joined(d_hidden, hidden.shape[1]), d_kernels.sum(0).astype(kernel.dtype), no_gradient


over_tokens.defvjp(_forward, _backward)
