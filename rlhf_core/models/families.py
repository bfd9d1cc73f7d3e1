"""The families that the decoder reads, as data: what each `model_type` implies beyond its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import rlhf_core.models.glm4_moe as glm4_moe
import rlhf_core.models.gpt_oss as gpt_oss
from rlhf_core.models.config import Norms, QKNorm

if TYPE_CHECKING:
    from rlhf_core.models.hf_config import Fields

FULL, SLIDING = "full_attention", "sliding_attention"
LayerTypes: TypeAlias = "Callable[[Fields, int], list[str]]"
"""(config.json, number of layers) → FULL or SLIDING per layer."""


@dataclass(frozen=True, eq=False)
class Architecture:
    """One family. A switch is True, False, or the name of the config field that sets it.

    causal_lm: its class in transformers. defaults: its fields in addition to `hf_config.COMMON`, and other defaults for
    these; a field of a config.json that is in neither is refused. The fields that the decoder knows by name:
    `query_pre_attn_scalar`, `attn_logit_softcapping`, `final_logit_softcapping`, `rope_local_base_freq`,
    `no_rope_layers` and `no_rope_layer_interval`, `num_experts` or `num_local_experts`, `num_experts_per_tok`.
    weight_names: {parameter path: name in the files} where they differ, as in `weights`.
    """

    causal_lm: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: QKNorm | None = None
    norms: Norms = "before"
    norm_offset: float = 0.0
    fused: bool = False
    scaled_embedding: bool = False
    """Multiply embeddings by sqrt(hidden_size)."""
    activation: str = "hidden_act"
    """The name of the field that names the activation."""
    expert_size: str = "intermediate_size"
    normalise_experts: bool | str = True
    layer_types: LayerTypes | None = None
    """Chooses the layers with a sliding window where the file has no `layer_types`; None: no layer ever has one."""
    layer_types_decide: bool = False
    """Whether the file's `layer_types` decide; otherwise they must equal the result of `layer_types` above."""
    layers: Mapping[str, Any] = field(default_factory=dict)
    """Layers of the family's own: {name in `layer_types`: the class, see `layer.Layer`}, beside FULL."""
    longrope: tuple[str, ...] = ()
    """Names of the rope type longrope; empty for families without it."""
    partial_rotary: bool = False
    scaled_rope: str | None = None
    """The kind of layer that `rope_scaling` is for, where one table stands for all; None: all kinds."""
    details: Callable[[Fields, int], Mapping[str, Any]] | None = None
    """(config.json, number of layers) → further fields of the decoder's config, for a family that is code."""
    rope_fields: tuple[str, ...] = ()
    """What a rope table may have in addition to the fields of its type."""
    weight_names: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Sizes that the `text_config` of published checkpoints leaves out where they have these values."""


def every_layer(read: Fields, layers: int) -> list[str]:
    """Give all layers a sliding window where `sliding_window` is set and not switched off."""
    on = read.get("sliding_window") is not None and read.get("use_sliding_window") is not False
    return [SLIDING if on else FULL] * layers


def upper_layers(read: Fields, layers: int) -> list[str]:
    """Give the layers from `max_window_layers` on a sliding window, where windows are switched on."""
    on = read.switch("use_sliding_window") and read.get("sliding_window") is not None
    first = read.whole("max_window_layers", least=0) if on else layers
    return [SLIDING if i >= first else FULL for i in range(layers)]


def alternating(read: Fields, layers: int) -> list[str]:
    """Give every other layer a sliding window, from the first on."""
    return [FULL if i % 2 else SLIDING for i in range(layers)]


def every_nth_full(read: Fields, layers: int) -> list[str]:
    """Give all layers but every `sliding_window_pattern`-th a sliding window."""
    period = read.whole("sliding_window_pattern")
    return [SLIDING if (i + 1) % period else FULL for i in range(layers)]


def every_fourth_full(read: Fields, layers: int) -> list[str]:
    """Give all layers but every fourth a sliding window."""
    return [SLIDING if (i + 1) % 4 else FULL for i in range(layers)]


def unrotated_layers(read: Fields, layers: int) -> list[str]:
    """Give the layers without rotary embedding a sliding window, where windows are switched on."""
    on = read.switch("use_sliding_window") and read.get("sliding_window") is not None
    return [SLIDING if on and not rotated else FULL for rotated in rotated_layers(read, layers)]


def rotated_layers(read: Fields, layers: int) -> list[bool]:
    """List which layers have a rotary embedding."""
    if not read.has("no_rope_layers"):
        return [True] * layers
    flags = read.flags("no_rope_layers", layers)
    if flags is not None:
        return flags
    interval = read.whole("no_rope_layer_interval")
    return [(i + 1) % interval != 0 for i in range(layers)]


_LLAMA_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_MROPE = ("mrope_section", "mrope_interleaved")
"""What only images need: text has one position per token."""
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "LlamaForCausalLM",
        {"attention_bias": False, "mlp_bias": False},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        left_out=_LLAMA_7B,
    ),
    "mistral": Architecture(
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        layer_types=every_layer,
        left_out=_LLAMA_7B | {"intermediate_size": 14336},
    ),
    "qwen2": Architecture(
        "Qwen2ForCausalLM",
        _QWEN,
        qkv_bias=True,
        layer_types=upper_layers,
        layer_types_decide=True,
        rope_fields=_MROPE,
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        _QWEN | {"head_dim": 128, "attention_bias": False},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        layer_types=upper_layers,
        layer_types_decide=True,
        rope_fields=_MROPE,
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        _GEMMA
        | {
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms="both",
        norm_offset=1.0,
        scaled_embedding=True,
        activation="hidden_activation",
        layer_types=alternating,
        layer_types_decide=True,
    ),
    "gemma3_text": Architecture(
        "Gemma3ForCausalLM",
        _GEMMA
        | {
            "max_position_embeddings": 131072,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        norms="both",
        norm_offset=1.0,
        scaled_embedding=True,
        activation="hidden_activation",
        layer_types=every_nth_full,
        layer_types_decide=True,
        left_out={"vocab_size": 262_208, "num_attention_heads": 8},
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        fused=True,
        layer_types=every_layer,
        longrope=("longrope", "su", "yarn"),
        partial_rotary=True,
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        {"rms_norm_eps": 1e-5, "attention_bias": False},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="projection",
        norms="after",
    ),
    "olmo3": Architecture(
        "Olmo3ForCausalLM",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "sliding_window": 4096,
            "attention_bias": False,
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="projection",
        norms="after",
        layer_types=every_fourth_full,
        layer_types_decide=True,
        scaled_rope=FULL,
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        {
            "attention_bias": False,
            "mlp_bias": False,
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "ministral3": Architecture(
        "Ministral3ForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        layer_types=every_layer,
        rope_fields=("llama_4_scaling_beta", "max_position_embeddings"),
    ),
    "glm4_moe": Architecture(
        "Glm4MoeForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "use_qk_norm": False,
            "partial_rotary_factor": 0.5,
            **glm4_moe.DEFAULTS,
        },
        qkv_bias="attention_bias",
        partial_rotary=True,
        normalise_experts="norm_topk_prob",
        details=glm4_moe.details,
        weight_names=glm4_moe.WEIGHT_NAMES,
    ),
    "gpt_oss": Architecture(
        "GptOssForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "sliding_window": 128,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        layer_types=alternating,
        layer_types_decide=True,
        details=gpt_oss.details,
        weight_names=gpt_oss.WEIGHT_NAMES,
    ),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_bias": False,
            "mlp_bias": False,
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        layer_types=unrotated_layers,
        layer_types_decide=True,
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        layer_types=every_layer,
        weight_names={
            "layers.mlp.gate": "model.layers.{layer}.block_sparse_moe.gate",
            "layers.mlp.experts.gate_proj": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1",
            "layers.mlp.experts.up_proj": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3",
            "layers.mlp.experts.down_proj": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2",
        },
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        _QWEN
        | {
            "num_key_value_heads": 4,
            "attention_bias": False,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_local_experts": None,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        expert_size="moe_intermediate_size",
        normalise_experts="norm_topk_prob",
        layer_types=every_layer,
    ),
}
