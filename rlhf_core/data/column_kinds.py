"""Count what each column holds (texts, conversations, their formats) in one pass over the rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rlhf_core.tokenizer.options import is_parts, with_joined_parts

CONVERSATIONS = ("prompt", "completion", "chosen", "rejected", "messages", "conversations")
"""Columns that may hold conversations."""
ROLES = {"human": "user", "gpt": "assistant"}
"""{ShareGPT's role: the role that chat templates know}."""


@dataclass
class Kind:
    """Counts of the values of a column; nulls are not counted."""

    texts: int = 0
    lists: int = 0
    text_first: bool = False
    """Whether the first value is a text."""
    json_texts: int = 0
    """Texts that are a conversation's JSON."""
    python_texts: int = 0
    """Texts that are a conversation's `str()` in Python, which is not JSON."""
    sharegpt: int = 0
    """Conversations in ShareGPT's format: messages have `from` and `value`, or roles of `ROLES`."""
    parts: int = 0
    """Conversations in which a content is a list of parts."""
    others: int = 0
    """Values that are neither text nor list, nor null."""

    @property
    def total(self) -> int:
        return self.texts + self.lists + self.others

    @property
    def chat(self) -> bool:
        """Whether the column holds conversations: most values are lists, or half of them and the first one."""
        return self.lists > self.texts or (self.lists == self.texts > 0 and not self.text_first)


Kinds = dict[str, Kind]
"""Counts by column, in order of appearance."""


def count_values(kinds: Kinds, row: Mapping[Any, Any]) -> None:
    """Add the values of a row to the counts."""
    for name, value in row.items():
        kind = kinds.get(name)
        if kind is None:
            kind = kinds[name] = Kind()
        if isinstance(value, str):
            kind.text_first |= kind.texts == kind.lists == 0
            kind.texts += 1
            messages: Any = parse_conversation(value)
            kind.json_texts += messages is not None
            kind.python_texts += messages is None and is_python_literal(value)
        elif isinstance(value, Sequence | np.ndarray):
            kind.lists += 1
            messages = (
                value if len(value) and not isinstance(value[0], str | int | float | np.number) else None
            )
        else:
            kind.others += value is not None
            continue
        if messages is not None:  # in every column, because it may be renamed
            kind.sharegpt += is_sharegpt(messages)
            kind.parts += has_parts(messages)


def count_kinds(rows: Iterable[Mapping[Any, Any]]) -> Kinds:
    kinds: Kinds = {}
    for row in rows:
        count_values(kinds, row)
    return kinds


def kinds_to_json(kinds: Kinds) -> str:
    return json.dumps([[name, asdict(kind)] for name, kind in kinds.items()])


def kinds_from_json(text: str) -> Kinds:
    return {name: Kind(**fields) for name, fields in json.loads(text)}


def parse_conversation(text: str) -> list[Any] | None:
    """Parse a text as a conversation's JSON; None for any other text."""
    start = text[:200].lstrip()
    if not start.startswith("[") or not start[1:].lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if value and all(map(_is_message, value)) else None


def is_python_literal(text: str) -> bool:
    """Whether a text is the Python repr of messages, as pandas writes them to CSV files."""
    return text[:2] == "[{" and text[2:8] in ("'role'", "'from'", "'conte") and "}" in text[-9:]


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and ("role" in value or {"from", "value"} <= set(value))


def is_sharegpt(messages: Any) -> bool:
    """Whether a conversation is in ShareGPT's format."""
    return any(
        isinstance(message, Mapping)
        and (_has_sharegpt_keys(message) or (isinstance(role := message.get("role"), str) and role in ROLES))
        for message in messages
    )


def has_parts(messages: Any) -> bool:
    """Whether a content in a conversation, or in a list of them, is a list of parts."""
    return any(
        is_parts(message.get("content", message.get("value")))
        if isinstance(message, Mapping)
        else is_parts(message) and has_parts(message)
        for message in messages
    )


def join_contents(messages: Any) -> Any:
    """Apply `with_joined_parts` to a conversation, or to a list of them; return any other value unchanged."""
    if not is_parts(messages):
        return messages
    return [join_contents(item) if is_parts(item) else with_joined_parts(item) for item in messages]


def _has_sharegpt_keys(message: Mapping[Any, Any]) -> bool:
    return "role" not in message and {"from", "value"} <= set(message)


def convert_message(message: Any) -> Any:
    """Convert a message from ShareGPT's format; return any other value unchanged."""
    if not isinstance(message, Mapping):
        return message
    if _has_sharegpt_keys(message):
        names = {"from": "role", "value": "content"}
        message = {names.get(key, key): value for key, value in message.items()}
    role = message.get("role")
    return {**message, "role": ROLES[role]} if isinstance(role, str) and role in ROLES else message
