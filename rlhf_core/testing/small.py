"""A model, a tokenizer and rows so small that a trainer runs on them in seconds."""

from __future__ import annotations

from typing import Any

import numpy as np

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ("<pad>", "</s>", "<unk>")
MODEL_TABLE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
}
"""A fresh model, by Hugging Face's config names; its vocabulary is that of `tokenizer()`."""


def tokenizer() -> Any:
    """A letter between spaces is a token; `</s>` ends a sequence."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *LETTERS]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def texts(count: int = 12) -> list[dict[str, Any]]:
    """Rows `prompt` + `completion`."""
    draw = np.random.default_rng(0)
    return [{"prompt": _letters(draw, 5), "completion": " " + _letters(draw, 6)} for _ in range(count)]


def pairs(count: int = 12) -> list[dict[str, Any]]:
    """Rows `prompt` + `chosen` + `rejected`; the two replies differ."""
    draw = np.random.default_rng(1)
    return [
        {
            "prompt": _letters(draw, 5),
            "chosen": f" a {_letters(draw, 6)}",
            "rejected": f" b {_letters(draw, 6)}",
        }
        for _ in range(count)
    ]


def prompts(count: int = 12) -> list[dict[str, Any]]:
    """Rows `prompt` + `answer`."""
    draw = np.random.default_rng(2)
    return [{"prompt": _letters(draw, 5), "answer": _letters(draw, 1)} for _ in range(count)]


def _letters(draw: np.random.Generator, longest: int) -> str:
    return " ".join(LETTERS[i] for i in draw.integers(0, len(LETTERS), draw.integers(1, longest + 1)))
