"""Chat templates: what they write of a conversation, where its replies lie in that, and what ends a turn."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from rlhf_core.errors import InputError, suggest
from rlhf_core.tokenizer.template_dates import DATED, on_date
from rlhf_core.tokenizer.text_options import TextOptions, kwargs_problem, text_problem

Message: TypeAlias = Mapping[str, Any]
Span: TypeAlias = tuple[int, int]
"""Characters of a text, the end excluded."""

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
PROBE = "qzxreply"  # a reply that no template writes of itself
MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def templates_of(tokenizer: Any) -> dict[str, str]:
    """Every chat template of a tokenizer, by name; a lone one is called "default"."""
    own = getattr(tokenizer, "chat_template", None)
    return dict(own) if isinstance(own, Mapping) else {} if own is None else {"default": own}


def writes_date(tokenizer: Any, chat_template: str | None = None) -> bool:
    """Whether a template that may be used writes the date. chat_template: as in `template_text`."""
    if chat_template is not None:
        return DATED in (template_text(tokenizer, chat_template) or "")
    return any(DATED in text for text in templates_of(tokenizer).values())


class Written(NamedTuple):
    """A conversation as a template writes it."""

    text: str
    replies: tuple[Span, ...]
    """What is to be learned: each reply with the token that ends its turn, header and what comes between left out."""
    follows: bool
    """Whether the last reply stands right after what it would be sampled after."""
    complete: bool
    """Whether every reply that was asked for is among `replies`."""


def template_text(tokenizer: Any, chat_template: str | None = None) -> str | None:
    """The Jinja text of a template: None is the tokenizer's own (None where it has none), "plain" is ours,
    anything else a file, or the Jinja text itself.

    Raises InputError for a file that does not exist.
    """
    if chat_template is None:
        return templates_of(tokenizer).get("default")
    if chat_template == "plain":
        return PLAIN
    if "{%" in chat_template or "{{" in chat_template:
        return chat_template
    path = Path(chat_template).expanduser()
    if path.is_dir():
        raise InputError(f"chat_template '{chat_template}' is a directory: give the template file in it")
    if not path.is_file():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = suggest(chat_template, ["plain"]) or suggest(path.name, siblings)
        raise InputError(f"chat_template '{chat_template}' is neither \"plain\" nor a file.{hint}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"chat_template '{chat_template}' line {line} is not UTF-8: save it as UTF-8"
        ) from None


class ChatTemplate:
    """A chat template with the special tokens of a tokenizer."""

    def __init__(self, tokenizer: Any, chat_template: str | TextOptions | None = None) -> None:
        """chat_template: as in `template_text`, or options, of which the variables and the date are used too."""
        options = TextOptions.of(chat_template)
        chat_template = options.chat_template
        self.tokenizer = tokenizer
        self.text = template_text(tokenizer, chat_template)
        by_name = templates_of(tokenizer) if chat_template is None else {}
        self._with_tools: str | None = by_name.get("tool_use", self.text)
        self._kwargs = dict(options.chat_template_kwargs)
        self._date = options.template_date
        self._name = f"chat_template '{chat_template}'" if chat_template else "the tokenizer's chat template"

    def write(
        self,
        turns: Sequence[Message],
        *,
        open_turn: bool = False,
        tools: Any = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation's text. open_turn: up to where the assistant's next words would follow.

        tools, kwargs: what the conversation may call, and variables for the template, as its row has them.

        Raises InputError where there is no template, it refuses the conversation, or nobody knows a role.
        """
        return self._render(turns, open_turn, tools, kwargs, marks=False)[0]

    def replies(
        self,
        turns: Sequence[Message],
        stops: Sequence[str],
        *,
        tools: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        first: int = 0,
    ) -> Written:
        """A conversation that ends with a reply, and where its replies are, from turn `first` on.

        They are what the template marks as {% generation %}. A template without marks is followed turn by turn: a
        reply is what it adds to the text that the reply would be sampled after, and it has to write that text alike
        when the conversation goes on; where it does not, all but the last reply are left out. Either way the stop
        token right behind a reply belongs to it.
        stops: the texts of the stop tokens. Raises InputError as `write` does.
        """
        text, marked = self._render(turns, False, tools, kwargs, marks=self.marks(tools))
        last = len(turns) - 1
        before = self.write(turns[:last], open_turn=True, tools=tools, kwargs=kwargs) if last else ""
        start = _shared(before, text)
        follows = start == len(before)
        if self.marks(tools):
            opened = before
            if 0 < first < last:
                opened = self.write(turns[:first], open_turn=True, tools=tools, kwargs=kwargs)
            begin = _shared(opened, text) if first else 0
            spans = [(max(a, begin), _behind(text, b, stops)) for a, b in marked if b > begin]
            return Written(text, tuple(spans), follows, True)
        spans, missed = [], False
        for k in range(first, last):
            if turns[k]["role"] != "assistant":
                continue
            opened = self.write(turns[:k], open_turn=True, tools=tools, kwargs=kwargs) if k else ""
            closed = until_stop(self.write(turns[: k + 1], tools=tools, kwargs=kwargs), stops)
            if text.startswith(closed) and closed.startswith(opened):
                spans.append((len(opened), len(closed)))
            else:
                missed = True
        return Written(text, (*spans, (start, len(text))), follows, not missed)

    def marks(self, tools: Any = None) -> bool:
        """Whether the template marks what an assistant wrote."""
        text = self._with_tools if tools else self.text
        return text is not None and MARK.search(text) is not None

    def leaves_out(self, turns: Sequence[Message], text: str, tools: Any = None) -> bool:
        """Whether what a message says is not in the text that `write` made of it, or the template has no place for the
        tools.
        """
        said = [str(turn.get("content") or "").strip() for turn in turns]
        if any(part not in text and json.dumps(part, ensure_ascii=False)[1:-1] not in text for part in said):
            return True
        return bool(tools) and "tools" not in (self._with_tools or "")

    def end_of_turn(self) -> int | None:
        """The id of the added token that the template ends a reply with; None where it writes none there."""
        try:
            text = self.write([{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}])
        except InputError:
            return None
        _, found, tail = text.rpartition(PROBE)
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        ids = {token.content: int(i) for i, token in added.items() if token.content.strip()}
        ends = [token for token in ids if tail.lstrip().startswith(token)] if found else []
        return ids[max(ends, key=len)] if ends else None

    def problem(self) -> str | None:
        """What is wrong with the template whatever the conversation, or None."""
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            render_jinja_template([[]], chat_template=self.text)
        except TemplateSyntaxError as error:
            return f"{self._name} line {error.lineno} is not valid Jinja: {error.message}"
        except Exception:
            return None  # it wants messages; what fails on those of a row is told with the row
        return None

    def _render(
        self,
        turns: Sequence[Message],
        open_turn: bool,
        tools: Any,
        kwargs: Mapping[str, Any] | None,
        *,
        marks: bool,
    ) -> tuple[str, list[Span]]:
        template = self._with_tools if tools else self.text
        if template is None:
            raise InputError(
                'the tokenizer has no chat template: set chat_template = "plain", or give a template file'
            )
        from jinja2 import TemplateError, TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self._kwargs, **(kwargs or {})}
        if problem := kwargs_problem(variables):
            raise InputError(f"chat_template_kwargs {problem}")
        messages = [{k: v for k, v in turn.items() if v is not None} for turn in turns]
        self._require_roles(turns)
        try:
            with on_date(self._date, template):
                texts, spans = render_jinja_template(
                    [messages],
                    tools=tools or None,
                    chat_template=template,
                    return_assistant_tokens_mask=marks,
                    add_generation_prompt=open_turn,
                    # A special token that there is not is undefined: written as nothing.
                    **{**self.tokenizer.special_tokens_map, **variables},
                )
        except TemplateSyntaxError as error:
            raise InputError(self.problem() or str(error)) from error
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            remedy = (
                'Change its messages, or give a template that takes them: chat_template = "plain" or a file'
            )
            if missing := re.search(r"'(\w+_token)' is undefined", str(error)):
                remedy = (
                    f"Name the tokenizer's {missing[1]} in tokenizer_config.json, or give another template"
                )
            raise InputError(f"the chat template fails on this conversation: {error}. {remedy}") from error
        if problem := text_problem(texts[0]):
            raise InputError(f"what the chat template writes of this conversation {problem}")
        return texts[0], spans[0] if marks else []

    def _require_roles(self, turns: Sequence[Message]) -> None:
        """Raise InputError for a role that nobody knows, which a template would write or leave out without a word."""
        for number, turn in enumerate(turns, 1):
            role = str(turn["role"])
            if role not in ROLES and not re.search(rf"""(['"]){re.escape(role)}\1""", self.text or ""):
                raise InputError(
                    f"message {number} has the role '{role}', which the chat template does not name."
                    f"{suggest(role, ROLES)} Known: {', '.join(ROLES)}"
                )


def until_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of the stop tokens that end it, white space among them; all of it without one."""
    any_stop = "|".join(map(re.escape, stops))
    found = re.search(rf"({any_stop})(?:\s|{any_stop})*\Z", text) if stops else None
    return text[: found.end(1)] if found else text


def _behind(text: str, end: int, stops: Sequence[str]) -> int:
    """The end of a span with the stop token that follows it, if one does and the span does not hold one at its end."""
    any_stop = "|".join(map(re.escape, stops))
    if not stops or re.search(rf"(?:{any_stop})\s*\Z", text[:end]):
        return end
    found = re.compile(rf"\s*(?:{any_stop})").match(text, end)
    return found.end() if found else end


def _shared(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
