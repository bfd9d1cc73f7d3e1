"""The parts of a decoder layer, as modules over the stacked parameters of all layers.

A module is built once for all layers, its parameters float32 [layers, …], and called with one layer's slice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from rlhf_core.mesh import gathered, look_up, sum_over_tensor, with_rows_of
from rlhf_core.models.config import DecoderConfig
from rlhf_core.models.lora import Lora
from rlhf_core.models.recurrence import Inputs, Order, gated_delta_rule, next_state, short_convolution
from rlhf_core.models.rope import rotate

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
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


def expert_product(x: jax.Array, kernel: jax.Array, counts: jax.Array) -> jax.Array:
    """Compute `product` for the rows of every expert.

    x: [N, in], sorted by expert. kernel: [experts, in, out]. counts: int32 [experts], rows per expert.
    """
    weights = kernel.astype(x.dtype)
    if x.dtype == kernel.dtype:
        return lax.ragged_dot(x, weights, counts)
    return _rounded_expert_product(x, kernel, weights, counts)


@jax.custom_vjp
def _rounded_expert_product(
    x: jax.Array, kernel: jax.Array, weights: jax.Array, counts: jax.Array
) -> jax.Array:
    return lax.ragged_dot(x, weights, counts)


def _expert_forward(x: jax.Array, kernel: jax.Array, weights: jax.Array, counts: jax.Array) -> Any:
    return lax.ragged_dot(x, weights, counts), (x, weights, counts)


def _expert_backward(residuals: tuple[jax.Array, ...], d_y: jax.Array) -> Any:
    x, weights, counts = residuals
    rows = lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    d_kernel = lax.ragged_dot_general(x, d_y, counts, rows, preferred_element_type=jnp.float32)
    return lax.ragged_dot(d_y, weights.swapaxes(1, 2), counts), d_kernel, None, None


_rounded_expert_product.defvjp(_expert_forward, _expert_backward)


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
        self.sums = sums
        kernel = std * jax.random.normal(rngs.params(), (*lead, *sizes), jnp.float32)
        self.kernel = nnx.Param(kernel, axes=axes)
        self.bias = nnx.Param(jnp.zeros((*lead, sizes[1])), axes=(*axes[:-2], axes[-1])) if bias else None
        self.adapter: Adapter | None = nnx.data(None)

    def adapt(self, lora: Lora, rngs: Any) -> None:
        """Add an adapter to the kernel, without effect until it is trained."""
        self.adapter = Adapter(lora, rngs, self.kernel.shape, self.kernel.get_metadata("axes"))

    def __call__(self, x: jax.Array) -> jax.Array:
        # Tokens are one axis: otherwise XLA on CPU copies the output's gradient, transposed, for the kernel's.
        kernel, flat = self.kernel[...], x.reshape(-1, x.shape[-1])
        y = product(flat, kernel, self.kernel.get_metadata("axes")[-2:])
        if self.adapter is not None:
            y = y + self.adapter(flat)
        y = y.reshape(*x.shape[:-1], kernel.shape[-1])
        y = sum_over_tensor(y) if self.sums else y
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


class ExpertMLPs(nnx.Module):
    """Gated MLPs, their kernels float32 [layers, experts, in, out]."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        c = config
        lead = (c.num_layers, c.experts)
        make = functools.partial(Linear, rngs, lead, std=c.initializer_range, bias=False)
        inside = ("layers", "experts", "embed", "mlp")
        self.swiglu = c.swiglu
        if c.swiglu:
            make = functools.partial(make, bias=True)
            self.gate_up_proj = make((c.hidden_size, 2 * c.intermediate_size), axes=inside)
            self.down_proj = make(
                (c.intermediate_size, c.hidden_size), axes=("layers", "experts", "mlp", "embed")
            )
            return
        self.gate_proj = make((c.hidden_size, c.intermediate_size), axes=inside)
        self.up_proj = make((c.hidden_size, c.intermediate_size), axes=inside)
        self.down_proj = make(
            (c.intermediate_size, c.hidden_size), axes=("layers", "experts", "mlp", "embed")
        )
        self.activation = c.activation

    def __call__(self, x: jax.Array, counts: jax.Array) -> jax.Array:
        """Apply each expert to its rows. x: [N, D], sorted by expert; counts: int32 [experts], rows per expert."""
        if self.swiglu:
            slope, limit = self.swiglu
            gate, up = (self._biased(self.gate_up_proj, x, counts)[:, i::2] for i in (0, 1))
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
            inner = (up + 1) * gate * jax.nn.sigmoid(slope * gate)
            return self._biased(self.down_proj, inner, counts)
        gate = ACTIVATIONS[self.activation](expert_product(x, self.gate_proj.kernel[...], counts))
        inner = gate * expert_product(x, self.up_proj.kernel[...], counts)
        return expert_product(inner, self.down_proj.kernel[...], counts)

    def _biased(self, linear: Linear, x: jax.Array, counts: jax.Array) -> jax.Array:
        assert linear.bias is not None
        biases = jnp.repeat(linear.bias[...].astype(x.dtype), counts, axis=0, total_repeat_length=len(x))
        return expert_product(x, linear.kernel[...], counts) + biases


class Experts(nnx.Module):
    """The sum of the likeliest experts' outputs, weighted by the router's probabilities. No token is dropped."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        c = config
        linear = functools.partial(Linear, rngs, (c.num_layers,), std=c.initializer_range, bias=False)
        router = functools.partial(linear, bias=True) if c.router == "chosen" else linear
        self.gate = router((c.hidden_size, c.experts), axes=("layers", "embed", None))
        if c.router == "sigmoid":
            zero = jnp.zeros((c.num_layers, c.experts), jnp.float32)
            self.gate.e_score_correction_bias = nnx.Param(zero, axes=("layers", None))
        self.experts = ExpertMLPs(c, rngs)
        if c.shared_size:
            self.shared_expert = MLP(replace(c, intermediate_size=c.shared_size), rngs)
        if c.shared_gate:
            self.shared_expert_gate = linear((c.hidden_size, 1), axes=("layers", "embed", None))
        self.config = c

    def route(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[N, D] → the weights of each token's experts, float32 [N, per token], and their numbers, int32 likewise."""
        c, logits = self.config, self.gate(tokens).astype(jnp.float32)
        if c.router == "softmax":
            weight, chosen = lax.top_k(jax.nn.softmax(logits, axis=-1), c.experts_per_token)
        elif c.router == "chosen":
            weight, chosen = lax.top_k(logits, c.experts_per_token)
            return jax.nn.softmax(weight, axis=-1), chosen
        else:
            probability, (groups, allowed) = jax.nn.sigmoid(logits), c.expert_groups
            score = lax.stop_gradient(probability + self.gate.e_score_correction_bias[...])
            if allowed < groups:
                each = score.reshape(len(score), groups, -1)
                best = lax.top_k(each, min(2, each.shape[-1]))[0].sum(-1)
                among = (lax.top_k(best, allowed)[1][..., None] == jnp.arange(groups)).any(1)
                score = jnp.where(among[..., None], each, -jnp.inf).reshape(score.shape)
            chosen = lax.top_k(score, c.experts_per_token)[1]
            weight = jnp.take_along_axis(probability, chosen, axis=1)
        if c.normalise_experts:
            weight = weight / weight.sum(-1, keepdims=True)
        return weight if c.expert_scale == 1 else weight * c.expert_scale, chosen

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] → the same."""
        c, tokens = self.config, x.reshape(-1, x.shape[-1])
        per_token = c.experts_per_token
        weight, chosen = self.route(tokens)
        order = jnp.argsort(
            chosen.reshape(-1), stable=True
        )  # by expert; pair n belongs to token n // per_token
        counts = jnp.bincount(chosen.reshape(-1), length=c.experts)
        made = self.experts(tokens[order // per_token], counts)
        apart = made[jnp.argsort(order)].reshape(*chosen.shape, -1)  # [N, per_token, D]
        mixed = sum_over_tensor(jnp.einsum("nkd,nk->nd", apart, weight.astype(x.dtype))).reshape(x.shape)
        if not c.shared_size:
            return mixed
        shared = self.shared_expert(x)
        if c.shared_gate:
            shared = shared * jax.nn.sigmoid(self.shared_expert_gate(x))
        return mixed + shared


class RMSNorm(nnx.Module):
    """(weight + offset) · x / sqrt(mean(x²) + eps), in float32 (Zhang and Sennrich 2019). The factor starts at 1."""

    def __init__(self, config: DecoderConfig, lead: tuple[int, ...], size: int) -> None:
        # A weak type would become strong with the first update, and every program would compile again.
        start = jnp.full((*lead, size), 1.0 - config.norm_offset, jnp.float32)
        self.weight = nnx.Param(start, axes=("layers", None) if lead else (None,))
        self.eps = config.norm_eps
        self.offset = config.norm_offset

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.eps)
        weight = self.weight[...] + self.offset if self.offset else self.weight[...]
        scaled: jax.Array = normed * weight
        return scaled.astype(x.dtype)


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

    @property
    def options(self) -> dict[str, jax.Array]:
        """Return the further arguments of attention: of a layer with sinks, {"sinks": float32 [K, G]}."""
        return {"sinks": self.sinks[...].reshape(self.config.num_kv_heads, -1)} if self.config.sinks else {}

    def __call__(
        self, x: jax.Array, rope: tuple[jax.Array, ...], over: Callable[..., jax.Array]
    ) -> jax.Array:
        """[B, T, D] → the same. over: (queries, keys, values of `project`) → their attention, [B, T, heads · h]."""
        q, k, v, gate = self.project(x, rope)
        mixed = over(q, k, v)
        return self.o_proj(mixed if gate is None else mixed * jax.nn.sigmoid(gate))

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


class Convolution(nnx.Module):
    """A short convolution between two gates (LFM2). Its state: the last inputs of the convolution, [B, taps - 1, D]."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        c = config
        linear = functools.partial(Linear, rngs, (c.num_layers,), std=c.initializer_range, bias=False)
        self.in_proj = linear((c.hidden_size, 3 * c.hidden_size), axes=("layers", "embed", None))
        self.conv = Taps(c, c.hidden_size, rngs)
        self.out_proj = linear((c.hidden_size, c.hidden_size), axes=("layers", None, "embed"))

    def over_rows(self, x: jax.Array, order: Order) -> tuple[jax.Array, Any]:
        """[B, T, D] → the same, and the state after each row's last token."""
        before, after, x = jnp.split(self.in_proj(x), 3, axis=-1)
        mixed, kept = self.conv.over_rows(before * x, order)
        return self.out_proj(after * mixed), (kept, None)

    def next(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """[B, D] → the same, and the next state."""
        before, after, x = jnp.split(self.in_proj(x), 3, axis=-1)
        mixed, kept = self.conv.next(before * x, state[0])
        return self.out_proj(after * mixed), (kept, None)


class Taps(nnx.Module):
    """A convolution of every channel with the tokens before it; parameters as in Hugging Face's files."""

    def __init__(self, config: DecoderConfig, channels: int, rngs: Any) -> None:
        shape, bound = (config.num_layers, channels, 1, config.taps), config.taps**-0.5
        start = jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
        self.weight = nnx.Param(start, axes=("layers", None, None, None))

    def over_rows(self, x: jax.Array, order: Order) -> tuple[jax.Array, jax.Array]:
        """[B, T, channels] → the same, and the last inputs of each row, [B, taps - 1, channels]."""
        kernel = self.weight[...][:, 0].T.astype(x.dtype)
        at, kept = jnp.full((len(x), 1), x.shape[1] - 1, jnp.int32), []
        for _ in range(len(kernel) - 1):
            read = jnp.take_along_axis(x, jnp.maximum(at, 0)[..., None], 1)
            kept.append(jnp.where(at[..., None] < 0, 0, read))
            at = jnp.where(at < 0, -1, jnp.take_along_axis(order.previous, jnp.maximum(at, 0), 1))
        return short_convolution(x, kernel, order.previous), jnp.concatenate(kept[::-1], 1)

    def next(self, x: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, channels] → the same, and the next last inputs."""
        window = jnp.concatenate([kept, x[:, None]], 1)
        return jnp.einsum("btc,ct->bc", window, self.weight[...][:, 0].astype(x.dtype)), window[:, 1:]


class DeltaNet(nnx.Module):
    """The gated delta rule (Yang et al. 2024) as in Qwen3.5.

    Its state: the last inputs of the convolution, [B, taps - 1, channels], and float32 [B, K, G, d, e].
    """

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        c, lead = config, (config.num_layers,)
        key_heads, value_heads, size, width = c.linear_heads
        linear = functools.partial(Linear, rngs, lead, std=c.initializer_range, bias=False)
        inside, values = ("layers", "embed", None), value_heads * width
        self.in_proj_qkv = linear((c.hidden_size, 2 * key_heads * size + values), axes=inside)
        self.in_proj_z = linear((c.hidden_size, values), axes=inside)
        self.in_proj_b = linear((c.hidden_size, value_heads), axes=inside)
        self.in_proj_a = linear((c.hidden_size, value_heads), axes=inside)
        self.conv1d = Taps(c, 2 * key_heads * size + values, rngs)
        self.dt_bias = nnx.Param(jnp.ones((*lead, value_heads), jnp.float32), axes=("layers", None))
        decay = jax.random.uniform(rngs.params(), (*lead, value_heads), jnp.float32, 0.01, 16)
        self.A_log = nnx.Param(jnp.log(decay), axes=("layers", None))
        self.norm = RMSNorm(replace(c, norm_offset=0.0), lead, width)
        self.out_proj = linear((values, c.hidden_size), axes=("layers", None, "embed"))
        self.heads = c.linear_heads

    def over_rows(self, x: jax.Array, order: Order) -> tuple[jax.Array, Any]:
        """[B, T, D] → the same, and the state after each row's last token."""
        mixed, kept = self.conv1d.over_rows(self.in_proj_qkv(x), order)
        out, state = gated_delta_rule(self._inputs(mixed, x), order.positions, order.visible_until)
        return self._output(out, x), (kept, state)

    def next(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """[B, D] → the same, and the next state."""
        mixed, kept = self.conv1d.next(self.in_proj_qkv(x), state[0])
        out, after = next_state(state[1], self._inputs(mixed, x))
        return self._output(out, x), (kept, after)

    def _inputs(self, mixed: jax.Array, x: jax.Array) -> Inputs:
        """[…, channels] after the convolution, [..., D] → queries, keys, values, logarithm of the decay, beta."""
        key_heads, value_heads, size, width = self.heads
        q, k, v = jnp.split(jax.nn.silu(mixed), (key_heads * size, 2 * key_heads * size), axis=-1)
        lead, groups = x.shape[:-1], value_heads // key_heads
        q, k = (_unit(y.reshape(*lead, key_heads, size).astype(jnp.float32)) for y in (q, k))
        beta = jax.nn.sigmoid(self.in_proj_b(x).astype(jnp.float32))
        decay = -jnp.exp(self.A_log[...]) * jax.nn.softplus(
            self.in_proj_a(x).astype(jnp.float32) + self.dt_bias[...]
        )
        decay, beta = (y.reshape(*lead, key_heads, groups) for y in (decay, beta))
        return Inputs(q * size**-0.5, k, v.reshape(*lead, key_heads, groups, width), decay, beta)

    def _output(self, out: jax.Array, x: jax.Array) -> jax.Array:
        gate = jax.nn.silu(self.in_proj_z(x).astype(jnp.float32)).reshape(out.shape)
        gated = self.norm(out) * gate
        return self.out_proj(gated.reshape(*x.shape[:-1], -1).astype(x.dtype))


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + 1e-6)


MIXERS: Mapping[str, Any] = {"conv": Convolution, "linear_attn": DeltaNet}
"""The layers with a state, by the name of their parameters."""


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
        return self.down_proj(ACTIVATIONS[self.activation](gate) * up)


class Layer(nnx.Module):
    """Attention and gated MLP, normalised before, after, or both. Holds stacked parameters, runs on one layer's.

    The norms have Hugging Face's names: where layers normalise before only, `post_attention_layernorm` is the MLP's.
    """

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        norm = functools.partial(RMSNorm, config, (config.num_layers,), config.hidden_size)
        self.norms, self.residual_scale = config.norms, config.residual_scale
        self.mixer = config.mixer
        setattr(self, self.mixer, MIXERS.get(self.mixer, Attention)(config, rngs))
        self.mlp = Experts(config, rngs) if config.experts else MLP(config, rngs)
        self.post_attention_layernorm = norm()
        if self.norms != "after":
            self.input_layernorm = norm()
        if self.norms == "both":
            self.pre_feedforward_layernorm = norm()
        if self.norms != "before":
            self.post_feedforward_layernorm = norm()

    def __call__(self, x: jax.Array, mix: Callable[[Any, jax.Array], jax.Array]) -> jax.Array:
        """[B, T, D] → the same. mix: (attention or another mixer, its input [B, T, D]) → its output [B, T, D]."""
        mixed = mix(getattr(self, self.mixer), self.normed(x))
        if self.norms == "before":
            x = x + self.scaled(mixed)
            return x + self.scaled(self.mlp(self.post_attention_layernorm(x)))
        x = x + self.post_attention_layernorm(mixed)
        inner = x if self.norms == "after" else self.pre_feedforward_layernorm(x)
        return x + self.post_feedforward_layernorm(self.mlp(inner))

    def normed(self, x: jax.Array) -> jax.Array:
        return x if self.norms == "after" else self.input_layernorm(x)

    def scaled(self, x: jax.Array) -> jax.Array:
        return x if self.residual_scale == 1 else x * jnp.asarray(self.residual_scale, x.dtype)


class Embedding(nnx.Module):
    """The table of token embeddings, times a factor in some families."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        shape = (config.vocab_size, config.hidden_size)
        values = config.initializer_range * jax.random.normal(rngs.params(), shape, jnp.float32)
        self.embedding = nnx.Param(values, axes=("vocab", "embed"))
        self.scale = config.embedding_scale

    def __call__(self, tokens: jax.Array, dtype: Any) -> jax.Array:
        rows = with_rows_of(look_up(self.embedding[...], tokens).astype(dtype), tokens)
        return rows if self.scale == 1 else rows * jnp.asarray(self.scale, dtype)
