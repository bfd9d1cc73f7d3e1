"""Made-up worlds for conversations: what they reply depends on the conversation's last turn alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlhf_core.contracts import Continuation


class Said(NamedTuple):
    """A turn of the policy, as a world was told of it."""

    tokens: np.ndarray
    logps: np.ndarray
    finished: bool


class MadeUp:
    """Replies at once, or with `seed` any number of turns late and in any order.

    vocab: ids of its replies are below. turns: the most turns of a conversation. added: the most tokens of a reply.
    limit: the most tokens that it allows a turn. replaces: how often a reply replaces the context, in [0, 1].
    """

    def __init__(
        self,
        vocab: int,
        *,
        turns: int = 4,
        added: int = 20,
        limit: int = 9,
        replaces: float = 0.0,
        seed: int | None = None,
    ) -> None:
        self.quick = seed is None
        self.said: dict[int, list[Said]] = {}
        self.added: dict[int, list[Continuation]] = {}
        self._late: list[Continuation] = []
        self._vocab, self._turns, self._added = vocab, turns, added
        self._limit, self._replaces = limit, replaces
        self._order = np.random.default_rng(seed)

    def submit(self, conversation: int, tokens: np.ndarray, logps: np.ndarray, finished: bool) -> None:
        turns = self.said.setdefault(conversation, [])
        turns.append(Said(tokens, logps, finished))
        draw = np.random.default_rng([len(turns), *tokens.tolist()])
        reply = Continuation(conversation, None)
        if len(turns) < self._turns and draw.random() < 0.8:
            added = draw.integers(0, self._vocab, draw.integers(1, self._added + 1)).astype(np.int32)
            limit, replaces = int(draw.integers(1, self._limit + 1)), bool(draw.random() < self._replaces)
            reply = Continuation(conversation, added, limit, replaces)
        self.added.setdefault(conversation, []).append(reply)
        self._late.append(reply)

    def replies(self, *, wait: bool) -> Sequence[Continuation]:
        assert self._late or not wait
        count = len(self._late)
        if not self.quick and count:
            self._late = [self._late[i] for i in self._order.permutation(count)]
            count = int(self._order.integers(int(wait), count + 1))
        arrived, self._late = self._late[:count], self._late[count:]
        return arrived


def assert_same(
    a: dict[int, list[Said]], b: dict[int, list[Said]], *, bits: bool = False, atol: float = 1e-5
) -> None:
    """Compare what two worlds were told, log-probabilities to `atol` or to the bit."""
    assert a.keys() == b.keys()
    for number, turns in a.items():
        assert len(turns) == len(b[number]), f"conversation {number}"
        for one, other in zip(turns, b[number], strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens, err_msg=f"conversation {number}")
            assert one.finished == other.finished
            np.testing.assert_allclose(one.logps, other.logps, rtol=0, atol=0 if bits else atol)
