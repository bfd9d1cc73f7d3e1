"""Chat templates of published models, each with a small tokenizer that has its special tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = re.compile(r"<[|｜][^<>|｜\n]+[|｜]>|<\w+_of_\w+>|\[/?[A-Z_]+\]")
OTHERS = ("<s>", "</s>", "<|eom_id|>", "<|python_tag|>")
MERGES = [("Ġ", "a"), ("Ċ", "Ċ"), ("Ġ", "Ġ"), ("y", "Ċ"), ("e", "r"), (">", "Ċ"), ("Ċ", "<"), ("i", "n")]


def tokenizer_for(
    template: str, *, swallows: tuple[str, ...] = (), swallows_before: tuple[str, ...] = ()
) -> Any:
    """A byte-level tokenizer with the special tokens that a template writes; its merges cross any border of texts.

    swallows, swallows_before: tokens that take the white space after or before them.
    """
    special = list(dict.fromkeys([*OTHERS, *SPECIAL.findall(template)]))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*special, *alphabet, *(a + b for a, b in MERGES)]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True, rstrip=t in swallows, lstrip=t in swallows_before) for t in special]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    return tokenizer_for


@pytest.fixture(scope="session")
def published(shared: Path) -> dict[str, Path]:
    """{name: file} of the published templates."""
    directory = shared / "templates"
    if not directory.is_dir():
        pytest.skip(f"no chat templates at {directory}")
    return {path.stem: path for path in sorted(directory.glob("*.jinja"))}
