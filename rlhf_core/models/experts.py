"""A layer's MLP as many experts, of which every token takes a few (Shazeer et al. 2017)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from rlhf_core.models.config import DecoderConfig
from rlhf_core.models.linear import ACTIVATIONS, Linear


class ExpertMLPs(nnx.Module):
    """Gated MLPs, their kernels float32 [layers, experts, in, out]."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        c = config
        lead = (c.num_layers, c.experts)
        make = functools.partial(Linear, rngs, lead, std=c.initializer_range, bias=False)
        inside = ("layers", "experts", "embed", "mlp")
        self.gate_proj = make((c.hidden_size, c.intermediate_size), axes=inside)
        self.up_proj = make((c.hidden_size, c.intermediate_size), axes=inside)
        self.down_proj = make(
            (c.intermediate_size, c.hidden_size), axes=("layers", "experts", "mlp", "embed")
        )
        self.activation = c.activation

    def __call__(self, x: jax.Array, counts: jax.Array) -> jax.Array:
        """x: [N, D], sorted by expert; counts: int32 [experts], how many rows each has."""

        def apply(linear: Linear, x: jax.Array) -> jax.Array:
            return lax.ragged_dot(x, linear.kernel[...].astype(x.dtype), counts)

        gate = ACTIVATIONS[self.activation](apply(self.gate_proj, x))
        return apply(self.down_proj, gate * apply(self.up_proj, x))


class Experts(nnx.Module):
    """The sum of the likeliest experts' outputs, weighted by the router's probabilities. No token is dropped."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        c = config
        router = functools.partial(Linear, rngs, (c.num_layers,), std=c.initializer_range, bias=False)
        self.gate = router((c.hidden_size, c.experts), axes=("layers", "embed", None))
        self.experts = ExpertMLPs(c, rngs)
        self.config = c

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] → the same."""
        c, tokens = self.config, x.reshape(-1, x.shape[-1])
        taken = c.experts_per_token
        probability = jax.nn.softmax(self.gate(tokens).astype(jnp.float32), axis=-1)
        weight, chosen = lax.top_k(probability, taken)  # [N, taken]
        if c.normalise_experts:
            weight = weight / weight.sum(-1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1), stable=True)  # by expert; a pair n is of token n // taken
        counts = jnp.bincount(chosen.reshape(-1), length=c.experts)
        made = self.experts(tokens[order // taken], counts)
        apart = made[jnp.argsort(order)].reshape(*chosen.shape, -1)  # [N, taken, D]
        mixed = jnp.einsum("nkd,nk->nd", apart, weight.astype(x.dtype))
        return mixed.reshape(x.shape)
