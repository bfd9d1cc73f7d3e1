"""LFM2: short convolutions between gates in place of most attention layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_core.models.hf_config import Fields

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
}


def details(read: Fields, layers: int) -> dict[str, Any]:
    """Read what differs from a plain decoder."""
    if read.switch("conv_bias"):
        read.problem("conv_bias true is not supported; the decoder has convolutions without biases")
    kinds = read.get("layer_types")
    if kinds is None:
        attention = read.get("full_attn_idxs")
        kinds = ["full_attention" if attention is None or i in attention else "conv" for i in range(layers)]
    size = read.whole("block_ff_dim" if read.get("block_ff_dim") is not None else "intermediate_size")
    if read.switch("block_auto_adjust_ff_dim"):
        factor, step = read.number("block_ffn_dim_multiplier", 1.0), read.whole("block_multiple_of")
        size = step * -(-int(factor * int(2 * size / 3)) // step)
    tied = read.get("tie_embedding")
    return {
        "norm_eps": read.number("norm_eps", 1e-5),
        "intermediate_size": size,
        "taps": read.whole("conv_L_cache"),
        "tied": read.switch("tie_word_embeddings" if tied is None else "tie_embedding"),
        "kinds": tuple(kinds),
        "variants": (("conv", (("mixer", "conv"),)),),
    }
