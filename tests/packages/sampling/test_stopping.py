"""Stop tables against a search in the text."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rlhf_core.errors import InputError
from rlhf_core.sampling import stop_table, token_bytes


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
