"""The parts of a decoder layer with attention, as modules over the stacked parameters of all layers.

A module is built once for all layers, its parameters float32 [layers, …], and called with one layer's slice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from rlhf_core.mesh import gathered, look_up, sum_over_tensor, with_rows_of
from rlhf_core.models.config import DecoderConfig
from rlhf_core.models.lora import Lora
from rlhf_core.models.quantized import Quantization, Quantized, can_quantize
from rlhf_core.models.rope import rotate

if TYPE_CHECKING:
    from rlhf_core.models.readers import LayerContext


def gelu_tanh(x: jax.Array) -> jax.Array:
    """Compute x · (1 + tanh u) / 2 with u = √(2/π) · (x + 0.044715 x³), as x · sigmoid(2u).

    1 + tanh u cancels below -3: in float32 nothing is left of it at -5, and a norm may follow.
    """
    return x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": jax.nn.relu,
}


def product(x: jax.Array, kernel: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Compute x · kernel, [N, in] · [in, out], in the dtype of `x`, and the gradient of a float32 kernel in float32.

    Otherwise the sum over all tokens, also of other devices, would be rounded to the compute dtype. axes: the
    kernel's logical axes, by which it is gathered.
    """
    rounded = kernel.astype(x.dtype)
    weights = gathered(rounded, axes)
    plain = x.dtype == kernel.dtype and weights is rounded
    return x @ weights if plain else _rounded_product(x, kernel, weights)


@jax.custom_vjp
def _rounded_product(x: jax.Array, kernel: jax.Array, weights: jax.Array) -> jax.Array:
    """weights: the kernel in the dtype of `x`, made by the caller, so that it is gathered once per pass."""
    return x @ weights


def _product_forward(
    x: jax.Array, kernel: jax.Array, weights: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x @ weights, (x, weights)


def _product_backward(
    residuals: tuple[jax.Array, jax.Array], d_y: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x, weights = residuals
    # The same array, not transposed: what `fsdp` has gathered for the recomputed product is used again.
    d_x = jnp.einsum("no,io->ni", d_y, weights)
    return d_x, jnp.einsum("ni,no->io", x, d_y, preferred_element_type=jnp.float32), None


_rounded_product.defvjp(_product_forward, _product_backward)


class Linear(nnx.Module):
    """y = x · kernel (+ bias). lead: (layers,) for stacked parameters, called one layer at a time.

    sums: whether devices that share the layer hold parts of the input, so that y is the sum of their products.
    """

    def __init__(
        self,
        rngs: Any,
        lead: tuple[int, ...],
        sizes: tuple[int, int],
        axes: tuple[str | None, ...],
        std: float,
        bias: bool,
        sums: bool = False,
    ) -> None:
        self.parts_of = sizes[0] if sums else 0
        kernel = std * jax.random.normal(rngs.params(), (*lead, *sizes), jnp.float32)
        self.kernel = nnx.Param(kernel, axes=axes)
        self.bias = nnx.Param(jnp.zeros((*lead, sizes[1])), axes=(*axes[:-2], axes[-1])) if bias else None
        self.adapter: Adapter | None = nnx.data(None)
        self.quantized: Quantized | None = nnx.data(None)

    def adapt(self, lora: Lora, rngs: Any) -> None:
        """Add an adapter to the kernel, without effect until it is trained."""
        self.adapter = Adapter(lora, rngs, self.kernel.shape, self.kernel.get_metadata("axes"))

    def quantize(self, kind: Quantization) -> None:
        """Hold the kernel in few bits, if it can be; after `adapt`."""
        if can_quantize(kind, self.kernel.shape[-2]):
            self.quantized = Quantized(kind, self.kernel.shape, self.kernel.get_metadata("axes"))
            self.kernel = nnx.data(None)

    def __call__(self, x: jax.Array) -> jax.Array:
        # Tokens are one axis: otherwise XLA on CPU copies the output's gradient, transposed, for the kernel's.
        flat = x.reshape(-1, x.shape[-1])
        if self.quantized is None:
            y = product(flat, self.kernel[...], self.kernel.get_metadata("axes")[-2:])
        else:
            y = self.quantized(flat)
        if self.adapter is not None:
            y = y + self.adapter(flat)
        y = y.reshape(*x.shape[:-1], y.shape[-1])
        y = sum_over_tensor(y) if flat.shape[-1] < self.parts_of else y
        return y if self.bias is None else (y + self.bias[...]).astype(x.dtype)


class Adapter(nnx.Module):
    """scale · (dropout(x) · A) · B; see `Lora`."""

    def __init__(self, lora: Lora, rngs: Any, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> None:
        *lead, size, out = shape
        bound = size**-0.5
        start = jax.random.uniform(rngs.params(), (*lead, size, lora.rank), jnp.float32, -bound, bound)
        self.lora_a = nnx.Param(start, axes=(*axes[:-1], None))
        self.lora_b = nnx.Param(jnp.zeros((*lead, lora.rank, out)), axes=(*axes[:-2], None, axes[-1]))
        # Dropout's random state is among the parameters, where every pass finds it; zero: no dropout.
        zero = jnp.zeros((*lead, 2), jnp.uint32)
        self.lora_key = nnx.Param(zero, axes=(*axes[:-2], None)) if lora.dropout else None
        self.scale, self.dropout = lora.scale, lora.dropout

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.lora_key is not None:
            key = self.lora_key[...]
            x = lax.cond(jnp.any(key != 0), self._dropped, lambda x, _: x, x, key)
        a, b = ((each[...], each.get_metadata("axes")[-2:]) for each in (self.lora_a, self.lora_b))
        return self.scale * product(product(x, *a), *b)

    def _dropped(self, x: jax.Array, key: jax.Array) -> jax.Array:
        mask = jax.random.bernoulli(jax.random.wrap_key_data(key), 1 - self.dropout, x.shape)
        return jnp.where(mask, x / (1 - self.dropout), 0)


@functools.partial(jax.checkpoint, static_argnums=2)
def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Compute weight · x / sqrt(mean(x²) + eps) over the last axis, in float32; returns x's shape and dtype.

    The backward pass keeps x, and not its float32 copies.
    """
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps)
    scaled: jax.Array = normed * weight
    return scaled.astype(x.dtype)


class RMSNorm(nnx.Module):
    """(weight + offset) · x / sqrt(mean(x²) + eps), in float32 (Zhang and Sennrich 2019). The factor starts at 1."""

    def __init__(self, config: DecoderConfig, lead: tuple[int, ...], size: int) -> None:
        # A weak type would become strong with the first update, and every program would compile again.
        start = jnp.full((*lead, size), 1.0 - config.norm_offset, jnp.float32)
        self.weight = nnx.Param(start, axes=("layers", None) if lead else (None,))
        self.eps = config.norm_eps
        self.offset = config.norm_offset

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.weight[...] + self.offset if self.offset else self.weight[...]
        return rms_norm(x, weight, self.eps)


class Attention(nnx.Module):
    """Projections to queries, keys and values, and from what attention over them gives (Vaswani et al. 2017)."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        c, lead = config, (config.num_layers,)
        make = functools.partial(Linear, rngs, lead, std=c.initializer_range)
        inside = ("layers", "embed", "heads")
        heads, keys = self.widths = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim)
        queries = 2 * heads if c.attention_gate else heads
        if c.fused:
            self.qkv_proj = make((c.hidden_size, queries + 2 * keys), axes=inside, bias=c.qkv_bias)
        else:
            self.q_proj = make((c.hidden_size, queries), axes=inside, bias=c.qkv_bias)
            self.k_proj = make((c.hidden_size, keys), axes=inside, bias=c.qkv_bias)
            self.v_proj = make((c.hidden_size, keys), axes=inside, bias=c.qkv_bias)
        self.o_proj = make(
            (heads, c.hidden_size), axes=("layers", "heads", "embed"), bias=c.o_bias, sums=True
        )
        if c.qk_norm:
            sizes = (c.head_dim, c.head_dim) if c.qk_norm == "head" else self.widths
            self.q_norm, self.k_norm = (RMSNorm(c, lead, size) for size in sizes)
        if c.sinks:
            self.sinks = nnx.Param(jnp.zeros((*lead, c.num_heads), jnp.float32), axes=("layers", "heads"))
        self.config = c

    def __call__(self, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, Any]:
        """[B, T, D] → the same, and the layer's `Aux.cache`."""
        c = self.config
        q, k, v, gate = self.project(x, ctx.rotation)
        sinks = self.sinks[...].reshape(-1, c.num_heads // c.num_kv_heads) if c.sinks else None
        mixed, cache = ctx.attend(q, k, v, softcap=c.attention_softcap, sinks=sinks)
        if gate is not None:
            mixed = mixed * jax.nn.sigmoid(gate)
        return self.o_proj(mixed), cache

    @classmethod
    def heads(cls, config: DecoderConfig) -> int:
        """Return the number that devices that share the layer while sampling must divide."""
        return config.num_kv_heads

    def project(
        self, x: jax.Array, rope: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """[B, T, D] → scaled queries [B, K, G, T, h], keys and values [B, K, T, h], of the heads that kernels have; and
        the output's gate before its sigmoid, [B, T, heads · h], or None.
        """
        c, keys = self.config, self.widths[1]
        if c.fused:
            both = self.qkv_proj(x)
            q, k, v = jnp.split(both, (both.shape[-1] - 2 * keys, both.shape[-1] - keys), axis=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        gate = None
        if c.attention_gate:  # of each head: its query, and its gate
            q, gate = jnp.split(q.reshape(*x.shape[:2], -1, 2 * c.head_dim), 2, axis=-1)
            q, gate = (y.reshape(*x.shape[:2], -1) for y in (q, gate))
        if c.qk_norm == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        size = c.head_dim
        kv_heads = k.shape[-1] // size
        q = q.reshape(*x.shape[:2], kv_heads, c.num_heads // c.num_kv_heads, size)
        k, v = (y.reshape(*x.shape[:2], kv_heads, size) for y in (k, v))
        if c.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        cosine, sine, *growth = (angle[:, None] for angle in rope)  # [B, 1, T, pairs]
        scale = size**-0.5 if c.query_scale is None else c.query_scale
        q = rotate(q.transpose(0, 2, 3, 1, 4), cosine[:, None], sine[:, None]) * scale
        if growth:
            q = q * growth[0][:, None].astype(q.dtype)
        return q, rotate(k.transpose(0, 2, 1, 3), cosine, sine), v.transpose(0, 2, 1, 3), gate


@functools.partial(jax.checkpoint, static_argnums=0)
def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Compute activation(gate) · up. The backward pass keeps the two, and not what lies between."""
    return ACTIVATIONS[activation](gate) * up


class MLP(nnx.Module):
    """down(activation(gate(x)) · up(x)) (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        c = config
        make = functools.partial(Linear, rngs, (c.num_layers,), std=c.initializer_range, bias=c.mlp_bias)
        inside = ("layers", "embed", "mlp")
        if c.fused:
            self.gate_up_proj = make((c.hidden_size, 2 * c.intermediate_size), axes=inside)
        else:
            self.gate_proj = make((c.hidden_size, c.intermediate_size), axes=inside)
            self.up_proj = make((c.hidden_size, c.intermediate_size), axes=inside)
        self.down_proj = make(
            (c.intermediate_size, c.hidden_size), axes=("layers", "mlp", "embed"), sums=True
        )
        self.fused = c.fused
        self.activation = c.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = (
            jnp.split(self.gate_up_proj(x), 2, axis=-1)
            if self.fused
            else (self.gate_proj(x), self.up_proj(x))
        )
        return self.down_proj(gated(self.activation, gate, up))


class Embedding(nnx.Module):
    """The table of token embeddings, times a factor in some families."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        shape = (config.vocab_size, config.hidden_size)
        values = config.initializer_range * jax.random.normal(rngs.params(), shape, jnp.float32)
        self.embedding = nnx.Param(values, axes=("vocab", "embed"))
        self.scale, self.placeholders = config.embedding_scale, config.placeholders

    def __call__(self, tokens: jax.Array, dtype: Any) -> jax.Array:
        if self.placeholders:
            placeholder = jnp.isin(tokens, jnp.asarray(self.placeholders))
            tokens = jnp.where(placeholder, self.placeholders[0], tokens)
        rows = with_rows_of(look_up(self.embedding[...], tokens).astype(dtype), tokens)
        return rows if self.scale == 1 else rows * jnp.asarray(self.scale, dtype)
