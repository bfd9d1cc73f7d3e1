"""Gemma 4: two sizes of heads, keys and values that layers share, an input of their own for each layer, and experts
next to the MLP.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from rlhf_core import models
from rlhf_core.models import (
    ACTIVATIONS,
    MLP,
    Architecture,
    Aux,
    ConfigFields,
    DecoderConfig,
    Embedding,
    LayerContext,
    Linear,
    RMSNorm,
    decoder_family,
    rotate,
)

SLIDING, FULL = "sliding_attention", "full_attention"
DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "final_logit_softcapping": None,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "per_layer_config": None,
    "use_bidirectional_attention": None,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
}
_LAYER = "model.layers.{layer}"
WEIGHT_NAMES = {
    "layers.layer_scalar": f"{_LAYER}.layer_scalar",
    "layers.moe.gate": f"{_LAYER}.router.proj",
    "layers.moe.gate.scale": f"{_LAYER}.router.scale",
    "layers.moe.gate.per_expert_scale": f"{_LAYER}.router.per_expert_scale",
    **{
        f"layers.moe.experts.{part}_proj": f"{_LAYER}.experts.{{expert}}.{part}_proj"
        for part in ("gate", "up", "down")
    },
    **{
        f"per_layer_inputs.{name}": f"model.{name}"
        for name in ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
    },
}
HEADS = ("head_dim", "num_key_value_heads")
"""What `per_layer_config` may say of a layer."""


def layer_types(read: ConfigFields, layers: int) -> list[str]:
    """Give all layers a sliding window except every sixth and the last."""
    return [SLIDING if (i + 1) % 6 and i + 1 < layers else FULL for i in range(layers)]


def details(read: ConfigFields, layers: int) -> dict[str, Any]:
    """Read what differs from a plain decoder."""
    types = layer_types(read, layers)
    stored = read.get("layer_types")
    if isinstance(stored, list) and len(stored) == layers and all(kind in (FULL, SLIDING) for kind in stored):
        types = stored
    refused = stored is not None and types is not stored  # as every family's reader says
    if types[-1] != FULL:
        read.problem(f"layer_types must end with {FULL}, as in transformers")
    if read.get("use_bidirectional_attention") == "all":
        read.problem("use_bidirectional_attention 'all' is not supported; the decoder is causal")
    shared = read.whole("num_kv_shared_layers", 0, least=0)
    own = max(layers - shared, 0)
    lost = set(types) - set(types[:own])
    if lost and not refused:
        read.problem(
            f"num_kv_shared_layers {shared} leaves no layer of type {min(lost)} that has keys and values to share"
        )
    if lost:
        own = layers
    table = _per_layer(read)
    wide = read.switch("use_double_wide_mlp")
    mlp = read.whole("intermediate_size")
    size = "intermediate_size"
    found: dict[str, Any] = {"query_scale": 1.0}
    if read.switch("enable_moe_block"):
        found |= {
            "experts": read.whole("num_experts"),
            "experts_per_token": read.whole("top_k_experts"),
            "intermediate_size": read.whole("moe_intermediate_size"),
        }
        size = "shared_size"
    found[size] = mlp
    kinds = [kind if i < own else f"shared_{kind}" for i, kind in enumerate(types)]
    variants = {}
    for kind in dict.fromkeys(kinds):
        attention = types[kinds.index(kind)]
        borrows = kind.startswith("shared_")
        source = None
        if borrows:
            source = max(i for i in range(own) if types[i] == attention)
        differs = {
            **_heads_of(read, types, attention),
            size: 2 * mlp if wide and borrows else mlp,
            "settings": Gemma4Settings(table, read.switch("attention_k_eq_v") and attention == FULL),
            "source": source,
        }
        variants[kind] = tuple(differs.items())
    names = [f"{kind}_token_id" for kind in ("image", "video", "audio")]
    stand_ins = [read.whole(name, least=0) for name in names if read.get(name) is not None]
    placeholders: tuple[int, ...] = ()
    if stand_ins:
        placeholders = (read.whole("pad_token_id", 0, least=0), *stand_ins)
    return found | {
        "layer": Gemma4LayerWithInput if table[1] else Gemma4Layer,
        "settings": Gemma4Settings(table),
        "placeholders": placeholders,
        "fused_experts": True,
        # Published files have keys and values of layers that use another layer's.
        "carried": tuple(rf"model\.layers\.{i}\.self_attn\.[kv]_(proj|norm)\." for i in range(own, layers)),
        "kinds": tuple(kinds),
        "variants": tuple(variants.items()),
    }


def _per_layer(read: ConfigFields) -> tuple[int, int]:
    """Read (words, size) of the table of the layers' own inputs; (0, 0): there is none."""
    size = read.whole("hidden_size_per_layer_input", 0, least=0)
    if not size:
        return 0, 0
    words = read.whole("vocab_size_per_layer_input")
    if words < read.whole("vocab_size"):
        read.problem(f"vocab_size_per_layer_input {words} is less than vocab_size: some tokens have no input")
    return words, size


def _heads_of(read: ConfigFields, types: list[str], kind: str) -> dict[str, int]:
    """Read the size of the heads, and the number of heads of keys, of all layers of a type."""
    found = dict(zip(HEADS, (read.whole(name) for name in HEADS), strict=True))
    each = read.get("per_layer_config")
    if each is None:
        if kind == FULL:
            found["head_dim"] = read.whole("global_head_dim")
            if read.switch("attention_k_eq_v"):
                found["num_key_value_heads"] = read.whole("num_global_key_value_heads", found[HEADS[1]])
    else:
        own = [_override(read, each, i) for i, other in enumerate(types) if other == kind]
        if any(one != own[0] for one in own):
            read.problem(f"per_layer_config must say the same of all layers of type {kind}")
        found |= own[0]
    size, kv_heads, heads = *found.values(), read.whole("num_attention_heads")
    if heads % kv_heads:
        read.problem(
            f"num_attention_heads {heads} is not a multiple of the {kv_heads} heads of keys in {kind}"
        )
    if size % 2:
        read.problem(f"head_dim {size} of {kind} must be even for rotary embeddings")
    return {"head_dim": size, "num_kv_heads": kv_heads}


def _override(read: ConfigFields, table: Any, layer: int) -> dict[str, int]:
    # transformers writes the numbers of layers with equal widths: "05".
    named = (str(layer).zfill(width) for width in range(1, 6))
    one: Any = None
    if isinstance(table, Mapping):
        one = next((table[key] for key in named if key in table), {})
    if not isinstance(one, Mapping) or not set(one) <= set(HEADS):
        read.problem(f"per_layer_config may have {' and '.join(HEADS)} of each layer; it is {table!r}")
        return {}
    numbers = read.of(one)
    found = {name: numbers.whole(name) for name in one}
    read.problems += [line.replace(": ", f": per_layer_config.{layer}.", 1) for line in numbers.problems]
    return found


def normed(x: jax.Array, eps: float) -> jax.Array:
    """Compute x / sqrt(mean(x²) + eps), float32."""
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps)


class Gemma4Settings(NamedTuple):
    """What a layer has in addition to other layers.

    per_layer: (words, size) of the table of the inputs that each layer has of its own; (0, 0): there are none.
    keys_as_values: the values are the projected keys.
    """

    per_layer: tuple[int, int] = (0, 0)
    keys_as_values: bool = False


class Gemma4Attention(models.Attention):
    """Attention with normalised values, over the keys and values of an earlier layer where the config names one."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        c, own = config, config.settings
        make = functools.partial(Linear, rngs, (c.num_layers,), std=c.initializer_range)
        inside = functools.partial(make, axes=("layers", "embed", "heads"), bias=c.qkv_bias)
        heads, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        parts = {"q_proj": heads, "k_proj": keys, "v_proj": keys}
        if c.source is not None:
            parts = {"q_proj": heads}
        elif own.keys_as_values:
            del parts["v_proj"]
        self.parts, self.sizes = tuple(parts), tuple(parts.values())
        self.joined = c.fused and len(parts) > 1
        if self.joined:
            parts = {"qkv_proj": sum(self.sizes)}
        for name, width in parts.items():
            setattr(self, name, inside((c.hidden_size, width)))
        self.o_proj = make(
            (heads, c.hidden_size), axes=("layers", "heads", "embed"), bias=c.o_bias, sums=True
        )
        self.q_norm = RMSNorm(c, (c.num_layers,), c.head_dim)
        if c.source is None:
            self.k_norm = RMSNorm(c, (c.num_layers,), c.head_dim)
        self.config = c

    def project(self, x: jax.Array, rope: tuple[jax.Array, ...]) -> tuple[jax.Array, Any, Any, None]:
        """[B, T, D] → as `models.Attention.project`, with None for keys and values of a layer that reads another's."""
        c = self.config
        cosine, sine = (angle[:, None] for angle in rope)
        if self.joined:
            ends = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes) - 1)]
            made = jnp.split(self.qkv_proj(x), ends, axis=-1)
        else:
            made = [getattr(self, name)(x) for name in self.parts]
        q, *kv = (y.reshape(*x.shape[:2], -1, c.head_dim) for y in made)
        q = self.q_norm(q).reshape(*x.shape[:2], -1, c.num_heads // c.num_kv_heads, c.head_dim)
        q = rotate(q.transpose(0, 2, 3, 1, 4), cosine[:, None], sine[:, None])
        if not kv:
            return q, None, None, None
        k = rotate(self.k_norm(kv[0]).transpose(0, 2, 1, 3), cosine, sine)
        v = normed(kv[-1], c.norm_eps).astype(x.dtype).transpose(0, 2, 1, 3)
        return q, k, v, None


class Gemma4Experts(models.Experts):
    """Experts whose router reads the layer's normalised input, and whose weights are scaled."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        super().__init__(replace(config, shared_size=0), rngs)
        ones = functools.partial(jnp.ones, dtype=jnp.float32)
        self.gate.scale = nnx.Param(ones((config.num_layers, config.hidden_size)), axes=("layers", None))
        self.gate.per_expert_scale = nnx.Param(
            ones((config.num_layers, config.experts)), axes=("layers", None)
        )

    def logits(self, tokens: jax.Array) -> jax.Array:
        factor = self.gate.scale[...] * tokens.shape[-1] ** -0.5
        return super().logits(normed(tokens, self.config.norm_eps) * factor)

    def weigh(self, logits: jax.Array, chosen: jax.Array) -> jax.Array:
        return super().weigh(logits, chosen) * self.gate.per_expert_scale[...][chosen]


class Gemma4Layer(models.Layer):
    """Attention, MLP with or without experts next to it, and the layer's own input; each normalised before and after.

    Holds stacked parameters, runs on one layer's. `layer_scalar` is not trained.
    """

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        c, lead, size = config, (config.num_layers,), config.settings.per_layer[1]
        norm = functools.partial(RMSNorm, c, lead, c.hidden_size)
        linear = functools.partial(Linear, rngs, lead, std=c.initializer_range, bias=False)
        self.self_attn = Gemma4Attention(c, rngs)
        self.mlp = MLP(replace(c, intermediate_size=c.shared_size) if c.experts else c, rngs)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.has_experts = bool(c.experts)
        self.activation = c.activation
        if self.has_experts:
            self.moe = Gemma4Experts(c, rngs)
            self.post_feedforward_layernorm_1 = norm()
            self.pre_feedforward_layernorm_2, self.post_feedforward_layernorm_2 = norm(), norm()
        if size:
            self.per_layer_input_gate = linear((c.hidden_size, size), axes=("layers", "embed", None))
            self.per_layer_projection = linear((size, c.hidden_size), axes=("layers", None, "embed"))
            self.post_per_layer_input_norm = norm()
        self.layer_scalar = nnx.Param(jnp.ones((*lead, 1), jnp.float32), axes=("layers", None))

    def __call__(self, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, Aux]:
        mixed, cache = self.self_attn(self.input_layernorm(x), ctx)
        x = x + self.post_attention_layernorm(mixed)
        inner, routed = self._feed_forward(self.pre_feedforward_layernorm(x), ctx)
        if self.has_experts:
            chosen, routed = self.moe(self.pre_feedforward_layernorm_2(x), ctx.routing, x)
            inner = self.post_feedforward_layernorm_1(inner) + self.post_feedforward_layernorm_2(chosen)
        x = x + self.post_feedforward_layernorm(inner)
        if ctx.given is not None:
            own = ACTIVATIONS[self.activation](self.per_layer_input_gate(x)) * ctx.given
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(own))
        return x * lax.stop_gradient(self.layer_scalar[...]).astype(x.dtype), Aux(cache, routed)


class PerLayerInputs(nnx.Module):
    """The layers' own inputs: of each token, a row of a table and a projection of its embedding."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        words, size = config.settings.per_layer
        width = config.num_layers * size
        table = replace(config, vocab_size=words, hidden_size=width, embedding_scale=math.sqrt(size))
        self.embed_tokens_per_layer = Embedding(table, rngs)
        self.per_layer_model_projection = Linear(
            rngs, (), (config.hidden_size, width), ("embed", None), config.initializer_range, bias=False
        )
        self.per_layer_projection_norm = RMSNorm(config, (), size)
        self.size = size

    def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        """Tokens, int32 [B, T], and their embeddings [B, T, D] → [layers, B, T, size]."""
        made = (
            self.per_layer_model_projection(x) * x.shape[-1] ** -0.5,
            self.embed_tokens_per_layer(tokens, x.dtype),
        )
        projected, found = (y.reshape(*tokens.shape, -1, self.size) for y in made)
        return jnp.moveaxis((self.per_layer_projection_norm(projected) + found) * 2**-0.5, 2, 0)


class Gemma4LayerWithInput(Gemma4Layer):
    """A layer that has an input of its own."""

    given = PerLayerInputs


ARCHITECTURES = {
    "gemma4_text": Architecture(
        "Gemma4ForCausalLM",
        DEFAULTS,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        norms="both",
        scaled_embedding=True,
        activation="hidden_activation",
        layer_types=layer_types,
        layer_types_decide=True,
        details=details,
        weight_names=WEIGHT_NAMES,
    )
}
FAMILY = decoder_family(ARCHITECTURES)
