"""What makes each family of decoders another one, in fields of its config.json in which every term counts."""

from __future__ import annotations

from typing import Any

from rlhf_core.models import find_family

BASE: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 37,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
}
TURNS = {"rope_type": "default", "rope_theta": 100.0}
HALF = TURNS | {"partial_rotary_factor": 0.5}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "rope_theta": 100.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 3.0], "long_factor": [2.0, 5.0]}
GEMMA = {
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 10,
    "sliding_window": 3,
}
GEMMA4 = {
    "model_type": "gemma4_text",
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 3,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
    },
    "vocab_size_per_layer_input": 40,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
}
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "head_dim": 8,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": HALF,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
OF_TWO = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
CONVOLUTIONS = ["conv", "full_attention", "conv"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, all heads": {"model_type": "llama", "num_key_value_heads": 4, "hidden_act": "gelu"},
    "llama3 rope": {"model_type": "llama", "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 40}},
    "linear rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0},
    },
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2 with windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "mistral, yarn": {"model_type": "mistral", "sliding_window": 3, "rope_scaling": YARN},
    "gemma2": GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0},
    "gemma3": GEMMA
    | {
        "model_type": "gemma3_text",
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 20.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma4, shared keys": GEMMA4
    | {
        "num_hidden_layers": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "hidden_size_per_layer_input": 6,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True,
        "num_key_value_heads": 1,
        "final_logit_softcapping": 3.0,
    },
    "gemma4, keys as values": GEMMA4
    | {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "attention_bias": True,
        "num_global_key_value_heads": 1,
    },
    "gemma4, experts": GEMMA4
    | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
    },
    "phi3": {
        "model_type": "phi3",
        "head_dim": 8,
        "sliding_window": None,
        "rope_parameters": LONGROPE | {"attention_factor": 1.2} | HALF | {"rope_type": "longrope"},
        "original_max_position_embeddings": 16,
    },
    "olmo2": {"model_type": "olmo2", "attention_bias": True},
    "olmo3": {"model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 3, "rope_scaling": YARN},
    "granite": {
        "model_type": "granite",
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "ministral3": {
        "model_type": "ministral3",
        "head_dim": 8,
        "rope_parameters": TURNS | {"original_max_position_embeddings": 3, "llama_4_scaling_beta": 0.3},
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "first_k_dense_replace": 1,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "rope_parameters": HALF,
        "head_dim": 8,
        **OF_TWO,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 8,
        "sliding_window": 3,
        "attention_bias": True,
        "rope_parameters": TURNS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_alpha": 1.5,
        "swiglu_limit": 0.5,
    },
    "lfm2": {
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "layer_types": CONVOLUTIONS,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "norm_eps": 1e-5,
        "conv_bias": True,
        "layer_types": CONVOLUTIONS,
        "num_dense_layers": 1,
        "num_experts": 4,
        "routed_scaling_factor": 1.5,
        **OF_TWO,
    },
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5
    | {"model_type": "qwen3_5_moe_text", "num_experts": 4, "shared_expert_intermediate_size": 20, **OF_TWO},
    "smollm3": {
        "model_type": "smollm3",
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 3,
    },
    "smollm3, deep": {"model_type": "smollm3", "no_rope_layer_interval": 4, "num_hidden_layers": 9},
    "mixtral": {
        "model_type": "mixtral",
        "sliding_window": 4,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "norm_topk_prob": False,
    },
}
CONFIGS = {name: BASE | fields for name, fields in FAMILIES.items()}


def defined(fields: dict[str, Any], head: Any = "lm") -> Any:
    """Define the model that the fields of a config.json describe, by its registered family."""
    return find_family(fields["model_type"]).define(fields, head)
