"""Qwen3.5: the gated delta rule in three of four layers, attention with an output gate in the fourth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_core.models import Architecture, ConfigFields, Layer, decoder_family
from rlhf_families.mixers import DeltaNet, DeltaSettings

LINEAR, FULL = "linear_attention", "full_attention"
DEFAULTS: Mapping[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
MOE_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "intermediate_size": 512,
}
MROPE = ("mrope_section", "mrope_interleaved")
"""What only images need: text has one position per token."""


class DeltaLayer(Layer):
    """A layer whose tokens are mixed by the gated delta rule, `mixers.DeltaNet`, which says what its state is."""

    mixer = DeltaNet
    name = "linear_attn"
    about = "gated delta rule"


def layer_types(read: ConfigFields, layers: int) -> list[str]:
    """Give all layers but every `full_attention_interval`-th the delta rule."""
    interval = read.whole("full_attention_interval")
    return [LINEAR if (i + 1) % interval else FULL for i in range(layers)]


def details(read: ConfigFields, layers: int) -> dict[str, Any]:
    """Read what differs from a plain decoder."""
    key_heads, value_heads = read.whole("linear_num_key_heads"), read.whole("linear_num_value_heads")
    if value_heads % key_heads:
        read.problem(
            f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}"
        )
    return {
        "settings": DeltaSettings(
            taps=read.whole("linear_conv_kernel_dim", least=2),
            key_heads=key_heads,
            value_heads=value_heads,
            key_size=read.whole("linear_key_head_dim"),
            value_size=read.whole("linear_value_head_dim"),
        ),
        "attention_gate": True,
        "carried": (r"mtp\.",),  # layers that predict further tokens
    }


def moe_details(read: ConfigFields, layers: int) -> dict[str, Any]:
    """Read what differs from a plain decoder, of the models with experts."""
    return details(read, layers) | {
        "intermediate_size": read.whole("moe_intermediate_size"),
        "experts": read.whole("num_experts"),
        "experts_per_token": read.whole("num_experts_per_tok"),
        "shared_size": read.whole("shared_expert_intermediate_size"),
        "shared_gate": True,
    }


DENSE = Architecture(
    "Qwen3_5ForCausalLM",
    {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "attention_bias": False,
        **DEFAULTS,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="head",
    norm_offset=1.0,
    partial_rotary=True,
    rope_fields=MROPE,
    layer_types=layer_types,
    layers={LINEAR: DeltaLayer},
    details=details,
)
ARCHITECTURES = {
    "qwen3_5_text": DENSE,
    "qwen3_5_moe_text": replace(
        DENSE,
        causal_lm="Qwen3_5MoeForCausalLM",
        defaults={**DENSE.defaults, **MOE_DEFAULTS},
        details=moe_details,
    ),
}
FAMILY = decoder_family(ARCHITECTURES)
