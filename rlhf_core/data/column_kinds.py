"""What the columns of a source hold, found in one pass over its rows and kept with them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

CONVERSATIONS = ("prompt", "completion", "chosen", "rejected", "messages", "conversations")
"""Columns that may hold conversations."""
ROLES = {"human": "user", "gpt": "assistant"}
"""Roles of ShareGPT's files, and what templates call them."""


@dataclass
class Kind:
    """How often a column holds what; nulls and other values are not counted."""

    texts: int = 0
    lists: int = 0
    text_first: bool = False
    """Whether the first value is a text."""
    written: int = 0
    """Of the texts, those that are the JSON of a conversation."""
    literal: int = 0
    """Of the texts, those that are Python's notation of a conversation, as `str` gives it, which no JSON is."""
    foreign: int = 0
    """Conversations whose messages have `from` and `value`, or the roles of `ROLES`."""

    @property
    def chat(self) -> bool:
        """Whether the column holds conversations: what most of its values are, or as many as of texts and the first."""
        return self.lists > self.texts or (self.lists == self.texts > 0 and not self.text_first)


Kinds = dict[str, Kind]
"""By column, in order of appearance."""


def note(kinds: Kinds, row: Mapping[Any, Any]) -> None:
    """Count the values of a row."""
    for name, value in row.items():
        kind = kinds.get(name)
        if kind is None:
            kind = kinds[name] = Kind()
        if isinstance(value, str):
            kind.text_first |= kind.texts == kind.lists == 0
            kind.texts += 1
            if name in CONVERSATIONS and (messages := conversation_in(value)) is not None:
                kind.written += 1
                kind.foreign += is_foreign(messages)
            elif name in CONVERSATIONS:
                kind.literal += is_literal(value)
        elif isinstance(value, Sequence | np.ndarray):
            kind.lists += 1
            kind.foreign += name in CONVERSATIONS and is_foreign(value)


def kinds_of(rows: Iterable[Mapping[Any, Any]]) -> Kinds:
    found: Kinds = {}
    for row in rows:
        note(found, row)
    return found


def to_json(kinds: Kinds) -> str:
    return json.dumps([[name, asdict(kind)] for name, kind in kinds.items()])


def from_json(text: str) -> Kinds:
    return {name: Kind(**fields) for name, fields in json.loads(text)}


def conversation_in(text: str) -> list[Any] | None:
    """The conversation whose JSON a text is; None for any other text."""
    start = text[:200].lstrip()
    if not start.startswith("[") or not start[1:].lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if value and all(map(_is_message, value)) else None


def is_literal(text: str) -> bool:
    """Whether a text is the Python notation of messages: single quotes, which CSV files written by pandas have."""
    return text[:2] == "[{" and text[2:8] in ("'role'", "'from'", "'conte") and "}" in text[-9:]


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and ("role" in value or {"from", "value"} <= set(value))


def is_foreign(messages: Any) -> bool:
    """Whether a conversation is written as ShareGPT's are."""
    return any(
        isinstance(message, Mapping)
        and (_has_foreign_keys(message) or (isinstance(role := message.get("role"), str) and role in ROLES))
        for message in messages
    )


def _has_foreign_keys(message: Mapping[Any, Any]) -> bool:
    return "role" not in message and {"from", "value"} <= set(message)


def renamed_message(message: Any) -> Any:
    """A message of ShareGPT's as templates know it; any other value unchanged."""
    if not isinstance(message, Mapping):
        return message
    if _has_foreign_keys(message):
        names = {"from": "role", "value": "content"}
        message = {names.get(key, key): value for key, value in message.items()}
    role = message.get("role")
    return {**message, "role": ROLES[role]} if isinstance(role, str) and role in ROLES else message
