"""Tokenise texts and conversations in the same way for training, scoring and rollouts.

A prompt and its completion are tokenised as one text, because merges cross their boundary, and the result
ends with the end-of-sequence token. So a completion is scored on exactly the ids it is trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from rlhf_core.errors import InputError, read_json_object
from rlhf_core.tokenizer.chat_template import PLAIN as PLAIN
from rlhf_core.tokenizer.chat_template import ROLES as ROLES
from rlhf_core.tokenizer.chat_template import ChatTemplate, Rendered
from rlhf_core.tokenizer.chat_template import Message as Message
from rlhf_core.tokenizer.chat_template import template_text as template_text
from rlhf_core.tokenizer.options import TextOptions as TextOptions

Ints: TypeAlias = NDArray[np.int32]
Turns: TypeAlias = str | Sequence[Message]
"""A text, or a conversation as messages with `role` and `content`."""
Kwargs: TypeAlias = Mapping[str, Any] | None
"""A row's variables for the chat template."""

CONTEXT = 16  # prompt tokens to decode before a completion, for the space before its first token
CHUNK = 4096  # texts per call of the tokenizer: enough to be fast, few enough to bound memory
LOCATED = 256  # the same with offsets, which are Python objects


class Encoder:
    """Encode prompts and completions with one tokenizer and one chat template."""

    def __init__(self, tokenizer: Any, chat_template: str | TextOptions | None = None) -> None:
        """chat_template: as in `template_text`, or all options as `TextOptions`."""
        self.tokenizer = tokenizer
        self.options = TextOptions.of(chat_template)
        self.chat = ChatTemplate(tokenizer, self.options)
        self.template = self.chat.text
        self.chat.require_system_prompt()
        self.special = special_ids(tokenizer, self.options)
        self._blank: dict[int, bool] = {}
        self._adds_eos = any(int(i) in self.special.eos for i in self.tokenize([("a", True)])[0][-1:])

    @classmethod
    def of(cls, tokenizer: Any, chat_template: str | TextOptions | None = None) -> Encoder:
        """Make an encoder, unless `tokenizer` is one already."""
        return tokenizer if isinstance(tokenizer, Encoder) else cls(tokenizer, chat_template)

    def prompts(
        self,
        prompts: Sequence[Turns],
        tools: Sequence[Any] | None = None,
        kwargs: Sequence[Kwargs] | None = None,
    ) -> list[Ints]:
        """Encode prompts, int32 [n] each; conversations end with an open assistant turn."""
        no_values = [None] * len(prompts)
        texts = [
            self.text(p, open_turn=True, tools=t, kwargs=k)
            for p, t, k in zip(prompts, tools or no_values, kwargs or no_values, strict=True)
        ]
        return self.tokenize_open(texts)

    def whole(
        self,
        prompts: Sequence[Turns | None],
        completions: Sequence[Turns],
        tools: Sequence[Any] | None = None,
        kwargs: Sequence[Kwargs] | None = None,
    ) -> list[Ints]:
        """Encode prompts (or None) with their completions, int32 [n] each, ending as `options.read_at` says."""
        no_values = [None] * len(prompts)
        wholes = [
            self.judged_turns(join(prompt, completion))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        texts = [
            self.text(turns, tools=t, kwargs=k)
            for turns, t, k in zip(wholes, tools or no_values, kwargs or no_values, strict=True)
        ]
        return self.tokenize_closed(texts, [not isinstance(turns, str) for turns in wholes])

    def judged_turns(self, turns: Turns) -> Turns:
        """Return the part of a text or conversation to score: up to the last reply, or all of it."""
        return until_last_reply(turns) if self.options.read_at == "eos" else turns

    def tokenize_closed(self, texts: Sequence[tuple[str, bool]], chat: Sequence[bool]) -> list[Ints]:
        """Tokenise whole texts and end them with EOS, int32 [n] each. chat: whether the template rendered each."""
        ids = self.tokenize(texts)
        as_written = self.options.read_at == "template"
        return [
            sequence if as_written and by_template else self.end_with_eos(sequence)
            for sequence, by_template in zip(ids, chat, strict=True)
        ]

    def text(
        self, turns: Turns, *, open_turn: bool = False, tools: Any = None, kwargs: Kwargs = None
    ) -> tuple[str, bool]:
        """Return the text to tokenise, and whether to add special tokens (a template writes its own)."""
        if isinstance(turns, str):
            return turns, True
        rendered = self.chat.write(turns, open_turn=open_turn, tools=tools, kwargs=kwargs)
        return rendered, self.template == PLAIN

    def prompt_text(
        self, prompt: Turns | None, completion: Turns, *, tools: Any = None, kwargs: Kwargs = None
    ) -> tuple[str, bool]:
        """Return `text` of a prompt with the assistant turn open; an empty text if there is no prompt."""
        chat = not (isinstance(prompt, str | None) and isinstance(completion, str))
        if not prompt and not (chat and self.options.system_prompt is not None):
            return "", not chat or self.template == PLAIN
        turns = [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt or []
        return self.text(turns, open_turn=True, tools=tools, kwargs=kwargs)

    def marked(self, turns: Sequence[Message], tools: Any = None) -> tuple[Ints, NDArray[np.bool_]]:
        """Encode a conversation that ends with a reply, EOS last, and mask its replies."""
        return self.encode_replies([self.locate_replies(turns, tools=tools)])[0]

    def locate_replies(
        self, turns: Sequence[Message], *, tools: Any = None, kwargs: Kwargs = None, first: int = 0
    ) -> Rendered:
        """Call `ChatTemplate.locate_replies` with the texts of the stop tokens."""
        return self.chat.locate_replies(turns, self.stops, tools=tools, kwargs=kwargs, first=first)

    def encode_replies(self, conversations: Sequence[Rendered]) -> list[tuple[Ints, NDArray[np.bool_]]]:
        """Encode rendered conversations, int32 [n] with EOS last, and mask their replies, bool [n].

        The mask has every token with a character of a reply, and the last EOS.
        """
        encoded = []
        for start in range(0, len(conversations), LOCATED):
            chunk = conversations[start : start + LOCATED]
            for (ids, learned), rendered in zip(self._encode_with_spans(chunk), chunk, strict=True):
                ended = self.end_with_eos(ids)
                # An EOS that the template omits belongs to the last reply.
                mask = np.full(len(ended), bool(rendered.replies) and rendered.learns_end)
                mask[: len(ids)] = learned[: len(ended)]
                encoded.append((ended, mask))
        return encoded

    def _encode_with_spans(self, chunk: Sequence[Rendered]) -> list[tuple[Ints, NDArray[np.bool_]]]:
        texts = [rendered.text for rendered in chunk]
        special = self.template == PLAIN
        if not getattr(self.tokenizer, "is_fast", False):  # slow tokenizers have no offsets
            whole = self.tokenize([(text, special) for text in texts])
            return [
                (ids, self._mask_by_prefix(ids, rendered, special))
                for ids, rendered in zip(whole, chunk, strict=True)
            ]
        out = self.tokenizer(texts, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
        encoded = []
        for ids, offsets, rendered in zip(out["input_ids"], out["offset_mapping"], chunk, strict=True):
            learned = _tokens_inside(np.array(offsets, np.intp).reshape(-1, 2), rendered)
            tokens = self._drop_second_bos(np.array(ids, np.int32))
            encoded.append((tokens, learned[len(learned) - len(tokens) :]))
        return encoded

    def _mask_by_prefix(self, ids: Ints, rendered: Rendered, special: bool) -> NDArray[np.bool_]:
        """Mask the ids of replies, bool [n], by tokenising the text up to each start and end."""
        mask = np.zeros(len(ids), bool)
        for span in rendered.replies:
            prefixes = self.tokenize_open([(rendered.text[:at], special) for at in span])
            first, last = (first_after(prefix, ids) for prefix in prefixes)
            mask[first : len(ids) if span[1] >= len(rendered.text) else last] = True
        return mask

    @cached_property
    def stops(self) -> list[str]:
        """The texts of the stop tokens."""
        return [text for i in self.special.eos if (text := self.tokenizer.decode([i]).strip())]

    def end_with_eos(self, ids: Ints) -> Ints:
        """Cut trailing stop tokens and white space except the first stop token; append EOS if there is none."""
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

    def tokenize_open(self, texts: Sequence[tuple[str, bool]]) -> list[Ints]:
        """Tokenise texts without the EOS that some tokenizers append, int32 [n] each."""
        ids = self.tokenize(texts)
        return [
            i[:-1] if special and self._adds_eos else i for i, (_, special) in zip(ids, texts, strict=True)
        ]

    def tokenize(self, texts: Sequence[tuple[str, bool]]) -> list[Ints]:
        """Tokenise texts as `text` returns them, int32 [n] each."""
        encoded: list[Ints | None] = [None] * len(texts)
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
                    encoded[i] = self._drop_second_bos(np.array(row, np.int32))
        return [ids for ids in encoded if ids is not None]

    def _drop_second_bos(self, ids: Ints) -> Ints:
        """Drop the BOS that the tokenizer adds before a text that starts with one, as templates write it."""
        bos = self.special.bos
        return ids[1:] if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos else ids


def _tokens_inside(offsets: NDArray[np.intp], rendered: Rendered) -> NDArray[np.bool_]:
    """Mask tokens with a character of a reply, bool [n]. offsets: [n, 2], each token's character range.

    Byte-level tokenizers may leave white space out of offsets. A token with empty offsets gets the characters since the
    previous token.
    """
    count = np.zeros(len(rendered.text) + 1, np.intp)
    for start, end in rendered.replies:
        count[start + 1 : end + 1] = 1
    count = count.cumsum()
    starts, ends = offsets.T
    previous_ends = np.concatenate([[0], np.maximum.accumulate(ends)])[:-1]
    starts = np.where(starts < ends, starts, np.minimum(starts, previous_ends))
    return np.asarray(count[ends] > count[starts])


def continuations(
    tokenizer: Any,
    prompts: Sequence[Ints | None],
    completions: Sequence[Ints],
    stop_ids: Sequence[int] = (),
) -> list[str]:
    """Decode completions to the texts that they add to their prompts, without special tokens.

    prompts, completions: int32 [n] ids. A completion of a text prompt is decoded after the prompt's last tokens, since
    SentencePiece drops the space before a first token. A prompt of None stands for a conversation, whose completion is
    decoded alone. The final stop token is dropped even if the tokenizer does not call it special.
    stop_ids: stop ids besides those of the tokenizer, the template and the model.
    """
    eos = {*special_ids(tokenizer).eos, *stop_ids}
    completions = [ids[:-1] if len(ids) and int(ids[-1]) in eos else ids for ids in completions]
    contexts = [[] if prompt is None else prompt[-CONTEXT:].tolist() for prompt in prompts]
    whole = [[*context, *ids.tolist()] for context, ids in zip(contexts, completions, strict=True)]
    before, texts, alone = (
        tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for ids in (contexts, whole, [ids.tolist() for ids in completions])
    )
    return [
        text[len(context) :] if context and text.startswith(context) else completion
        for context, text, completion in zip(before, texts, alone, strict=True)
    ]


def first_after(prompt: Ints, whole: Ints) -> int:
    """Return the index of the first token of `whole` that differs from the prompt, at most its last index.

    It may lie before the prompt's end if a merge crosses it. Both int32 [n].
    """
    limit = min(len(prompt), len(whole) - 1)
    differs = prompt[:limit] != whole[:limit]
    return int(differs.argmax()) if differs.any() else limit


def join(prompt: Turns | None, completion: Turns) -> Turns:
    """Join a prompt and its completion into one text, or into one conversation, where a text becomes a turn."""
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
def until_last_reply(turns: Sequence[Message]) -> Sequence[Message]: ...
@overload
def until_last_reply(turns: Turns) -> Turns: ...
def until_last_reply(turns: Turns) -> Turns:
    """Cut a conversation after its last reply; return one without replies, or a text, unchanged."""
    if isinstance(turns, str):
        return turns
    replies = [k for k, turn in enumerate(turns) if turn["role"] == "assistant"]
    return turns[: replies[-1] + 1] if replies else turns


def ids_without_token(tokenizer: Any, size: int) -> tuple[tuple[int, int], ...]:
    """Find which of `size` ids the tokenizer has no token for: ranges (first, one after the last), in order.

    They are what a vocabulary is padded with, and holes in the tokenizer's own ids.
    """
    present = np.zeros(size + 2, np.bool_)  # an absent id at both ends, so that every range has two borders
    present[[0, -1]] = True
    ids = np.fromiter(tokenizer.get_vocab().values(), np.int64) + 1
    present[ids[(ids > 0) & (ids <= size)]] = True
    # A piece that is in the vocabulary twice has one id there, and is a token under both.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        for i in np.flatnonzero(~present):
            present[i] = backend.id_to_token(int(i) - 1) is not None
    borders = np.flatnonzero(np.diff(present)).reshape(-1, 2)
    return tuple((int(first), int(last)) for first, last in borders)


class Special(NamedTuple):
    """Special ids of a tokenizer."""

    bos: int | None
    eos: tuple[int, ...]
    """All ids that end a sequence, the tokenizer's EOS first; may be empty."""
    pad: int | None


def special_ids(tokenizer: Any, chat_template: str | TextOptions | None = None) -> Special:
    """Find the special ids of a tokenizer and its chat template.

    A sequence ends with the tokenizer's EOS, the ids in a generation_config.json next to the tokenizer, and the token
    that the chat template writes after a reply. chat_template: as in `template_text`, or options.
    Raises InputError for a generation_config.json that cannot be read.
    """
    eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    directory = getattr(tokenizer, "name_or_path", None)
    config = Path(str(directory)) / "generation_config.json" if directory else None
    if config is not None and config.is_file():
        eos += [i for i in stop_ids_in(config) if i not in eos and i < len(tokenizer)]
    end_of_turn = ChatTemplate(tokenizer, chat_template).end_of_turn()
    if end_of_turn is not None and end_of_turn not in eos:
        eos.append(end_of_turn)
    return Special(tokenizer.bos_token_id, tuple(eos), tokenizer.pad_token_id)


def stop_ids_in(file: Path) -> list[int]:
    """Read the distinct `eos_token_id` of a generation_config.json. Raises InputError if they are not ids."""
    listed = read_json_object(file, "fetch it again, or delete it").get("eos_token_id")
    if listed is None:
        return []
    ids = listed if isinstance(listed, list) else [listed]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise InputError(f"{file}: eos_token_id is {json.dumps(listed)}, not a token id or a list of them")
    return list(dict.fromkeys(ids))
