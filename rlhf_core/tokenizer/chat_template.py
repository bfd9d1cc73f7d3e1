"""Render conversations with chat templates, and locate the replies and stop tokens in the text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from rlhf_core.errors import InputError, suggest
from rlhf_core.tokenizer.calls import with_parsed_arguments, with_parsed_parameters
from rlhf_core.tokenizer.options import (
    DATED,
    JoinedParts,
    TextOptions,
    is_parts,
    kwargs_problem,
    on_date,
    parts_problem,
    with_joined_parts,
)

Message: TypeAlias = Mapping[str, Any]
Span: TypeAlias = tuple[int, int]
"""Range of characters of a text, end excluded."""

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
"""Roles that every template may get; it must name others."""
SYSTEM_ROLES = ("system", "developer")
SHORT = 3
"""Characters of a text that may stand for another one in a template, as a flag does."""
PROBE = "qzxreply"  # a reply that no template contains
NAME, VALUE = "qzxname", "qzxvalue"
"""An argument of a call that no template contains, and its value."""
MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def templates_of(tokenizer: Any) -> dict[str, str]:
    """Return a tokenizer's chat templates by name; a single one is called "default"."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return {}
    if isinstance(template, Mapping):
        return dict(template)
    return {"default": template}


def writes_date(tokenizer: Any, chat_template: str | None = None) -> bool:
    """Whether any template that may be used writes the date. chat_template: as in `template_text`."""
    if chat_template is not None:
        return DATED in (template_text(tokenizer, chat_template) or "")
    return any(DATED in text for text in templates_of(tokenizer).values())


class Rendered(NamedTuple):
    """A conversation rendered by a template."""

    text: str
    replies: tuple[Span, ...]
    """Spans to learn: each reply with the token that ends its turn, without its header."""
    follows: bool
    """Whether the last reply directly follows the text that it would be sampled from."""
    complete: bool
    """Whether `replies` has every requested reply."""
    learns_end: bool = True
    """Whether the last reply is learned; its `weight` may be 0."""


def template_text(tokenizer: Any, chat_template: str | None = None) -> str | None:
    """Return the Jinja text of a template, or None if there is none.

    chat_template: None for the tokenizer's own, "plain" for `PLAIN`, else a file or the Jinja text itself.
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
        """chat_template: as in `template_text`, or options, whose variables and date are used too."""
        options = TextOptions.of(chat_template)
        chat_template = options.chat_template
        self.tokenizer = tokenizer
        self.text = template_text(tokenizer, chat_template)
        by_name = templates_of(tokenizer) if chat_template is None else {}
        self._with_tools: str | None = by_name.get("tool_use", self.text)
        self._kwargs = dict(options.chat_template_kwargs)
        self._date = options.template_date
        self._forms: dict[tuple[str, str], str] = {}
        self._takes_text: dict[str, bool] = {}
        self._words = frozenset(re.findall(r"\w+", f"{self.text} {self._with_tools}"))
        self.system_prompt = options.system_prompt
        self._name = f"chat_template '{chat_template}'" if chat_template else "the tokenizer's chat template"

    def write(
        self,
        turns: Sequence[Message],
        *,
        open_turn: bool = False,
        tools: Any = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation, which gets the options' system prompt unless it begins with one.

        open_turn: end with the header of an assistant turn. tools, kwargs: the row's tools and variables for the
        template.

        Raises InputError if there is no template, it rejects the conversation, or a role is unknown.
        """
        return self._render(self._with_system(turns), open_turn, tools, kwargs, marks=False)[0]

    def locate_replies(
        self,
        turns: Sequence[Message],
        stops: Sequence[str],
        *,
        tools: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        first: int = 0,
    ) -> Rendered:
        """Render a conversation that ends with a reply, and locate its replies from turn `first` on.

        Replies are what the template marks as {% generation %}. A template without marks is rendered turn by turn: a
        reply is the text that its turn adds to the prompt it would be sampled from. A reply that the template renders
        differently once the conversation continues is left out, and so is one whose `weight` is 0. The stop token right
        after a reply belongs to it.
        stops: the texts of the stop tokens. Raises InputError as `write` does.
        """
        given = len(turns)
        turns = self._with_system(turns)
        first += len(turns) - given
        text, marked = self._render(turns, False, tools, kwargs, marks=self.marks(tools))
        last = len(turns) - 1
        before = self.write(turns[:last], open_turn=True, tools=tools, kwargs=kwargs) if last else ""
        start = _shared_start(before, text)
        follows = start == len(before)
        unlearned = [
            k for k, turn in enumerate(turns) if turn["role"] == "assistant" and turn.get("weight") == 0
        ]
        ends = last not in unlearned
        if self.marks(tools):
            marked = self._without_turns(marked, turns, unlearned, tools, kwargs)
            opened = before
            if 0 < first < last:
                opened = self.write(turns[:first], open_turn=True, tools=tools, kwargs=kwargs)
            begin = _shared_start(opened, text) if first else 0
            spans = [(max(a, begin), _include_stop(text, b, stops)) for a, b in marked if b > begin]
            return Rendered(text, tuple(spans), follows, True, ends)
        learned = [k for k in range(first, last) if turns[k]["role"] == "assistant" and k not in unlearned]
        spans = list(self._spans_by_turn(turns, learned, text, stops, tools, kwargs))
        whole = len(spans) == len(learned)
        spans += [(start, len(text))] if ends else []
        return Rendered(text, tuple(spans), follows, whole, ends)

    def _spans_by_turn(
        self,
        turns: Sequence[Message],
        replies: Sequence[int],
        text: str,
        stops: Sequence[str],
        tools: Any,
        kwargs: Mapping[str, Any] | None,
    ) -> Iterator[tuple[int, int]]:
        """Yield where replies are in a text without marks: what each adds to the prompt that it is sampled from.

        One that the template renders differently once the conversation continues is left out.
        """
        for k in replies:
            opened = self.write(turns[:k], open_turn=True, tools=tools, kwargs=kwargs) if k else ""
            closed = cut_after_stop(self.write(turns[: k + 1], tools=tools, kwargs=kwargs), stops)
            if text.startswith(closed) and closed.startswith(opened):
                yield len(opened), len(closed)

    def _without_turns(
        self,
        marked: Sequence[Span],
        turns: Sequence[Message],
        left_out: Sequence[int],
        tools: Any,
        kwargs: Mapping[str, Any] | None,
    ) -> list[Span]:
        """Leave out the marked spans of these turns, by how many spans there are before and after each."""
        counts = [[self._count_marked(turns[:end], tools, kwargs) for end in (k, k + 1)] for k in left_out]
        skipped = {i for count in counts for i in range(*count)}
        return [span for i, span in enumerate(marked) if i not in skipped]

    def _count_marked(self, turns: Sequence[Message], tools: Any, kwargs: Mapping[str, Any] | None) -> int:
        """Count the spans that the template marks as {% generation %}."""
        return len(self._render(turns, False, tools, kwargs, marks=True)[1]) if turns else 0

    def _with_system(self, turns: Sequence[Message]) -> Sequence[Message]:
        """Put the system prompt before turns that do not begin with a system message."""
        if self.system_prompt is None or (turns and turns[0]["role"] in SYSTEM_ROLES):
            return turns
        return [{"role": "system", "content": self.system_prompt}, *turns]

    def require_system_prompt(self) -> None:
        """Raise InputError if the template does not write the system prompt."""
        if self.system_prompt is None or self.text is None:
            return
        remedy = (
            "leave out system_prompt, and put its text in the user's turns; or give another chat_template"
        )
        try:
            text = self.write([{"role": "user", "content": "a"}], open_turn=True)
        except InputError as error:
            raise InputError(f"system_prompt: {error}, or {remedy}") from error
        if self.system_prompt.strip() not in text:
            raise InputError(f"system_prompt: {self._name} does not write system messages: {remedy}")

    def marks(self, tools: Any = None) -> bool:
        """Whether the template marks replies as {% generation %}."""
        text = self._with_tools if tools else self.text
        return text is not None and MARK.search(text) is not None

    def leaves_out(self, turns: Sequence[Message], text: str, tools: Any = None) -> bool:
        """Whether the text that `write` returned lacks a message's content, or the template ignores the tools."""
        pieces = [piece for turn in turns for piece in _texts_of(turn.get("content"))]
        if any(
            piece not in text and json.dumps(piece, ensure_ascii=False)[1:-1] not in text for piece in pieces
        ):
            return True
        return bool(tools) and "tools" not in (self._with_tools or "")

    def ignored_fields(
        self,
        turns: Sequence[Message],
        text: str,
        *,
        tools: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        learns: bool = False,
    ) -> list[str]:
        """Name the fields of messages, other than role and content, that the text which `write` returned lacks.

        These are fields that the template does not name, and fields whose texts were not written. Variables in
        `kwargs` and fields of a content's parts count if the template does not name them.
        learns: whether replies are learned, unless their `weight` is 0.
        """
        template = (self._with_tools if tools else self.text) or ""
        turns = [with_parsed_arguments(turn) for turn in turns]
        names = [f"chat_template_kwargs.{name}" for name in kwargs or () if name not in template]
        names += [f"content.{key}" for key in _keys_of_parts(turns) if key not in template]
        fields = dict.fromkeys(
            name
            for turn in turns
            for name, value in turn.items()
            if _may_be_ignored(turn, name, learns) and not (name in self._words and _is_written(value, text))
        )
        return names + list(fields)

    def end_of_turn(self) -> int | None:
        """Return the id of the added token that the template writes after a reply; None if it writes none."""
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
        """Describe a syntax error of the template, or return None."""
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            render_jinja_template([[]], chat_template=self.text)
        except TemplateSyntaxError as error:
            return f"{self._name} line {error.lineno} is not valid Jinja: {error.message}"
        except Exception:
            return None  # it needs messages; errors on a row's messages name the row
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
            fix = 'set chat_template = "plain", or give a template file'
            fix = (
                'set chat_template to a file that writes tools, not to "plain", which does not'
                if tools
                else fix
            )
            raise InputError(f"the tokenizer has no chat template: {fix}")
        from jinja2 import TemplateSyntaxError

        variables = {**self._kwargs, **(kwargs or {})}
        problem = kwargs_problem(variables)
        if problem:
            raise InputError(f"chat_template_kwargs {problem}")
        messages = self._as_taken(template, turns)
        tools = with_parsed_parameters(tools) if tools else None
        try:
            text, spans = self._call(
                template, messages, variables, tools=tools, open_turn=open_turn, marks=marks
            )
        except TemplateSyntaxError as error:
            raise InputError(self.problem() or str(error)) from error
        except Exception as error:  # a filter may raise anything
            remedy = (
                'Change its messages, or give a template that accepts them: chat_template = "plain" or a file'
            )
            missing = re.search(r"'(\w+_token)' is undefined", str(error))
            if missing:
                remedy = (
                    f"Name the tokenizer's {missing[1]} in tokenizer_config.json, or give another template"
                )
            what = str(error) or type(error).__name__
            raise InputError(f"the chat template fails on this conversation: {what}. {remedy}") from error
        return text, spans

    def _as_taken(self, template: str, turns: Sequence[Message]) -> list[Message]:
        """Write the arguments and contents of messages in the forms that the template takes."""
        messages: list[Message] = [{k: v for k, v in turn.items() if v is not None} for turn in turns]
        self._require_roles(turns)
        for number, message in enumerate(messages, 1):
            content = message.get("content")
            problem = parts_problem(content) if is_parts(content) else None
            if problem:
                raise InputError(f"message {number}: {problem}")
            try:
                messages[number - 1] = self._with_arguments(template, message)
            except InputError as error:
                raise InputError(f"message {number}: {error}") from None
        return [self._in_parts(template, with_joined_parts(message)) for message in messages]

    def _call(
        self,
        template: str,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        tools: Any = None,
        open_turn: bool = False,
        marks: bool = False,
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        with on_date(self._date, template):
            texts, spans = render_jinja_template(
                [messages],
                tools=tools or None,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=open_turn,
                # Missing special tokens are undefined, which templates render as nothing.
                **{**self.tokenizer.special_tokens_map, **variables},
            )
        return texts[0], spans[0] if marks else []

    def _with_arguments(self, template: str, message: Message) -> Message:
        """Give the arguments of tool calls as objects, or as JSON text if the template takes nothing else."""
        parsed = with_parsed_arguments(message)
        if not message.get("tool_calls"):
            return message
        if template not in self._takes_text:
            self._takes_text[template] = not self._writes_call(template, {NAME: VALUE}) and self._writes_call(
                template, json.dumps({NAME: VALUE})
            )
        return _with_text(message) if self._takes_text[template] else parsed

    def _writes_call(self, template: str, arguments: Any) -> bool:
        """Whether the template writes a call with these arguments, as JSON or in marks of its own."""
        call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns: list[Message] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            text = self._call(template, turns, self._kwargs)[0]
        except Exception:  # as a template may raise for what it does not take
            return False
        # Python's own notation is no format of calls.
        return NAME in text and VALUE in text and f"{{'{NAME}'" not in text

    def _in_parts(self, template: str, message: Message) -> Message:
        """Put a content as parts if the template takes nothing else, or if it has parts and the template takes them."""
        role = str(message["role"])
        content = message.get("content")
        if not isinstance(content, str) or not content:
            return message
        if (template, role) not in self._forms:
            self._forms[template, role] = self._content_form(template, role)
        form = self._forms[template, role]
        if isinstance(content, JoinedParts) and form != "text":
            return {**message, "content": content.parts}
        return {**message, "content": [{"type": "text", "text": content}]} if form == "parts" else message

    def _content_form(self, template: str, role: str) -> str:
        """Find out which contents of a role's messages the template writes: "text", "parts" or "either"."""
        asked, call = {"role": "user", "content": "a"}, {"name": "f", "arguments": {}}
        calls = [{"id": "000000000", "type": "function", "function": call}]
        before: dict[str, list[Message]] = {
            "assistant": [asked],
            "tool": [asked, {"role": "assistant", "content": "", "tool_calls": calls}],
        }
        after = [asked] if role in ("system", "developer") else []
        message = {"role": role, "name": "f", "tool_call_id": "000000000"}

        def write(content: Any) -> str:
            turns = [*before.get(role, []), {**message, "content": content}, *after]
            try:
                return self._call(template, turns, self._kwargs)[0]
            except Exception:  # as a template may raise for a content that it does not take
                return ""

        text = write(PROBE)
        parts = write([{"type": "text", "text": PROBE}])
        # The list itself, as Python or JSON writes it.
        as_value = re.search(r"(['\"])type\1", parts) and parts != text
        if PROBE not in parts or as_value:
            return "text"
        return "either" if PROBE in text else "parts"

    def _require_roles(self, turns: Sequence[Message]) -> None:
        """Raise InputError for an unknown role, which a template would render or drop without an error."""
        for number, turn in enumerate(turns, 1):
            role = str(turn["role"])
            if role not in ROLES and not re.search(rf"""(['"]){re.escape(role)}\1""", self.text or ""):
                raise InputError(
                    f"message {number} has the role '{role}', which the chat template does not name."
                    f"{suggest(role, ROLES)} Known: {', '.join(ROLES)}"
                )


def _with_text(message: Message) -> Message:
    """Write the arguments of tool calls as JSON text."""
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function")
        holder = dict(function if isinstance(function, Mapping) else call)
        arguments = holder.get("arguments")
        if isinstance(arguments, str):
            holder["arguments"] = arguments if arguments.strip() else "{}"
        else:
            holder["arguments"] = json.dumps(arguments or {}, ensure_ascii=False)
        calls.append({**call, "function": holder} if isinstance(function, Mapping) else holder)
    return {**message, "tool_calls": calls}


def _keys_of_parts(turns: Sequence[Message]) -> dict[str, None]:
    """Collect the fields of contents' parts, other than what every part of text has."""
    parts = [part for turn in turns for part in getattr(turn.get("content"), "parts", ())]
    return dict.fromkeys(key for part in parts for key in part if key not in ("type", "text"))


def _texts_of(content: Any) -> list[str]:
    """Return the texts of a content's parts, or the content itself, without white space around them."""
    if isinstance(content, JoinedParts):
        return [part["text"].strip() for part in content.parts]
    return [str(content or "").strip()]


def _may_be_ignored(turn: Message, name: str, learns: bool) -> bool:
    """Whether a field says something that a template could leave out. learns: as in `ChatTemplate.ignored_fields`."""
    value = turn[name]
    if name in ("role", "content") or value is None or (hasattr(value, "__len__") and not len(value)):
        return False
    if name != "weight":
        return True
    replies = turn["role"] == "assistant"
    return value != 0 if learns and not replies else value != 1 and not learns


def _is_written(value: Any, text: str) -> bool:
    """Whether a text holds any of the texts in a value; true for flags, which a template may rewrite."""
    pieces = [piece for piece in _leaves(value) if piece]
    return not any(len(piece) > SHORT for piece in pieces) or any(
        piece in text or json.dumps(piece, ensure_ascii=False)[1:-1] in text for piece in pieces
    )


def _leaves(value: Any) -> list[str]:
    """List every text in a value, without white space around it."""
    if isinstance(value, Mapping):
        return [piece for item in value.values() for piece in _leaves(item)]
    if isinstance(value, list | tuple):
        return [piece for item in value for piece in _leaves(item)]
    return [value.strip()] if isinstance(value, str) else []


def cut_after_stop(text: str, stops: Sequence[str]) -> str:
    """Cut the stop tokens and white space that end a text, except the first stop token."""
    any_stop = "|".join(map(re.escape, stops))
    match = re.search(rf"({any_stop})(?:\s|{any_stop})*\Z", text) if stops else None
    return text[: match.end(1)] if match else text


def _include_stop(text: str, end: int, stops: Sequence[str]) -> int:
    """Extend the end of a span over the stop token that follows it, unless the span ends with one."""
    any_stop = "|".join(map(re.escape, stops))
    if not stops or re.search(rf"(?:{any_stop})\s*\Z", text[:end]):
        return end
    match = re.compile(rf"\s*(?:{any_stop})").match(text, end)
    return match.end() if match else end


def _shared_start(a: str, b: str) -> int:
    """Return the length of the common prefix of two texts."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
