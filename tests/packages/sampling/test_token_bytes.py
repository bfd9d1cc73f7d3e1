"""What tokens write, against what decoding gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from rlhf_core.errors import InputError
from rlhf_core.sampling import token_bytes
from rlhf_core.tokenizer import load_tokenizer

WORDS = ["</s>", "a", "b", ".", "##c", "▁d", "e▁f", "<0x41>", "<0xC3>", "<0xA9>", "Ġg", "é"]


def words(decoder: Any = None) -> Any:
    """A tokenizer of WORDS with that decoder; </s> is special."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    if decoder is not None:
        backend.decoder = decoder
    return SimpleNamespace(backend_tokenizer=backend)


def assert_decodes(tokenizer: Any, among: list[int], *, lost_space: bool, start: Sequence[int] = ()) -> None:
    """Joined bytes are the decoded text; lost_space: but for a space in front that decoding leaves out.

    start: what every random sequence begins with.
    """
    found = token_bytes(tokenizer)
    rng = np.random.default_rng(0)
    lost = 0
    for _ in range(500):
        ids = [*start, *rng.choice(among, rng.integers(1, 30)).tolist()]
        text = b"".join(found[i] for i in ids).decode("utf-8", "replace")
        decoded = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
        lost += text == " " + decoded
        assert decoded in (text, text[1:] if text[:1] == " " else text)
    assert (lost > 0) == lost_space


def test_tokens_of_gpt2s_alphabet() -> None:
    found = token_bytes(words(decoders.ByteLevel()))
    assert found[:4] == [b"", b"a", b"b", b"."]
    assert found[WORDS.index("Ġg")] == b" g"
    assert found[WORDS.index("é")] == b"\xe9"  # the character for byte 233
    assert found[WORDS.index("▁d")] == "▁d".encode()  # not of the alphabet: written as it is
    assert_decodes(words(decoders.ByteLevel()), list(range(len(WORDS))), lost_space=False)


def test_every_byte_has_its_character() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    found = token_bytes(SimpleNamespace(backend_tokenizer=backend))
    assert sorted(found) == [bytes([b]) for b in range(256)]
    for token, own in zip(alphabet, found, strict=True):
        if own[0] < 128:
            assert backend.decoder.decode([token]).encode() == own


def test_tokens_of_sentencepiece() -> None:
    chain = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer = words(decoders.Sequence(chain))
    found = token_bytes(tokenizer)
    assert [found[WORDS.index(w)] for w in ("▁d", "e▁f", "<0x41>", "<0xC3>")] == [
        b" d",
        b"e f",
        b"A",
        b"\xc3",
    ]
    among = [i for i, word in enumerate(WORDS) if word not in ("<0xC3>", "<0xA9>")]
    assert_decodes(tokenizer, among, lost_space=True)
    pair = [1, WORDS.index("<0xC3>"), WORDS.index("<0xA9>"), 5]
    assert b"".join(found[i] for i in pair).decode() == tokenizer.backend_tokenizer.decode(pair) == "aé d"


@pytest.mark.parametrize(
    ("decoder", "written"),
    [
        (None, {"a": " a", "##c": " ##c", ".": " ."}),
        (decoders.Metaspace(), {"a": "a", "▁d": " d", "e▁f": "e f"}),
    ],
    ids=repr,
)
def test_other_decoders(decoder: Any, written: dict[str, str]) -> None:
    found = token_bytes(words(decoder))
    assert found[0] == b""
    assert {word: found[WORDS.index(word)].decode() for word in written} == written
    ids = [
        i for i in range(len(WORDS)) if i != WORDS.index("b")
    ]  # at a text's end its space would be missing
    assert_decodes(words(decoder), ids, lost_space=written["a"] == " a", start=[1])


def test_words_of_the_tiny_tokenizer_bring_their_space(tiny: ModuleType) -> None:
    tokenizer = tiny.make_tokenizer()
    found = token_bytes(tokenizer)
    assert [found[tokenizer.convert_tokens_to_ids(w)] for w in ("<pad>", "</s>", "a")] == [b"", b"", b" a"]
    assert_decodes(tokenizer, list(range(len(tokenizer))), lost_space=True)


def test_a_hole_in_the_ids_writes_nothing() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 3}, unk_token="a"))
    assert token_bytes(SimpleNamespace(backend_tokenizer=backend)) == [b" a", b"", b"", b" b"]


def test_other_tokenizers_are_refused() -> None:
    for decoder in (
        decoders.CTC(),
        decoders.WordPiece(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace(Regex("a+"), " ")]),
    ):
        with pytest.raises(InputError, match=r"with this tokenizer, whose decoder is .*; use stop_token_ids"):
            token_bytes(words(decoder))
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        token_bytes(object())


@pytest.mark.data
@pytest.mark.parametrize(
    ("folder", "lost_space"), [("tokenizers/chatml_bpe_2k", False), ("models/stories260K", True)]
)
def test_real_tokenizers(shared: Path, folder: str, lost_space: bool) -> None:
    tokenizer = load_tokenizer(shared / "data" / folder)
    found = token_bytes(tokenizer)
    assert len(found) == len(tokenizer)
    # SentencePiece's byte tokens decode to U+FFFD where they are no UTF-8, each byte to one.
    among = [i for i, own in enumerate(found) if not lost_space or own.isascii()]
    assert_decodes(tokenizer, among, lost_space=lost_space)
    text = "Once upon a time, a café: 🙂\n\n  \tthe end"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(found[i] for i in ids).decode().removeprefix(" " * lost_space) == text
