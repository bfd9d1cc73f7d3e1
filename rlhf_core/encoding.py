"""Texts and conversations to token ids, by one rule for training, scoring and rollouts.

A prompt and its completion are tokenised as one text, because merges cross their boundary, and the result
ends with the end-of-sequence token. So a completion that is scored has exactly the ids it is trained on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlhf_core.errors import InputError, near

Ints: TypeAlias = NDArray[np.int32]
Message: TypeAlias = Mapping[str, Any]
Turns: TypeAlias = str | Sequence[Message]
"""A text, or a conversation as messages with `role` and `content`."""

PLAIN = """\
{%- for message in messages -%}
{{- '\\n\\n' if not loop.first -}}
{{- message['role'] + ':\\n' -}}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + (eos_token or '') }}{% endgeneration %}
{%- else -%}
{{- message['content'] -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '\\n\\nassistant:\\n' }}{%- endif -%}
"""
"""The template "plain": each turn under its role's name, assistant turns closed by the EOS token."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Of messages, whatever the template; others have to be named by it."""
CONTEXT = 16  # tokens of a prompt that say how the first token after it is written
CHUNK = 4096  # texts handed to the tokenizer at once: enough to be fast, few enough to bound memory


class Special(NamedTuple):
    """Ids that mean something to training and sampling."""

    bos: int | None
    eos: tuple[int, ...]
    """All that end a sequence, the tokenizer's own first; empty where there is none."""
    pad: int | None


def special_ids(tokenizer: Any) -> Special:
    """Special ids; the end-of-sequence ids include those of a generation_config.json beside the tokenizer."""
    eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    place = getattr(tokenizer, "name_or_path", None)
    beside = Path(str(place)) / "generation_config.json" if place else None
    if beside is not None and beside.is_file():
        listed = json.loads(beside.read_text(encoding="utf-8")).get("eos_token_id")
        for i in listed if isinstance(listed, list) else [] if listed is None else [listed]:
            if i not in eos and 0 <= i < len(tokenizer):
                eos.append(int(i))
    return Special(tokenizer.bos_token_id, tuple(eos), tokenizer.pad_token_id)


def template_text(tokenizer: Any, chat_template: str | None = None) -> str | None:
    """The Jinja text of a template: None is the tokenizer's own (None where it has none), "plain" is ours,
    anything else a file, or the Jinja text itself.

    Raises InputError for a file that does not exist.
    """
    if chat_template is None:
        own = getattr(tokenizer, "chat_template", None)
        return own.get("default") if isinstance(own, dict) else own
    if chat_template == "plain":
        return PLAIN
    if "{%" in chat_template or "{{" in chat_template:
        return chat_template
    path = Path(chat_template).expanduser()
    if path.is_dir():
        raise InputError(f"chat_template '{chat_template}' is a directory: give the template file in it")
    if not path.is_file():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = near(chat_template, ["plain"]) or near(path.name, siblings)
        raise InputError(f"chat_template '{chat_template}' is neither \"plain\" nor a file.{hint}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"chat_template '{chat_template}' line {line} is not UTF-8: save it as UTF-8"
        ) from None


class Encoder:
    """Prompts and completions to ids, with one tokenizer and one chat template."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        """chat_template: as in `template_text`."""
        self.tokenizer = tokenizer
        self.template = template_text(tokenizer, chat_template)
        self._template_name = (
            f"chat_template '{chat_template}'" if chat_template else "the tokenizer's chat template"
        )
        self.special = special_ids(tokenizer)
        self._closed = any(int(i) in self.special.eos for i in self.tokenize([("a", True)])[0][-1:])

    def prompts(self, prompts: Sequence[Turns], tools: Sequence[Any] | None = None) -> list[Ints]:
        """Ids, int32 [n] each, that a completion is sampled after: conversations open an assistant turn."""
        tools = tools or [None] * len(prompts)
        texts = [self.text(p, open_turn=True, tools=t) for p, t in zip(prompts, tools, strict=True)]
        return self.opened(texts)

    def whole(
        self,
        prompts: Sequence[Turns | None],
        completions: Sequence[Turns],
        tools: Sequence[Any] | None = None,
    ) -> list[Ints]:
        """Ids, int32 [n] each, of a prompt (or None) and its completion, EOS last."""
        tools = tools or [None] * len(prompts)
        texts = [self.text(join(p, c), tools=t) for p, c, t in zip(prompts, completions, tools, strict=True)]
        return [self.ended(ids) for ids in self.tokenize(texts)]

    def text(self, turns: Turns, *, open_turn: bool = False, tools: Any = None) -> tuple[str, bool]:
        """The text to tokenise, and whether the tokenizer adds special tokens (a template writes its own)."""
        if isinstance(turns, str):
            return turns, True
        rendered, _ = self._render(turns, open_turn, tools)
        return rendered, self.template == PLAIN

    def marked(self, turns: Sequence[Message], tools: Any = None) -> tuple[Ints, NDArray[np.bool_]]:
        """Ids of a conversation, EOS last, and which of them the template marks as {% generation %}."""
        rendered, spans = self._render(turns, False, tools, marks=True)
        out = self.tokenizer(
            rendered, add_special_tokens=self.template == PLAIN, return_offsets_mapping=True, verbose=False
        )
        written = np.zeros(len(rendered) + 1, bool)
        for start, end in spans:
            written[start:end] = True
        starts = np.array([[start, end] for start, end in out["offset_mapping"]], np.intp).reshape(-1, 2)
        inside = (starts[:, 1] > starts[:, 0]) & written[starts[:, 0]]
        ids = np.array(out["input_ids"], np.int32)
        ended = self.ended(ids)
        mask = np.full(len(ended), turns[-1]["role"] == "assistant")  # for an EOS that the template left out
        mask[: len(ids)] = inside[: len(ended)]
        return ended, mask

    @property
    def marks_turns(self) -> bool:
        """Whether the template marks what an assistant wrote."""
        return self.template is not None and "{% generation" in self.template.replace("{%-", "{%")

    def ended(self, ids: Ints) -> Ints:
        """`ids` with EOS last: white space that follows the last EOS is cut, a missing EOS is added."""
        eos = self.special.eos
        if not eos or (len(ids) and int(ids[-1]) in eos):
            return ids
        for i in range(len(ids) - 1, max(len(ids) - 4, 0), -1):
            if int(ids[i]) in eos and not self.tokenizer.decode(ids[i + 1 :].tolist()).strip():
                return ids[: i + 1]
        return np.append(ids, np.int32(eos[0]))

    def _render(
        self, turns: Sequence[Message], open_turn: bool, tools: Any, *, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        if self.template is None:
            raise InputError(
                'the tokenizer has no chat template: set chat_template = "plain", or give a template file'
            )
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = [{k: v for k, v in turn.items() if v is not None} for turn in turns]
        template = self.template
        self._require_roles(turns)
        if tools and isinstance(getattr(self.tokenizer, "chat_template", None), dict):
            template = self.tokenizer.chat_template.get("tool_use", template)
        values: dict[str, Any] = {"eos_token": None, "bos_token": None, **self.tokenizer.special_tokens_map}
        try:
            texts, spans = render_jinja_template(
                [messages],
                tools=tools or None,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=open_turn,
                **values,
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise InputError(f"the chat template fails on this conversation: {error}") from error
        return texts[0], spans[0] if marks else []

    def _require_roles(self, turns: Sequence[Message]) -> None:
        """Raise InputError for a role that nobody knows, which a template would write or leave out without a word."""
        for number, turn in enumerate(turns, 1):
            role = str(turn["role"])
            if role not in ROLES and not re.search(rf"""(['"]){re.escape(role)}\1""", self.template or ""):
                raise InputError(
                    f"message {number} has the role '{role}', which the chat template does not name."
                    f"{near(role, ROLES)} Known: {', '.join(ROLES)}"
                )

    def template_problem(self) -> str | None:
        """What is wrong with the template whatever the conversation, or None."""
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            render_jinja_template([[]], chat_template=self.template)
        except TemplateSyntaxError as error:
            return f"{self._template_name} line {error.lineno} is not valid Jinja: {error.message}"
        except Exception:
            return (
                None  # it wants messages, or more of them; what fails on those of a row is told with the row
            )
        return None

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
                    out[i] = np.array(row, np.int32)
        return [ids for ids in out if ids is not None]


def continuations(tokenizer: Any, prompts: Sequence[Ints | None], completions: Sequence[Ints]) -> list[str]:
    """The texts that completions add to their prompts, both int32 [n] ids, without special tokens.

    A prompt that is None is a conversation, to which the completion adds a message: a text by itself. Others are
    decoded after the end of the prompt: alone, a first token of SentencePiece's kind would lose the space before it,
    and prompt and completion together would be another text than the one that was sampled.
    """
    ends = [[] if prompt is None else prompt[-CONTEXT:].tolist() for prompt in prompts]
    whole = [[*end, *ids.tolist()] for end, ids in zip(ends, completions, strict=True)]
    before, texts, alone = (
        tokenizer.batch_decode(ids, skip_special_tokens=True)
        for ids in (ends, whole, [ids.tolist() for ids in completions])
    )
    return [
        text[len(start) :] if start and text.startswith(start) else own
        for start, text, own in zip(before, texts, alone, strict=True)
    ]


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
