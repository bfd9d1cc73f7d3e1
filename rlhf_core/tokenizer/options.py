"""Options for turning texts and conversations into token ids, contents that are lists of parts, and template dates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeAlias

import numpy as np

ReadAt: TypeAlias = Literal["template", "eos"]
RESERVED = ("messages", "tools", "documents", "conversations", "add_generation_prompt", "chat_template",
    "continue_final_message", "return_assistant_tokens_mask", "tokenize")  # fmt: skip
"""Names that templates or transformers get by other means than `chat_template_kwargs`."""


@dataclass(frozen=True)
class TextOptions:
    """Options for turning texts and conversations into token ids.

    chat_template: as in `template_text`. chat_template_kwargs: variables for the template; a row's own override them.
    template_date: the day that a template's `strftime_now` returns, such as "2026-01-31"; None: today.
    read_at: where a sequence ends: "eos", at the first stop token after the last reply, or "template", where the chat
    template ends. prompt_repeated: whether completions repeat the prompt's text, which is then stripped; None: they do
    not, and a file where most do is an error. system_prompt: content of the system message that conversations without
    one begin with.
    """

    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    template_date: str | None = None
    read_at: ReadAt = "eos"
    prompt_repeated: bool | None = None
    system_prompt: str | None = None

    @classmethod
    def of(cls, given: str | TextOptions | None) -> TextOptions:
        """Return options unchanged, or make options with this chat template."""
        return given if isinstance(given, TextOptions) else cls(given)


def kwargs_problem(kwargs: Any) -> str | None:
    """Describe what is wrong with `chat_template_kwargs`, or return None."""
    if not isinstance(kwargs, Mapping):
        return f'is {type(kwargs).__name__}, not an object such as {{"enable_thinking": false}}'
    reserved = [str(name) for name in kwargs if name in RESERVED]
    if reserved:
        return f"names {', '.join(map(repr, reserved))}, which templates receive by other means; leave it out"
    return None


TEXT = ("text", "input_text", "output_text")
"""The types of parts that are read."""


class JoinedParts(str):
    """The text of a message's parts, joined without a separator, with the parts for templates that take them."""

    parts: list[dict[str, Any]]
    """[{"type": "text", "text": …}], with other fields that have a value."""


def is_parts(content: Any) -> bool:
    """Whether a content is a list, which should be one of parts."""
    return isinstance(content, list | tuple | np.ndarray)


def parts_problem(content: Any) -> str | None:
    """Describe the first part that is not text, or return None."""
    for number, part in enumerate(content, 1):
        if isinstance(part, str):
            continue
        if not isinstance(part, Mapping):
            return f"part {number} of its content is {type(part).__name__}, neither a text nor an object with a text"
        kind = part.get("type") or "text"
        if kind not in TEXT:
            return f"part {number} of its content is of type '{kind}', and only text is read; remove it, or the row"
        if not isinstance(part.get("text"), str):
            return (
                f"part {number} of its content has no text (its keys: {', '.join(map(str, part)) or 'none'})"
            )
    return None


def with_joined_parts(message: Any) -> Any:
    """Make one text of a message's text parts; return a message unchanged if its content is none or has other parts."""
    content: Any = message.get("content") if isinstance(message, Mapping) else None
    if not is_parts(content) or parts_problem(content):
        return message
    parts = [{"text": part} if isinstance(part, str) else part for part in content]
    joined = JoinedParts("".join(part["text"] for part in parts))
    joined.parts = [
        {**{k: v for k, v in part.items() if v not in (None, [], {})}, "type": "text"} for part in parts
    ]
    return {**message, "content": joined}


DATED = "strftime_now"
"""The function that templates call to write the date."""
_DATE: ContextVar[datetime | None] = ContextVar("template date", default=None)


@contextmanager
def on_date(day: str | None, template: str) -> Iterator[None]:
    """Make this template's `strftime_now` return midnight of `day`, such as "2026-01-31"; None: now.

    Templates take no functions as arguments, so this replaces, permanently, the one that transformers compiles in;
    without a day the replacement returns the same as transformers' own.
    """
    if day is None or DATED not in template:
        yield
        return
    from transformers.utils.chat_template_utils import _compile_jinja_template

    token = _DATE.set(parse_date(day))
    try:
        _compile_jinja_template(template).globals[DATED] = _strftime_now
        yield
    finally:
        _DATE.reset(token)


def _strftime_now(format: str) -> str:
    return (_DATE.get() or datetime.now()).strftime(format)


def parse_date(day: str) -> datetime:
    """Parse a day such as "2026-01-31" as its midnight. Raises ValueError for anything else."""
    return datetime.strptime(day, "%Y-%m-%d")


def text_problem(text: str) -> str | None:
    """Describe half a surrogate pair, as in text cut inside a JSON escape, or return None if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        return f"is not valid Unicode: \\u{half:04x} at character {error.start + 1} is an unpaired surrogate; remove it"
    return None
