"""Read message contents that are lists of parts, as OpenAI's format and multimodal datasets write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

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
