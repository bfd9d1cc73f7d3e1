"""Qwen3.5: the gated delta rule in three of four layers, attention with an output gate in the fourth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_core.models.hf_config import Fields

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
WEIGHT_NAMES: Mapping[str, str] = {}


def details(read: Fields, layers: int) -> dict[str, Any]:
    """Read what differs from a plain decoder."""
    kinds = read.get("layer_types")
    if kinds is None:
        interval = read.whole("full_attention_interval")
        kinds = [LINEAR if (i + 1) % interval else FULL for i in range(layers)]
    key_heads, value_heads = read.whole("linear_num_key_heads"), read.whole("linear_num_value_heads")
    if value_heads % key_heads:
        read.problem(
            f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}"
        )
    return {
        "taps": read.whole("linear_conv_kernel_dim", least=2),
        "linear_heads": (
            key_heads,
            value_heads,
            read.whole("linear_key_head_dim"),
            read.whole("linear_value_head_dim"),
        ),
        "attention_gate": True,
        "carried": (r"mtp\.",),  # layers that predict further tokens
        "kinds": tuple(kinds),
        "variants": ((LINEAR, (("mixer", "linear_attn"),)),),
    }


def moe_details(read: Fields, layers: int) -> dict[str, Any]:
    """Read what differs from a plain decoder, of the models with experts."""
    return details(read, layers) | {
        "intermediate_size": read.whole("moe_intermediate_size"),
        "experts": read.whole("num_experts"),
        "experts_per_token": read.whole("num_experts_per_tok"),
        "shared_size": read.whole("shared_expert_intermediate_size"),
        "shared_gate": True,
    }
