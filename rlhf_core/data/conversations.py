"""Check cells that hold texts or conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_core.data.column_kinds import CONVERSATIONS
from rlhf_core.data.column_mapping import mapping_hint
from rlhf_core.data.source import Source
from rlhf_core.errors import InputError, suggest
from rlhf_core.tokenizer.encoding import Encoder, Turns
from rlhf_core.tokenizer.options import is_parts, kwargs_problem, parts_problem

FOR_TEMPLATES = ("tools", "chat_template_kwargs")
"""Columns of a conversation that go to its chat template."""


def message_problem(value: Any) -> str | None:
    """Describe what is wrong with a conversation, or return None."""
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str | bytes):
        return f"is {type_name(value)}, not a list of messages"
    if not len(value):
        return "is an empty conversation"
    for i, message in enumerate(value, 1):
        if not isinstance(message, Mapping):
            return f"message {i} is {type_name(message)}, not an object with role and content"
        if not isinstance(message.get("role"), str):
            return f"message {i} has no role (its keys: {', '.join(map(str, message)) or 'none'})"
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            return f"message {i} has no content (its keys: {', '.join(map(str, message))})"
        if is_parts(content):
            if problem := parts_problem(content):
                return f"message {i}: {problem}"
        elif content is not None and not isinstance(content, str):
            return f"message {i}'s content is {type_name(content)}, not text"
        calls = message.get("tool_calls")
        if calls is not None and not _is_object_list(calls):
            return f"message {i}'s tool_calls is {type_name(calls)}, not a list of objects"
    return None


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """Read the JSON schemas of the tools that the row's conversation may call, a list or its JSON text.

    Raises InputError for anything else.
    """
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise InputError(
                f"'tools' is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
            ) from error
        except (RecursionError, ValueError) as error:  # nested too deeply, or a number with too many digits
            raise InputError(
                "'tools' cannot be read: it is nested too deeply, or has too long a number"
            ) from error
    if tools is None or isinstance(tools, str):
        return None
    if not _is_object_list(tools):
        raise InputError(f"'tools' is {type_name(tools)}, not a list of objects")
    return list(tools) or None


def kwargs_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read the row's `chat_template_kwargs`, variables for the template: an object or its JSON text.

    Raises InputError for anything else.
    """
    kwargs = row.get("chat_template_kwargs")
    if isinstance(kwargs, str) and kwargs.strip():
        try:
            kwargs = json.loads(kwargs)
        except (ValueError, RecursionError) as error:
            raise InputError(f"'chat_template_kwargs' is not JSON: {kwargs!r}") from error
    if kwargs is None or isinstance(kwargs, str):
        return None
    if problem := kwargs_problem(kwargs):
        raise InputError(f"'chat_template_kwargs' {problem}")
    return dict(kwargs) or None


def _is_object_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray) and all(isinstance(item, Mapping) for item in value)


def type_name(value: Any) -> str:
    """Name a value's type in the terms of a data file."""
    names = {type(None): "null", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    if isinstance(value, Mapping):
        return "an object"
    return names.get(type(value), "a list" if isinstance(value, list | tuple) else type(value).__name__)


def cell_problem(row: Mapping[str, Any], column: str, chat: bool) -> str | None:
    """Describe what is wrong with a cell that must hold a text, or with `chat` a conversation; None if nothing is."""
    value = row.get(column)
    if column not in row:
        return f"has no '{column}' (it has {', '.join(map(str, row)) or 'nothing'})"
    if value is None:
        return f"'{column}' is null"
    if chat:
        problem = message_problem(value)
        return problem and f"'{column}' {problem}"
    return None if isinstance(value, str) else f"'{column}' is {type_name(value)}, not text"


def is_chat(source: Source, column: str) -> bool:
    """Whether a column holds conversations, by `Kind.chat`."""
    return source.kind(column).chat


def require_conversations(sources: Sequence[Source], option: str = "system_prompt") -> None:
    """Raise InputError for sources without conversations, to which a system prompt cannot be added."""
    problems = [
        f"{option}: {source.name} has plain texts, not conversations, and a system message needs a conversation. "
        f'Write the rows as messages, {{"role": "user", "content": …}}, or leave out {option}'
        for source in sources
        if not any(is_chat(source, name) for name in CONVERSATIONS if name in source.columns)
    ]
    if problems:
        raise InputError(*problems)


def skips_template(source: Source, encoder: Encoder | None, *columns: str) -> bool:
    """Whether these columns hold plain texts although the tokenizer has a chat template."""
    if encoder is None or encoder.template is None or not set(columns) <= set(source.columns):
        return False
    return not any(is_chat(source, name) for name in columns)


def is_blank(turns: Turns) -> bool:
    """Whether a completion, or the last turn of one, is only white space."""
    if isinstance(turns, str):
        return not turns.strip()
    last = turns[-1] if len(turns) else {}
    return not (last.get("content") or "").strip() and not last.get("tool_calls")


def is_answered(turns: Turns) -> bool:
    """Whether a conversation has an assistant turn; texts count as answered."""
    return isinstance(turns, str) or any(turn["role"] == "assistant" for turn in turns)


def unanswered_problem(row: Mapping[str, Any], column: str, purpose: str = "judged") -> str | None:
    """Describe a conversation without an assistant turn as a problem, or return None."""
    if is_answered(row[column]):
        return None
    roles = ", ".join(dict.fromkeys(turn["role"] for turn in row[column]))
    return f"'{column}' has no assistant turn, the reply to be {purpose} (its roles: {roles})"


def missing_columns(
    source: Source, wanted: Sequence[str], accepted: str, *formats: tuple[str, ...]
) -> InputError:
    """Make the error for missing columns. accepted: the formats that would work. formats: as in `mapping_hint`."""
    columns = source.columns
    absent = [column for column in wanted if column not in columns]
    hints = mapping_hint(source, *formats) or "".join(suggest(column, columns) for column in absent)
    listed = ", ".join(f"'{column}'" for column in absent)
    return InputError(
        f"{source.name} has no column {listed}; it has {', '.join(columns)}.{hints} Accepted: {accepted}"
    )


def require_template(source: Source, encoder: Encoder) -> None:
    """Raise InputError if the tokenizer has no valid chat template for the source's conversations."""
    if encoder.template is None:
        raise InputError(
            f"{source.name} has conversations, and the tokenizer has no chat template: set "
            'chat_template = "plain" or a template file, or put chat_template.jinja beside the tokenizer\'s files'
        )
    if problem := encoder.chat.problem():
        raise InputError(problem)
