"""A llama of made-up weights: bfloat16, in several safetensors files with an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rlhf_core.models.safetensors import Writer

HIDDEN, INNER, HEADS, KEY_HEADS, SIZE, VOCABULARY = 1536, 4096, 12, 4, 128, 32_000
FILES = 4


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """{name: shape} of every tensor, as the files have them: a matrix is [out, in]."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        block = {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * SIZE, HIDDEN),
            "self_attn.k_proj": (KEY_HEADS * SIZE, HIDDEN),
            "self_attn.v_proj": (KEY_HEADS * SIZE, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * SIZE),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def count(layers: int) -> int:
    return sum(int(np.prod(shape)) for shape in shapes(layers).values())


def write(directory: Path, gigabytes: float) -> dict[str, Any]:
    """The model, of as many layers as make about `gigabytes`; returns what it is."""
    layer = count(1) - count(0)
    layers = max(1, round((gigabytes * 5e8 - count(0)) / layer))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": SIZE,
        "vocab_size": VOCABULARY,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    draw = np.random.default_rng(0)
    total = 2 * count(layers)
    with Writer(directory, shapes(layers), "bfloat16", -(-total // FILES)) as writer:
        for name, shape in shapes(layers).items():
            writer.put(name, draw.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16))
    return {"bytes": total, "layers": layers, "files": len(list(directory.glob("*.safetensors")))}
