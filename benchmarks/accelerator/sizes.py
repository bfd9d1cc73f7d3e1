"""What is measured: models, batches and lengths, in full and at sizes that a CPU computes in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SEED = 0


def _qwen3(
    hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, vocab: int
) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }


@dataclass(frozen=True)
class Attention:
    """Heads, and lengths of rows, of which `tokens` are computed at once."""

    kv_heads: int
    groups: int
    head_dim: int
    lengths: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class Sizes:
    """models: {name: config.json}. pairs, pair_tokens: of W1. prompts, group, prompt, completion: of W2 to W4.
    decoder: the model whose decoding is timed with these numbers of `slots`. adapted: the model that adapters of `rank`
    are trained on, from `sequences` of `length` tokens. repeats: timed runs of each program, after one that is not.
    """

    models: Mapping[str, Mapping[str, Any]]
    pairs: int
    pair_tokens: int
    prompts: int
    group: int
    prompt: int
    completion: int
    attention: Attention
    decoder: str
    slots: tuple[int, ...]
    adapted: Mapping[str, Any]
    rank: int
    sequences: int
    length: int
    repeats: int


FULL = Sizes(
    models={
        "50m": _qwen3(512, 8, 8, 4, 64, 1376, 32_000),
        "0.6b": _qwen3(1024, 28, 16, 8, 128, 3072, 151_936),
        "1.7b": _qwen3(2048, 28, 16, 8, 128, 6144, 151_936),
    },
    pairs=64,
    pair_tokens=256,
    prompts=32,
    group=8,
    prompt=64,
    completion=192,
    attention=Attention(8, 2, 128, (1024, 2048, 4096, 8192, 16_384), 16_384),
    decoder="1.7b",
    slots=(256, 1024, 32, 512, 128),
    adapted={**_qwen3(4096, 36, 32, 8, 128, 12_288, 151_936), "tie_word_embeddings": False},
    rank=16,
    sequences=8,
    length=1024,
    repeats=3,
)
_SMALL = _qwen3(16, 1, 2, 1, 8, 16, 64)
TINY = Sizes(
    models={"50m": _SMALL},
    pairs=2,
    pair_tokens=8,
    prompts=2,
    group=2,
    prompt=4,
    completion=4,
    attention=Attention(1, 2, 8, (16,), 32),
    decoder="50m",
    slots=(4,),
    adapted=_SMALL,
    rank=2,
    sequences=2,
    length=8,
    repeats=1,
)
