"""The models, the data and the limits, read by our environment and by PyTorch's alike.

Nothing here needs more than Python.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
RUNS = REPOSITORY / "runs" / "interop"
RESULTS = HERE / "results"

SEEDS = (0,)
TOLERANCE = 1e-4
"""Absolute, of float32 logits and scores."""
LEAST = 100 * TOLERANCE
"""What an adapter must change, and what outputs must deviate from one another: less would hide a mistake."""

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "smollm3",
    "mixtral",
    "qwen3_moe",
)
PRETRAINED = "pretrained"
CASES = (*FAMILIES, PRETRAINED)

UPDATES = 4
BATCH = 8
WINDOW = 8
"""Window of sliding attention, in tokens: less than half a sequence."""
VOCABULARY = 320
WORDS = tuple(a + b for a in "bdfgklmnprst" for b in ("an", "el", "it", "or", "u"))


def directory(seed: int, case: str) -> Path:
    return RUNS / f"seed{seed}" / case


def table(family: str, seed: int) -> dict[str, Any]:
    """Sample the sizes of a model, by Hugging Face's names, from the seed."""
    draw = random.Random(f"{family} {seed}")
    heads, size = draw.choice((4, 6)), draw.choice((8, 16))
    found = {
        "model_type": family,
        "vocab_size": VOCABULARY,
        "hidden_size": heads * size,
        "intermediate_size": draw.choice((40, 72, 96)),
        "num_hidden_layers": draw.choice((2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice((1, 2, heads)),
        "max_position_embeddings": 256,
        "rope_theta": draw.choice((500.0, 10_000.0)),
        "tie_word_embeddings": draw.random() < 0.5,
        "initializer_range": 0.1,
    }
    own = {
        "llama": lambda: {"rope_scaling": ROPES[seed % len(ROPES)], "attention_bias": draw.random() < 0.5},
        "mistral": lambda: {"sliding_window": WINDOW, "head_dim": 2 * size},
        "qwen2": lambda: {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        "qwen3": lambda: {"head_dim": 2 * size},
        "gemma2": lambda: {"sliding_window": WINDOW, "head_dim": 2 * size, "query_pre_attn_scalar": 20},
        "gemma3_text": lambda: {"sliding_window": WINDOW, "sliding_window_pattern": 2, "head_dim": 2 * size},
        "phi3": lambda: {"sliding_window": WINDOW, "original_max_position_embeddings": 256},
        "smollm3": lambda: {"no_rope_layer_interval": 2},
        "mixtral": lambda: {"num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen3_moe": lambda: {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    }
    return found | own.get(family, dict)()


ROPES = (
    None,
    {"rope_type": "linear", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
)


def pairs(seed: int, count: int) -> list[dict[str, str]]:
    """Rows `prompt`, `chosen` and `rejected` of 4 to 44 words in all."""
    draw = random.Random(seed)

    def words(low: int, high: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))

    return [
        {"prompt": words(3, 14), "chosen": " " + words(1, 30), "rejected": " " + words(1, 30)}
        for _ in range(count)
    ]


def adapters(case: str) -> dict[str, dict[str, Any]]:
    """Options of peft.LoraConfig for each adapter that PEFT makes."""
    names = ("qkv_proj", "o_proj") if case == "phi3" else ("q_proj", "o_proj")
    # Of mixtures of experts PEFT means the experts' stacked parameters too, which adapters here leave alone.
    experts = case in ("mixtral", "qwen3_moe")
    return {
        "plain": {"r": 4, "lora_alpha": 8, "target_modules": list(names)},
        "rank-stabilised, ranks by layer": {
            "r": 8,
            "lora_alpha": 12,
            "use_rslora": True,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"] if experts else "all-linear",
            "rank_pattern": {f"layers.0.self_attn.{names[0]}": 2},
            "alpha_pattern": {f"layers.1.self_attn.{names[1]}": 5},
        },
    }


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
