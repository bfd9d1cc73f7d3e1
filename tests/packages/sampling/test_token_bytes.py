"""What tokens write, against what decoding gives; tables of stop strings, against a search in the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from rlhf_core.errors import InputError
from rlhf_core.sampling import stop_table, token_bytes
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


def tokenizer_of(words: list[str]) -> Any:
    """A tokenizer of words in GPT-2's alphabet; the first one is special."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.add_special_tokens([AddedToken(words[0], special=True)])
    backend.decoder = decoders.ByteLevel()
    return SimpleNamespace(backend_tokenizer=backend)


CHARACTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
WRITTEN = dict(zip(token_bytes(tokenizer_of(["<s>", *CHARACTERS]))[1:], CHARACTERS, strict=True))


def table_of(strings: list[bytes], tokens: list[bytes]) -> np.ndarray:
    """Stop table of tokens with these bytes; a special token that writes nothing comes before them."""
    words = ["<s>", *("".join(WRITTEN[bytes([byte])] for byte in token) for token in tokens)]
    return stop_table(tuple(string.decode() for string in strings), tokenizer_of(words), len(words))


def automaton(strings: list[bytes]) -> np.ndarray:
    """Where each byte leads from each state [states, 256]."""
    return table_of(strings, [bytes([byte]) for byte in range(256)])[:, 1:]


def first_end(text: bytes, strings: list[bytes]) -> int | None:
    """How many bytes have been read when the first of the strings is complete."""
    ends = [text.index(string) + len(string) for string in strings if string in text]
    return min(ends, default=None)


@pytest.mark.parametrize(
    "strings",
    [[b"a"], [b"ab"], [b"aab"], [b"abab"], [b"abc", b"b"], [b"ab", b"abc"], [b"bab", b"abba", b"aaaa"], [b"c", b"c"]],
    ids=str,
)  # fmt: skip
def test_states_follow_a_search_byte_by_byte(strings: list[bytes]) -> None:
    after = automaton(strings)
    accept = len(after) - 1
    assert (after[accept] == accept).all()
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = bytes(rng.choice(list(b"abc"), 12, p=[0.45, 0.45, 0.1]).tolist())
        state, seen = 0, []
        for byte in text:
            state = after[state, byte]
            seen.append(state == accept)
        end = first_end(text, strings)
        assert seen == [end is not None and k + 1 >= end for k in range(len(text))]


def test_a_state_a_byte_and_one_to_accept() -> None:
    assert automaton([b"stop"]).shape == (5, 256)
    # st, then two ends of one byte before the last
    assert automaton([b"stop", b"step"]).shape == (4 + 2, 256)


def test_tokens_of_any_length_lead_where_their_bytes_lead() -> None:
    rng = np.random.default_rng(1)
    strings = [b"abba", b"ca", "é".encode()]
    drawn = {bytes(rng.choice(list(b"abc\xc3\xa9"), rng.integers(1, 7)).tolist()) for _ in range(300)}
    tokens = sorted(drawn)
    after, table = automaton(strings), table_of(strings, tokens)
    assert table.dtype == np.uint8
    assert table.shape == (len(after), len(tokens) + 1)
    for start in range(len(after)):
        for token, found in zip([b"", *tokens], table[start], strict=True):
            state = start
            for byte in token:
                state = after[state, byte]
            assert found == state


def test_many_states_need_a_wider_type() -> None:
    text = bytes(np.random.default_rng(3).integers(97, 123, 300).tolist())
    table = table_of([text], [text[:299], text[299:]])
    assert table.dtype == np.uint16
    assert table[0, 0] == 0
    assert table[0, 1] == 299
    assert table[299, 2] == 300


def test_the_table_covers_the_models_vocabulary(tiny: ModuleType) -> None:
    tokenizer = tiny.make_tokenizer()
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    table = stop_table(("a b", "b a"), tokenizer, 60)
    accept = len(table) - 1
    assert table.shape[1] == 60
    assert table[table[0, a], b] == accept
    assert table[table[0, b], a] == accept
    assert table[table[0, a], a] == table[0, a] != accept
    assert (table[:, len(tokenizer) :] == np.arange(len(table))[:, None]).all()
    assert stop_table(("a b",), tokenizer, 10).shape[1] == 10


def test_a_special_token_is_no_stop_string(tiny: ModuleType) -> None:
    with pytest.raises(
        InputError, match=r"sampling\.stop_strings: 'a</s>' .*sampling\.stop_token_ids = \[1\]"
    ):
        stop_table(("b", "a</s>"), tiny.make_tokenizer(), 60)
