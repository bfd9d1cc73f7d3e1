"""Stop strings as a table of states and tokens: matching them costs one gather per sampling step."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.errors import InputError

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_UNDECODABLE = "\ufffd"


def token_bytes(tokenizer: Any) -> list[bytes]:
    """List the UTF-8 bytes that each token id adds to a text; special tokens and unused ids add none.

    tokenizer: of transformers, with a fast backend.

    Joined, the bytes of any ids are the text that decoding them without special tokens gives, except that
    - every token has the text that it has after another token, while decoders may write the first token of a text
      differently: without the space in front of it, or with WordPiece's ##;
    - transformers' clean-up, for tokenizers with `clean_up_tokenization_spaces`, is not applied;
    - bytes that are not UTF-8 stay as they are, where decoding writes U+FFFD.

    Raises InputError for a tokenizer without a fast backend, and for a token whose text depends on its neighbours.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(
            f"stop strings need a tokenizer with a tokenizer.json; {type(tokenizer).__name__} has none: "
            "use stop_token_ids"
        )
    vocab = {id_: token for token, id_ in backend.get_vocab(with_added_tokens=True).items()}
    kinds = _decoders(backend)
    if kinds == ["ByteLevel"]:
        return _byte_level(backend, vocab)
    texts = _by_decoding(backend, vocab, "ByteFallback" in kinds)
    return [texts.get(id_, b"") for id_ in range(max(vocab, default=-1) + 1)]


def _decoders(backend: Any) -> list[str]:
    """List the types of the decoder's steps, in order."""
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return [step["type"] for step in decoder.get("decoders", [decoder])]


def _byte_level(backend: Any, vocab: Mapping[int, str]) -> list[bytes]:
    """Decode GPT-2's alphabet, which has a character for each byte; other tokens stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(256 + i): byte for i, byte in enumerate(others)}
    special = {id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special}
    texts = [b""] * (max(vocab, default=-1) + 1)
    for id_, token in vocab.items():
        if id_ not in special:
            try:
                texts[id_] = bytes([alphabet[character] for character in token])
            except KeyError:
                texts[id_] = token.encode()
    return texts


def _by_decoding(backend: Any, vocab: Mapping[int, str], byte_tokens: bool) -> dict[int, bytes]:
    """Decode each token between two others. byte_tokens: <0x0A> and the like stand for one byte."""
    out = {}
    if byte_tokens:
        matches = {id_: _BYTE_TOKEN.fullmatch(token) for id_, token in vocab.items()}
        out = {id_: bytes.fromhex(match[1]) for id_, match in matches.items() if match}
    ids = sorted(set(vocab) - set(out))
    anchor, before, after = _anchor(backend, ids)
    texts = backend.decode_batch([[anchor, id_, anchor] for id_ in ids], skip_special_tokens=True)
    for id_, text in zip(ids, texts, strict=True):
        inner = text[len(before) : len(text) - len(after)]
        whole = before + inner + after == text
        if not whole or (_UNDECODABLE in inner and _UNDECODABLE not in vocab[id_]):
            raise _contextual(f"'{vocab[id_]}'")
        out[id_] = inner.encode()
    return out


def _anchor(backend: Any, ids: Sequence[int]) -> tuple[int, str, str]:
    """Find a token with the same text after any token, its text at the start, and its text after a token."""
    for id_ in ids:
        one, two, three = (backend.decode([id_] * n, skip_special_tokens=True) for n in (1, 2, 3))
        after = two[len(one) :]
        if one and after and _UNDECODABLE not in one and two == one + after and three == two + after:
            return id_, one, after
    raise _contextual("every token")


def _contextual(token: str) -> InputError:
    return InputError(
        f"stop strings do not work with this tokenizer: the text of {token} depends on neighbouring tokens; "
        "use stop_token_ids"
    )


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
