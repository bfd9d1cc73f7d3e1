"""Mixtures of experts: the router, and gated MLPs of which each token passes through a few."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from rlhf_core.mesh import sum_over_tensor
from rlhf_core.models.config import DecoderConfig
from rlhf_core.models.layers import ACTIVATIONS, MLP, Linear


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

    def __call__(self, x: jax.Array, seen: jax.Array | None = None) -> jax.Array:
        """[B, T, D] → the same. seen: what the router reads, [B, T, D]; None: the same."""
        c, tokens = self.config, x.reshape(-1, x.shape[-1])
        per_token = c.experts_per_token
        weight, chosen = self.route(tokens if seen is None else seen.reshape(tokens.shape))
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
