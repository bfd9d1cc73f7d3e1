"""The parts of a decoder layer, as modules over the stacked parameters of all layers.

A module is built once for all layers, its parameters float32 [layers, …], and called with one layer's slice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from rlhf_core.models.attention import rotate
from rlhf_core.models.config import DecoderConfig

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

    def __call__(self, x: jax.Array) -> jax.Array:
        # Tokens as one axis: for a kernel's gradient XLA on CPU otherwise copies the output's, transposed.
        kernel = self.kernel[...].astype(x.dtype)
        y: jax.Array = (x.reshape(-1, x.shape[-1]) @ kernel).reshape(*x.shape[:-1], kernel.shape[-1])
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class RMSNorm(nnx.Module):
    """weight · x / sqrt(mean(x²) + eps), in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, lead: tuple[int, ...], size: int, eps: float) -> None:
        self.weight = nnx.Param(jnp.ones((*lead, size)), axes=("layers", None) if lead else (None,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.eps)
        scaled: jax.Array = normed * self.weight[...]
        return scaled.astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        c, lead = config, (config.num_layers,)
        make = functools.partial(Linear, rngs, lead, std=c.initializer_range)
        inside = ("layers", "embed", "heads")
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q_proj = make((c.hidden_size, queries), axes=inside, bias=c.qkv_bias)
        self.k_proj = make((c.hidden_size, keys), axes=inside, bias=c.qkv_bias)
        self.v_proj = make((c.hidden_size, keys), axes=inside, bias=c.qkv_bias)
        self.o_proj = make((queries, c.hidden_size), axes=("layers", "heads", "embed"), bias=c.o_bias)
        self.q_norm = RMSNorm(lead, c.head_dim, c.norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(lead, c.head_dim, c.norm_eps) if c.qk_norm else None
        self.shape = (c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim)

    def project(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[B, T, D] → scaled queries [B, K, G, T, h], keys and values [B, K, T, h]."""
        kv_heads, groups, size = self.shape
        q = self.q_proj(x).reshape(*x.shape[:2], kv_heads, groups, size)
        k = self.k_proj(x).reshape(*x.shape[:2], kv_heads, size)
        v = self.v_proj(x).reshape(*x.shape[:2], kv_heads, size)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cosine, sine = (angle[:, None] for angle in rope)  # [B, 1, T, h / 2]
        q = rotate(q.transpose(0, 2, 3, 1, 4), cosine[:, None], sine[:, None]) * size**-0.5
        return q, rotate(k.transpose(0, 2, 1, 3), cosine, sine), v.transpose(0, 2, 1, 3)


class MLP(nnx.Module):
    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        c = config
        make = functools.partial(Linear, rngs, (c.num_layers,), std=c.initializer_range, bias=c.mlp_bias)
        self.gate_proj = make((c.hidden_size, c.intermediate_size), axes=("layers", "embed", "mlp"))
        self.up_proj = make((c.hidden_size, c.intermediate_size), axes=("layers", "embed", "mlp"))
        self.down_proj = make((c.intermediate_size, c.hidden_size), axes=("layers", "mlp", "embed"))
        self.activation = c.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """Pre-norm attention and gated MLP. Parameters of all layers, stacked; called on one layer's."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        lead = (config.num_layers,)
        self.input_layernorm = RMSNorm(lead, config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, rngs)
        self.post_attention_layernorm = RMSNorm(lead, config.hidden_size, config.norm_eps)
        self.mlp = MLP(config, rngs)

    def project(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.self_attn.project(self.input_layernorm(x), rope)

    def finish(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        """The rest of the layer, given what attention mixed, [B, T, heads · head_dim]."""
        x = x + self.self_attn.o_proj(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedding(nnx.Module):
    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        shape = (config.vocab_size, config.hidden_size)
        values = config.initializer_range * jax.random.normal(rngs.params(), shape, jnp.float32)
        self.embedding = nnx.Param(values, axes=("vocab", "embed"))

    def __call__(self, tokens: jax.Array, dtype: Any) -> jax.Array:
        return self.embedding[...].at[tokens].get(mode="clip").astype(dtype)
