"""No array is [tokens, vocabulary]: what the compiler reserves beside arguments and results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rlhf_distill import token_divergences

from rlhf_core.plugins import load_file

TOKENS, VOCABULARY, WIDTHS = 2048, 32_768, (16, 32)


@pytest.fixture(scope="module")
def memory(repository: Path) -> Any:
    return load_file(repository / "benchmarks" / "distill" / "memory.py")


@pytest.mark.parametrize("top_k", [None, 16])
def test_chunks_take_a_tenth_of_whole_logits(memory: Any, top_k: int | None) -> None:
    def chunks(*heads: Any) -> Any:
        return token_divergences(memory.DIVERGENCE, *heads, top_k=top_k, chunk=64)

    sizes = [
        memory.temporary_bytes(function, TOKENS, VOCABULARY, WIDTHS) for function in (chunks, memory.dense)
    ]
    assert sizes[1] >= 4 * TOKENS * VOCABULARY
    assert sizes[0] <= sizes[1] / 10
    assert sizes[0] < 4 * TOKENS * VOCABULARY
