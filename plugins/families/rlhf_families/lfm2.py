"""LFM2: short convolutions between gates in place of most attention layers; and LFM2 with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.models import Architecture, ConfigFields, Layer, decoder_family
from rlhf_families.mixers import Convolution, ConvolutionSettings

FULL, CONV = "full_attention", "conv"


class ConvolutionLayer(Layer):
    """A layer whose tokens are mixed by a short convolution."""

    mixer = Convolution
    name = "conv"
    about = "short convolutions"


DEFAULTS: Mapping[str, Any] = {
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": None,
    "block_dim": None,
    "full_attn_idxs": None,
    "tie_embedding": None,
}
MOE_DEFAULTS: Mapping[str, Any] = {
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "conv_bias": False,
    "conv_L_cache": 3,
    "tie_embedding": None,
    "num_dense_layers": 2,
    "moe_intermediate_size": 1792,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
}
_LAYER = "model.layers.{layer}"
WEIGHT_NAMES = {
    "norm": "model.embedding_norm",
    "layers.input_layernorm": f"{_LAYER}.operator_norm",
    "layers.post_attention_layernorm": f"{_LAYER}.ffn_norm",
    "layers.mlp.gate_proj": f"{_LAYER}.feed_forward.w1",
    "layers.mlp.up_proj": f"{_LAYER}.feed_forward.w3",
    "layers.mlp.down_proj": f"{_LAYER}.feed_forward.w2",
    "layers.self_attn.q_norm": f"{_LAYER}.self_attn.q_layernorm",
    "layers.self_attn.k_norm": f"{_LAYER}.self_attn.k_layernorm",
    "layers.self_attn.o_proj": f"{_LAYER}.self_attn.out_proj",
    "layers.mlp.gate": f"{_LAYER}.feed_forward.gate",
    "layers.mlp.gate.e_score_correction_bias": f"{_LAYER}.feed_forward.expert_bias",
    "layers.mlp.experts.gate_proj": f"{_LAYER}.feed_forward.experts.{{expert}}.w1",
    "layers.mlp.experts.up_proj": f"{_LAYER}.feed_forward.experts.{{expert}}.w3",
    "layers.mlp.experts.down_proj": f"{_LAYER}.feed_forward.experts.{{expert}}.w2",
}


def layer_types(read: ConfigFields, layers: int) -> list[str]:
    """Give the layers that `full_attn_idxs` does not name a convolution."""
    attention = read.get("full_attn_idxs")
    return [FULL if attention is None or i in attention else CONV for i in range(layers)]


def details(read: ConfigFields, layers: int) -> dict[str, Any]:
    """Read what differs from a plain decoder."""
    size = read.whole("block_ff_dim" if read.get("block_ff_dim") is not None else "intermediate_size")
    if read.switch("block_auto_adjust_ff_dim"):
        factor = read.number("block_ffn_dim_multiplier", 1.0)
        step = read.whole("block_multiple_of")
        size = step * -(-int(factor * int(2 * size / 3)) // step)
    return {**_common(read), "intermediate_size": size}


def moe_details(read: ConfigFields, layers: int) -> dict[str, Any]:
    """Read what differs from a plain decoder, of the models with experts."""
    if read.get("use_expert_bias") is False:
        read.problem("use_expert_bias false is not supported; routers have a correction")
    stored = read.get("layer_types")
    dense = read.whole("num_dense_layers", least=0)
    types = stored if isinstance(stored, list) else layer_types(read, layers)
    plain = {"experts": 0, "experts_per_token": 0, "intermediate_size": read.whole("intermediate_size")}
    mixer: dict[str, Any] = {"layer": ConvolutionLayer}
    variants = {CONV: mixer, f"dense_{CONV}": mixer | plain, f"dense_{FULL}": plain}
    return {
        **_common(read),
        "intermediate_size": read.whole("moe_intermediate_size"),
        "router": "sigmoid",
        "expert_scale": read.positive("routed_scaling_factor") or 1.0,
        "normalise_floor": 1e-6,
        "kinds": tuple(f"dense_{kind}" if i < dense else kind for i, kind in enumerate(types)),
        "variants": tuple((kind, tuple(fields.items())) for kind, fields in variants.items()),
    }


def _common(read: ConfigFields) -> dict[str, Any]:
    tied = read.get("tie_embedding")
    return {
        "norm_eps": read.number("norm_eps", 1e-5),
        "settings": ConvolutionSettings(read.whole("conv_L_cache", least=2), read.switch("conv_bias")),
        "tied": read.switch("tie_word_embeddings" if tied is None else "tie_embedding"),
    }


ARCHITECTURES = {
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 128_000,
            "tie_word_embeddings": True,
            **DEFAULTS,
        },
        qk_norm="head",
        layer_types=layer_types,
        layers={CONV: ConvolutionLayer},
        details=details,
        weight_names=WEIGHT_NAMES,
    ),
    "lfm2_moe": Architecture(
        "Lfm2MoeForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 128_000,
            "tie_word_embeddings": True,
            **MOE_DEFAULTS,
        },
        qk_norm="head",
        normalise_experts="norm_topk_prob",
        layer_types=layer_types,
        layers={CONV: ConvolutionLayer},
        details=moe_details,
        weight_names=WEIGHT_NAMES,
    ),
}
FAMILY = decoder_family(ARCHITECTURES)
