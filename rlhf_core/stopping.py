"""Stop strings as a table of states and tokens, so that looking for them costs a sampling step one gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.errors import InputError
from rlhf_core.token_bytes import token_bytes


def stop_table(strings: Sequence[str], tokenizer: Any, vocab_size: int) -> NDArray[Any]:
    """[states, vocab_size] of the smallest unsigned type: the state after a token, from the state before it.

    State 0 is the start, the last state says that one of the strings has been completed, and is not left.
    vocab_size: the model's; ids that the tokenizer lacks write nothing.
    Raises InputError for a string with a special token, which decoding drops, and as `token_bytes`.
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
    """int32 [states, 256]: the state after a byte; 0 is the start, the last state follows any of the strings.

    strings: none empty. Aho and Corasick 1975: a state is the longest end of the text that starts a string.
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
    shorter = [0] * len(children)  # the longest proper end of the node's text that is a node too
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
    """[states, tokens] of the smallest unsigned type: the state after all bytes of a token.

    after: [states, 256], as `automaton` makes it.
    """
    lengths = np.array([len(token) for token in tokens], np.int64)
    order = np.argsort(-lengths, kind="stable")  # longest first: those with a k-th byte are in front
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
