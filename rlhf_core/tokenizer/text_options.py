"""Options for turning texts and conversations into token ids, and checks of their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

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
        return f"names {', '.join(map(repr, reserved))}, which templates are given otherwise; leave it out"
    return None


def text_problem(text: str) -> str | None:
    """Describe half a surrogate pair, as in text cut inside a JSON escape, or return None if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        return (
            f"is not valid Unicode: \\u{half:04x} at character {error.start + 1} is half of a pair; remove it"
        )
    return None
