"""Texts and conversations to token ids, by one rule for training, scoring and rollouts.

A prompt and its completion are tokenised as one text, because merges cross their boundary, and the result
ends with the end-of-sequence token. So a completion that is scored has exactly the ids it is trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from rlhf_core.tokenizer.chat_template import PLAIN as PLAIN
from rlhf_core.tokenizer.chat_template import ROLES as ROLES
from rlhf_core.tokenizer.chat_template import ChatTemplate, Written
from rlhf_core.tokenizer.chat_template import Message as Message
from rlhf_core.tokenizer.chat_template import template_text as template_text
from rlhf_core.tokenizer.special_ids import Special as Special
from rlhf_core.tokenizer.special_ids import special_ids as special_ids
from rlhf_core.tokenizer.text_options import TextOptions as TextOptions

Ints: TypeAlias = NDArray[np.int32]
Turns: TypeAlias = str | Sequence[Message]
"""A text, or a conversation as messages with `role` and `content`."""
Kwargs: TypeAlias = Mapping[str, Any] | None
"""A row's variables for the chat template."""

CONTEXT = 16  # tokens of a prompt that say how the first token after it is written
CHUNK = 4096  # texts handed to the tokenizer at once: enough to be fast, few enough to bound memory
LOCATED = 256  # the same where the place of every token is asked for, as Python objects


class Encoder:
    """Prompts and completions to ids, with one tokenizer and one chat template."""

    def __init__(self, tokenizer: Any, chat_template: str | TextOptions | None = None) -> None:
        """chat_template: as in `template_text`, or all options."""
        self.tokenizer = tokenizer
        self.options = TextOptions.of(chat_template)
        self.chat = ChatTemplate(tokenizer, self.options)
        self.template = self.chat.text
        self.special = special_ids(tokenizer, self.options)
        self._blank: dict[int, bool] = {}
        self._closed = any(int(i) in self.special.eos for i in self.tokenize([("a", True)])[0][-1:])

    def prompts(
        self,
        prompts: Sequence[Turns],
        tools: Sequence[Any] | None = None,
        kwargs: Sequence[Kwargs] | None = None,
    ) -> list[Ints]:
        """Ids, int32 [n] each, that a completion is sampled after: conversations open an assistant turn."""
        none = [None] * len(prompts)
        texts = [
            self.text(p, open_turn=True, tools=t, kwargs=k)
            for p, t, k in zip(prompts, tools or none, kwargs or none, strict=True)
        ]
        return self.opened(texts)

    def whole(
        self,
        prompts: Sequence[Turns | None],
        completions: Sequence[Turns],
        tools: Sequence[Any] | None = None,
        kwargs: Sequence[Kwargs] | None = None,
    ) -> list[Ints]:
        """Ids, int32 [n] each, of a prompt (or None) and its completion, ended as `options.read_at` says."""
        none = [None] * len(prompts)
        written = [
            self.whole_text(p, c, tools=t, kwargs=k)
            for p, c, t, k in zip(prompts, completions, tools or none, kwargs or none, strict=True)
        ]
        return self.closed([text for text, _ in written], [chat for _, chat in written])

    def whole_text(
        self, prompt: Turns | None, completion: Turns, *, tools: Any = None, kwargs: Kwargs = None
    ) -> tuple[tuple[str, bool], bool]:
        """As `text`, of a prompt with its completion, and whether the template wrote it."""
        turns = self.judged(join(prompt, completion))
        return self.text(turns, tools=tools, kwargs=kwargs), not isinstance(turns, str)

    def judged(self, turns: Turns) -> Turns:
        """What of a text or a conversation is judged: up to its last reply, or all of it."""
        return replied(turns) if self.options.read_at == "eos" else turns

    def closed(self, texts: Sequence[tuple[str, bool]], chat: Sequence[bool]) -> list[Ints]:
        """Ids of whole texts, int32 [n] each, with their end. chat: which of them the template wrote."""
        ids = self.tokenize(texts)
        as_written = self.options.read_at == "template"
        return [
            each if as_written and written else self.ended(each)
            for each, written in zip(ids, chat, strict=True)
        ]

    def text(
        self, turns: Turns, *, open_turn: bool = False, tools: Any = None, kwargs: Kwargs = None
    ) -> tuple[str, bool]:
        """The text to tokenise, and whether the tokenizer adds special tokens (a template writes its own)."""
        if isinstance(turns, str):
            return turns, True
        written = self.chat.write(turns, open_turn=open_turn, tools=tools, kwargs=kwargs)
        return written, self.template == PLAIN

    def opening(
        self, prompt: Turns | None, completion: Turns, *, tools: Any = None, kwargs: Kwargs = None
    ) -> tuple[str, bool]:
        """As `text`, of a prompt as it stands before its completion: turn open; empty where there is no prompt."""
        chat = not (isinstance(prompt, str | None) and isinstance(completion, str))
        if not prompt:
            return "", not chat or self.template == PLAIN
        opened = [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt
        return self.text(opened, open_turn=True, tools=tools, kwargs=kwargs)

    def marked(self, turns: Sequence[Message], tools: Any = None) -> tuple[Ints, NDArray[np.bool_]]:
        """Ids of a conversation that ends with a reply, EOS last, and which of them are replies."""
        return self.learned([self.replies(turns, tools=tools)])[0]

    def replies(
        self, turns: Sequence[Message], *, tools: Any = None, kwargs: Kwargs = None, first: int = 0
    ) -> Written:
        """As `ChatTemplate.replies`."""
        return self.chat.replies(turns, self._stops, tools=tools, kwargs=kwargs, first=first)

    def learned(self, conversations: Sequence[Written]) -> list[tuple[Ints, NDArray[np.bool_]]]:
        """Ids of conversations, int32 [n], EOS last, and which are of their replies: every token with a character of
        one, and the last EOS.
        """
        found = []
        for start in range(0, len(conversations), LOCATED):
            chunk = conversations[start : start + LOCATED]
            for (ids, learned), written in zip(self._with_spans(chunk), chunk, strict=True):
                ended = self.ended(ids)
                mask = np.full(len(ended), bool(written.replies))  # for an EOS that the template left out
                mask[: len(ids)] = learned[: len(ended)]
                found.append((ended, mask))
        return found

    def _with_spans(self, chunk: Sequence[Written]) -> list[tuple[Ints, NDArray[np.bool_]]]:
        texts = [written.text for written in chunk]
        special = self.template == PLAIN
        if not getattr(self.tokenizer, "is_fast", False):  # it cannot say where its tokens lie
            whole = self.tokenize([(text, special) for text in texts])
            return [
                (ids, self._by_prefix(ids, each, special)) for ids, each in zip(whole, chunk, strict=True)
            ]
        out = self.tokenizer(texts, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
        found = []
        for ids, offsets, written in zip(out["input_ids"], out["offset_mapping"], chunk, strict=True):
            learned = _inside(np.array(offsets, np.intp).reshape(-1, 2), written)
            once = self._begun_once(np.array(ids, np.int32))
            found.append((once, learned[len(learned) - len(once) :]))
        return found

    def _by_prefix(self, ids: Ints, written: Written, special: bool) -> NDArray[np.bool_]:
        """Which ids are of replies, bool [n], by tokenising the text up to each start and end."""
        mask = np.zeros(len(ids), bool)
        for span in written.replies:
            before = self.opened([(written.text[:at], special) for at in span])
            first, last = (first_after(each, ids) for each in before)
            mask[first : len(ids) if span[1] >= len(written.text) else last] = True
        return mask

    @cached_property
    def _stops(self) -> list[str]:
        """The texts of the stop tokens."""
        return [text for i in self.special.eos if (text := self.tokenizer.decode([i]).strip())]

    def ended(self, ids: Ints) -> Ints:
        """`ids` up to the first of the stop tokens that end them, white space among these; EOS where none does."""
        eos, end = self.special.eos, 0
        if not eos:
            return ids
        for i in range(len(ids) - 1, -1, -1):
            token = int(ids[i])
            if token in eos:
                end = i + 1
            elif not self._is_blank(token):
                break
        return ids[:end] if end else np.append(ids, np.int32(eos[0]))

    def _is_blank(self, token: int) -> bool:
        if token not in self._blank:
            self._blank[token] = not self.tokenizer.decode([token]).strip()
        return self._blank[token]

    def opened(self, texts: Sequence[tuple[str, bool]]) -> list[Ints]:
        """As `tokenize`, without the EOS that some tokenizers close every text with."""
        ids = self.tokenize(texts)
        return [i[:-1] if special and self._closed else i for i, (_, special) in zip(ids, texts, strict=True)]

    def tokenize(self, texts: Sequence[tuple[str, bool]]) -> list[Ints]:
        """Ids, int32 [n] each, of texts as `text` returns them."""
        out: list[Ints | None] = [None] * len(texts)
        for special in (False, True):
            index = [i for i, text in enumerate(texts) if text[1] is special]
            for start in range(0, len(index), CHUNK):
                chunk = index[start : start + CHUNK]
                ids = self.tokenizer(
                    [texts[i][0] for i in chunk],
                    add_special_tokens=special,
                    return_attention_mask=False,
                    verbose=False,
                )["input_ids"]
                for i, row in zip(chunk, ids, strict=True):
                    out[i] = self._begun_once(np.array(row, np.int32))
        return [ids for ids in out if ids is not None]

    def _begun_once(self, ids: Ints) -> Ints:
        """`ids` without the BOS that the tokenizer put before a text which has it, as one that a template wrote."""
        bos = self.special.bos
        return ids[1:] if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos else ids


def _inside(offsets: NDArray[np.intp], written: Written) -> NDArray[np.bool_]:
    """Which tokens, bool [n], have a character of a reply. offsets: [n, 2], the characters of each token.

    Byte-level tokenizers may leave white space out of a token's offsets: a token of nothing else, whose offsets are
    then empty, has the characters since the token before.
    """
    count = np.zeros(len(written.text) + 1, np.intp)
    for start, end in written.replies:
        count[start + 1 : end + 1] = 1
    count = count.cumsum()
    starts, ends = offsets.T
    before = np.concatenate([[0], np.maximum.accumulate(ends)])[:-1]
    starts = np.where(starts < ends, starts, np.minimum(starts, before))
    return np.asarray(count[ends] > count[starts])


def continuations(
    tokenizer: Any,
    prompts: Sequence[Ints | None],
    completions: Sequence[Ints],
    stop_ids: Sequence[int] = (),
) -> list[str]:
    """The texts that completions add to their prompts, both int32 [n] ids, without special tokens.

    A prompt that is None is a conversation, to which the completion adds a message: a text by itself. Others are
    decoded after the end of the prompt: alone, a first token of SentencePiece's kind would lose the space before it,
    and prompt and completion together would be another text than the one that was sampled. The token that ended a
    completion is no part of its text, whether the tokenizer calls it special or not: one of the tokenizer's, the
    template's and the model's own stop tokens, or one of `stop_ids`, those that the sampler was given besides.
    """
    eos = {*special_ids(tokenizer).eos, *stop_ids}
    completions = [ids[:-1] if len(ids) and int(ids[-1]) in eos else ids for ids in completions]
    ends = [[] if prompt is None else prompt[-CONTEXT:].tolist() for prompt in prompts]
    whole = [[*end, *ids.tolist()] for end, ids in zip(ends, completions, strict=True)]
    before, texts, alone = (
        tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for ids in (ends, whole, [ids.tolist() for ids in completions])
    )
    return [
        text[len(start) :] if start and text.startswith(start) else own
        for start, text, own in zip(before, texts, alone, strict=True)
    ]


def first_after(prompt: Ints, whole: Ints) -> int:
    """Index of the first token of `whole` that is not the prompt's, where merges across its end made another token
    too; at least one token follows. Both int32 [n].
    """
    limit = min(len(prompt), len(whole) - 1)
    differs = prompt[:limit] != whole[:limit]
    return int(differs.argmax()) if differs.any() else limit


def join(prompt: Turns | None, completion: Turns) -> Turns:
    """The prompt and its completion as one text or one conversation, of which a text is one turn."""
    if prompt is None:
        return completion
    if isinstance(prompt, str):
        if isinstance(completion, str):
            return prompt + completion
        return [{"role": "user", "content": prompt}, *completion]
    if isinstance(completion, str):
        return [*prompt, {"role": "assistant", "content": completion}]
    return [*prompt, *completion]


@overload
def replied(turns: Sequence[Message]) -> Sequence[Message]: ...
@overload
def replied(turns: Turns) -> Turns: ...
def replied(turns: Turns) -> Turns:
    """A conversation up to its last reply, which is what is learned and judged; one without, and a text, as it is."""
    if isinstance(turns, str):
        return turns
    wrote = [k for k, turn in enumerate(turns) if turn["role"] == "assistant"]
    return turns[: wrote[-1] + 1] if wrote else turns
