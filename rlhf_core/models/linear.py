"""Linear layers and activations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from rlhf_core.models.lora import Lora

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class Linear(nnx.Module):
    """y = x · kernel (+ bias). `lead` is (layers,) for a stacked one, which is called a layer at a time."""

    def __init__(
        self,
        rngs: Any,
        lead: tuple[int, ...],
        sizes: tuple[int, int],
        axes: tuple[str | None, ...],
        std: float,
        bias: bool,
    ) -> None:
        kernel = std * jax.random.normal(rngs.params(), (*lead, *sizes), jnp.float32)
        self.kernel = nnx.Param(kernel, axes=axes)
        self.bias = nnx.Param(jnp.zeros((*lead, sizes[1])), axes=(*axes[:-2], axes[-1])) if bias else None
        self.adapter: Adapter | None = nnx.data(None)

    def adapt(self, lora: Lora, rngs: Any) -> None:
        """Put an adapter beside the kernel, which changes nothing until it is trained."""
        self.adapter = Adapter(lora, rngs, self.kernel.shape, self.kernel.get_metadata("axes"))

    def __call__(self, x: jax.Array) -> jax.Array:
        # Tokens as one axis: for a kernel's gradient XLA on CPU otherwise copies the output's, transposed.
        kernel, flat = self.kernel[...].astype(x.dtype), x.reshape(-1, x.shape[-1])
        y: jax.Array = flat @ kernel
        if self.adapter is not None:
            y = y + self.adapter(flat)
        y = y.reshape(*x.shape[:-1], kernel.shape[-1])
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class Adapter(nnx.Module):
    """scale · (dropout(x) · A) · B; see `Lora`."""

    def __init__(self, lora: Lora, rngs: Any, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> None:
        *lead, size, out = shape
        bound = size**-0.5
        start = jax.random.uniform(rngs.params(), (*lead, size, lora.rank), jnp.float32, -bound, bound)
        self.lora_a = nnx.Param(start, axes=(*axes[:-1], None))
        self.lora_b = nnx.Param(jnp.zeros((*lead, lora.rank, out)), axes=(*axes[:-2], None, axes[-1]))
        # The random state of dropout is among the parameters, where every pass finds it; zero: nothing is dropped.
        zero = jnp.zeros((*lead, 2), jnp.uint32)
        self.lora_key = nnx.Param(zero, axes=(*axes[:-2], None)) if lora.dropout else None
        self.scale, self.dropout = lora.scale, lora.dropout

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.lora_key is not None:
            key = self.lora_key[...]
            x = lax.cond(jnp.any(key != 0), self._dropped, lambda x, _: x, x, key)
        change: jax.Array = (x @ self.lora_a[...].astype(x.dtype)) @ self.lora_b[...].astype(x.dtype)
        return self.scale * change

    def _dropped(self, x: jax.Array, key: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(jax.random.wrap_key_data(key), 1 - self.dropout, x.shape)
        return jnp.where(kept, x / (1 - self.dropout), 0)
