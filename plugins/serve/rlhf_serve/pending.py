"""One completion on its way: its tokens, their text, and what ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CONTEXT = 16
"""Tokens of a prompt that are decoded before its completion, for the space before the first token."""
UNFINISHED = "\ufffd"
"""What decoding writes for the first bytes of a character."""


@dataclass(frozen=True)
class GenerationParams:
    """What a request asks of each of its completions, checked and complete.

    limit: the most tokens. stop: strings that end the text. stop_ids: every token that ends it; end_ids: those of them
    that are the model's own. likeliest: how many alternatives to a token are reported; None: none, nor its
    log-probability.
    """

    limit: int
    temperature: float
    top_p: float
    top_k: int | None
    min_p: float
    seed: int
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()
    likeliest: int | None = None
    keeps_stop: bool = False
    """Whether a stop string stays in the text."""
    skips_special: bool = True


class TextReader:
    """Decode a growing list of tokens to a growing text.

    The text is what decoding all of them together after the end of the prompt adds to it, as `rlhf generate` writes it.
    Characters are held back until all of their bytes are there.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int], skips_special: bool) -> None:
        self._tokenizer, self._skips = tokenizer, skips_special
        self._ids = [int(i) for i in context[-CONTEXT:]]
        self._start, self._read = 0, len(self._ids)

    @property
    def special_ids(self) -> dict[int, str]:
        """{id: name} of special tokens."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return {int(i): token.content for i, token in added.items() if token.special}

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False
        )
        return text

    def add(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Return the text that is added by these tokens. last: whether no more follow."""
        self._ids += [int(i) for i in tokens]
        before = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        if not text.startswith(before):  # the prompt's end decodes to another text with the completion
            before = ""
            text = self._decode(self._ids[self._read :])
        if not last and text.endswith(UNFINISHED):
            return ""
        if len(text) > len(before):
            self._start, self._read = self._read, len(self._ids)
        return text[len(before) :]


@dataclass(eq=False)
class PendingCompletion:
    """One completion, from its request to its last token. Belongs to the event loop."""

    number: int
    prompt: np.ndarray
    generation: GenerationParams
    index: int
    """Its place among the completions of its request, which with the seed makes its key."""
    weights: Any
    reader: TextReader
    end: Callable[[PendingCompletion], None]
    """Stops it in the engine."""
    group: Any = None
    reads_prompt: bool = False
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    likeliest: list[tuple[list[int], list[float]]] = field(default_factory=list)
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    text: str = ""
    text_ends: list[int] = field(default_factory=list)
    """The length of the text after each token."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    prompt_logps: list[Any] = field(default_factory=list)
    """(log-probability, rank, likeliest ids, their log-probabilities) of each token of the prompt but the first."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    first_token: float | None = None
    """When the first token came, of `time.monotonic`."""
    per_token: bool = False
    """Whether the text after every single token is wanted."""
    streams: bool = False
    """Whether the text is sent while it grows."""

    @property
    def over(self) -> bool:
        return self.finish_reason is not None

    def read(self, logps: np.ndarray, ranks: np.ndarray, ids: np.ndarray, best: np.ndarray) -> None:
        """Take what the policy thinks of the prompt's next tokens."""
        columns = (each.tolist() for each in (logps, ranks, ids, best))
        self.prompt_logps += zip(*columns, strict=True)

    @property
    def reads_along(self) -> bool:
        """Whether the text is wanted before the end."""
        return self.streams or self.per_token or bool(self.generation.stop)

    def receive(self, tokens: np.ndarray, logps: np.ndarray, likeliest: Any, version: str) -> None:
        """Take the next tokens from the engine, up to the one that completes a stop string."""
        if self.over:
            return
        if self.first_token is None:
            self.first_token = time.monotonic()
        count = self.generation.likeliest or 0
        start = len(self.tokens)
        one_by_one = bool(self.generation.stop) or self.per_token
        for i, token in enumerate(tokens.tolist()):
            self.tokens.append(token)
            self.logps.append(float(logps[i]))
            if count:
                self.likeliest.append((likeliest[0][i, :count].tolist(), likeliest[1][i, :count].tolist()))
            if one_by_one and self._read([token]):
                break
        if not one_by_one and self.streams:
            self._read(self.tokens[start:])
        self._count(version, start)
        if self.stop_reason is not None:
            self.finish("stop")
            self.end(self)
        self.changed.set()

    def _count(self, version: str, start: int) -> None:
        if self.versions and self.versions[-1][0] == version:
            start = self.versions.pop()[1]
        if len(self.tokens) > start:
            self.versions.append((version, start, len(self.tokens)))

    def _read(self, tokens: Sequence[int], *, last: bool = False) -> bool:
        """Add the text of tokens; return whether it has a stop string."""
        ended = len(tokens) > 0 and tokens[-1] in self.generation.stop_ids
        self.text += self.reader.add(tokens[:-1] if ended else tokens, last=last or ended)
        found = [(at, stop) for stop in self.generation.stop if (at := self.text.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            self.text = self.text[: at + len(stop) * self.generation.keeps_stop]
            self.stop_reason = stop
        self.text_ends += [len(self.text)] * len(tokens)
        return bool(found)

    def finish(self, reason: str) -> None:
        """End it: "stop", "length" or "abort"."""
        if self.over:
            return
        if self.stop_reason is None:
            self._read([] if self.reads_along else self.tokens, last=True)
        self.finish_reason = "stop" if self.stop_reason is not None else reason
        last = self.tokens[-1] if self.tokens else None
        if reason == "stop" and self.stop_reason is None and last not in self.generation.end_ids:
            self.stop_reason = last
        self.changed.set()

    def fail(self, error: Exception) -> None:
        """End it by an error."""
        self.error, self.finish_reason = error, "error"
        self.changed.set()

    @property
    def settled(self) -> int:
        """How much of the text may be sent: what may begin a stop string waits."""
        if self.over or not self.generation.stop:
            return len(self.text)
        most = max(map(len, self.generation.stop)) - 1
        held = next(
            (
                n
                for n in range(min(most, len(self.text)), 0, -1)
                if any(stop.startswith(self.text[-n:]) for stop in self.generation.stop)
            ),
            0,
        )
        return len(self.text) - held
