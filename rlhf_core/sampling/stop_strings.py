"""Stop strings as a table of states and tokens: matching them costs one gather per sampling step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.errors import InputError

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
"""Decoders that write every token by itself, but for a space in front of a whole text."""


def token_bytes(tokenizer: Any) -> list[bytes]:
    """List the UTF-8 bytes that each token id adds to a text; special tokens and unused ids add none.

    tokenizer: of transformers, with a fast backend that is byte-level, SentencePiece's, or of words.

    Joined, the bytes of any ids are the text that decoding them without special tokens gives, except that
    - every token has the text that it has after another token, while decoders may write the first token of a text
      without the space in front of it;
    - transformers' clean-up, for tokenizers with `clean_up_tokenization_spaces`, is not applied;
    - bytes that are not UTF-8 stay as they are, where decoding writes U+FFFD.

    Raises InputError for another tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(
            f"stop strings need a tokenizer with a tokenizer.json; {type(tokenizer).__name__} has none: "
            "use stop_token_ids"
        )
    vocab = backend.get_vocab(with_added_tokens=True)
    special = {id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special}
    write = _writer(backend)
    texts = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, id_ in vocab.items():
        if id_ not in special:
            texts[id_] = write(token)
    return texts


def _writer(backend: Any) -> Callable[[str], bytes]:
    """Return the function from a token to the bytes that the decoder writes for it after another token."""
    if backend.decoder is None:  # words, with spaces between them
        return lambda token: f" {token}".encode()
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return partial(_byte_level, _byte_alphabet())
    replaced = [
        (step["pattern"].get("String"), step["content"]) for step in steps if step["type"] == "Replace"
    ]
    replaced += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    if not _SENTENCEPIECE.issuperset(kinds) or any(old is None for old, _ in replaced):
        raise InputError(
            f"stop strings do not work with this tokenizer, whose decoder is {', '.join(kinds)}; use stop_token_ids"
        )
    return partial(_sentencepiece, replaced, "ByteFallback" in kinds)


def _byte_level(alphabet: Mapping[str, int], token: str) -> bytes:
    """Write a token of bytes; one with other characters is its text."""
    known = all(character in alphabet for character in token)
    return bytes([alphabet[c] for c in token]) if known else token.encode()


def _sentencepiece(replaced: Sequence[tuple[str, str]], names_bytes: bool, token: str) -> bytes:
    """Write a token after replacements. names_bytes: whether tokens such as <0x0A> are bytes."""
    byte = _BYTE_TOKEN.fullmatch(token) if names_bytes else None
    if byte:
        return bytes.fromhex(byte[1])
    for old, new in replaced:
        token = token.replace(old, new)
    return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet, which has a character for each byte: {character: byte}."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def stop_table(strings: Sequence[str], tokenizer: Any, vocab_size: int) -> NDArray[Any]:
    """Build [states, vocab_size] of the smallest unsigned type: the state after a token, given the state before it.

    State 0 is the start; the last state follows a completed string and is final.
    vocab_size: the model's; ids that the tokenizer lacks write nothing.
    Raises InputError for a string with a special token, which decoding drops, and as `token_bytes` does.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {str(token): id_ for id_, token in added.items() if token.special}
    problems = [
        f"sampling.stop_strings: '{string}' cannot occur in a completion, whose text has no special tokens; for "
        f"{token} set sampling.stop_token_ids = [{special[token]}]"
        for string in strings
        for token in special
        if token in string
    ]
    if problems:
        raise InputError(*problems)
    tokens = token_bytes(tokenizer)[:vocab_size]
    tokens += [b""] * (vocab_size - len(tokens))
    return transitions(automaton([string.encode() for string in strings]), tokens)


def automaton(strings: Sequence[bytes]) -> NDArray[np.int32]:
    """Build int32 [states, 256]: the state after a byte; 0 is the start, the last state follows any of the strings.

    strings: none empty. Aho and Corasick 1975: a state is the longest suffix of the text that is a prefix of a string.
    """
    children: list[dict[int, int]] = [{}]
    complete = {0: False}
    for string in strings:
        node = 0
        for byte in string:
            if byte not in children[node]:
                children[node][byte] = len(children)
                complete[len(children)] = False
                children.append({})
            node = children[node][byte]
        complete[node] = True
    after = np.zeros((len(children), 256), np.int32)
    shorter = [0] * len(children)  # the longest proper suffix of the node's text that is a node too
    queue = [0]
    for node in queue:  # by depth, so that `after` of shorter texts is there
        after[node] = after[shorter[node]]
        for byte, child in children[node].items():
            shorter[child] = int(after[node, byte])
            complete[child] |= complete[shorter[child]]
            after[node, byte] = child
            queue.append(child)
    ended = np.array([complete[node] for node in range(len(children))])
    number = np.where(ended, (~ended).sum(), np.cumsum(~ended) - 1).astype(np.int32)
    return np.concatenate([number[after[~ended]], np.full((1, 256), (~ended).sum(), np.int32)])


def transitions(after: NDArray[np.int32], tokens: Sequence[bytes]) -> NDArray[Any]:
    """Build [states, tokens] of the smallest unsigned type: the state after all bytes of a token.

    after: [states, 256], as `automaton` makes it.
    """
    lengths = np.array([len(token) for token in tokens], np.int64)
    order = np.argsort(-lengths, kind="stable")  # longest first: tokens with a k-th byte come first
    starts = (np.cumsum(lengths) - lengths)[order]
    text = np.frombuffer(b"".join(tokens), np.uint8)
    flat = after.reshape(-1)
    state = np.repeat(np.arange(len(after), dtype=np.int32)[:, None], len(tokens), axis=1)
    for k in range(int(lengths.max(initial=0))):
        longer = int((lengths > k).sum())
        state[:, :longer] = flat[state[:, :longer] * 256 + text[starts[:longer] + k]]
    table = np.empty(state.shape, np.min_scalar_type(len(after) - 1))
    table[:, order] = state
    return table
