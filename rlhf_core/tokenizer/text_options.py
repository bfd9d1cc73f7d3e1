"""How texts and conversations become token ids, beside the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

ReadAt: TypeAlias = Literal["template", "eos"]
RENDERED = ("messages", "tools", "documents", "conversations", "add_generation_prompt", "chat_template",
    "continue_final_message", "return_assistant_tokens_mask", "tokenize")  # fmt: skip
"""What a template is given, or transformers takes, by other ways than `chat_template_kwargs`."""


@dataclass(frozen=True)
class TextOptions:
    """How texts and conversations become token ids, beside the tokenizer.

    chat_template: as in `template_text`. chat_template_kwargs: variables for the template; those of a row win.
    template_date: the day that `strftime_now` of a template tells, "2026-01-31"; None: today.
    read_at: where a sequence ends: "eos", after the first stop token behind the last reply, or "template", where the
    chat template ends. prompt_repeated: whether completions begin with the text of their prompt, which is then taken
    off; None: they do not, and a file in which most do is an error.
    """

    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    template_date: str | None = None
    read_at: ReadAt = "eos"
    prompt_repeated: bool | None = None

    @classmethod
    def of(cls, given: str | TextOptions | None) -> TextOptions:
        """Options with this chat template, unless they are given whole."""
        return given if isinstance(given, TextOptions) else cls(given)


def kwargs_problem(given: Any) -> str | None:
    """What is wrong with `chat_template_kwargs`, or None."""
    if not isinstance(given, Mapping):
        return f'is {type(given).__name__}, not an object such as {{"enable_thinking": false}}'
    taken = [str(name) for name in given if name in RENDERED]
    if taken:
        return f"names {', '.join(map(repr, taken))}, which templates are given otherwise; leave it out"
    return None


def text_problem(text: str) -> str | None:
    """What makes a text no Unicode, or None: half of a surrogate pair, as text that was cut in JSON's escapes has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        return (
            f"is no valid Unicode: \\u{half:04x} at character {error.start + 1} is half of a pair; remove it"
        )
    return None
