"""examples/smollm2: from GGUF's names, order of rows and tokenizer to Hugging Face's."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from rlhf_core.plugins.component import load_file

BYTES = [chr(code) for code in range(ord("!"), ord("~") + 1)]


@pytest.fixture
def prepare(repository: Path) -> ModuleType:
    return load_file(repository / "examples" / "smollm2" / "prepare.py")


def test_names(prepare: ModuleType) -> None:
    assert prepare.name_of("token_embd.weight") == "model.embed_tokens.weight"
    assert prepare.name_of("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    assert prepare.name_of("blk.3.ffn_norm.weight") == "model.layers.3.post_attention_layernorm.weight"


def test_rows_that_are_rotated_together(prepare: ModuleType) -> None:
    """In GGUF row 2 i + j of a head is row i + j · width / 2 in Hugging Face's layout, j being 0 or 1."""
    heads, width, columns = 3, 8, 5
    wanted = np.arange(heads * width * columns, dtype=np.float32).reshape(heads * width, columns)
    stored = np.empty_like(wanted)
    for head in range(heads):
        for i in range(width // 2):
            for j in range(2):
                stored[head * width + 2 * i + j] = wanted[head * width + i + j * width // 2]
    np.testing.assert_array_equal(prepare.without_permutation(stored, heads), wanted)


def test_the_tokenizer_splits_digits_and_keeps_control_tokens_whole(
    prepare: ModuleType, tmp_path: Path
) -> None:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, "Ġ", "Ċ", "Ġa", "12"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["Ġ a", "1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
        "llama.context_length": 64,
    }
    prepare.write_tokenizer(tmp_path, metadata)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("x a12<|im_end|>\n")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["x", "Ġa", "1", "2", "<|im_end|>", "Ċ"]
    assert tokenizer.decode(ids) == "x a12<|im_end|>\n"
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )
