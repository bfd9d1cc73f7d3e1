"""The text of a completion."""

from __future__ import annotations

from typing import Any


def said(completion: Any) -> str:
    """A completion's text; of a message list, the last message's content."""
    return str(completion[-1]["content"] if isinstance(completion, list) else completion)
