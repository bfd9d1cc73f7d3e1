"""What a cell may hold: a text or a conversation. Checks that every kind of data shares."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_core.data.source import Source
from rlhf_core.data.unicode import text_problem
from rlhf_core.errors import InputError, suggest
from rlhf_core.tokenizer.encoding import Encoder, Turns
from rlhf_core.tokenizer.text_options import kwargs_problem


def message_problem(value: Any) -> str | None:
    """What is wrong with a conversation, or None."""
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str | bytes):
        return f"is {kind(value)}, not a list of messages"
    if not len(value):
        return "is an empty conversation"
    for i, message in enumerate(value, 1):
        if not isinstance(message, Mapping):
            return f"message {i} is {kind(message)}, not an object with role and content"
        if not isinstance(message.get("role"), str):
            return f"message {i} has no role (its keys: {', '.join(map(str, message)) or 'none'})"
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            return f"message {i} has no content (its keys: {', '.join(map(str, message))})"
        if content is not None and not isinstance(content, str):
            hint = "; join its parts to one text" if isinstance(content, list | tuple) else ""
            return f"message {i}'s content is {kind(content)}, not text{hint}"
        if content and (problem := text_problem(content)):
            return f"message {i}'s content {problem}"
        calls = message.get("tool_calls")
        if calls is not None and not _objects(calls):
            return f"message {i}'s tool_calls is {kind(calls)}, not a list of objects"
    return None


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """The tools that the row's conversation may call, as JSON schemas: a list of them, or its JSON text.

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
        except (RecursionError, ValueError) as error:  # nested too deeply, a number of too many digits
            raise InputError(
                "'tools' cannot be read: it is nested too deeply, or has too long a number"
            ) from error
    if tools is None or isinstance(tools, str):
        return None
    if not _objects(tools):
        raise InputError(f"'tools' is {kind(tools)}, not a list of objects")
    return list(tools) or None


def kwargs_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The row's `chat_template_kwargs`, variables for the template: an object, or its JSON text.

    Raises InputError for anything else.
    """
    given = row.get("chat_template_kwargs")
    if isinstance(given, str) and given.strip():
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InputError(f"'chat_template_kwargs' is not JSON: {given!r}") from error
    if given is None or isinstance(given, str):
        return None
    if problem := kwargs_problem(given):
        raise InputError(f"'chat_template_kwargs' {problem}")
    return dict(given) or None


def _objects(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray) and all(isinstance(item, Mapping) for item in value)


def kind(value: Any) -> str:
    """A value's type in the words of a data file."""
    names = {type(None): "null", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    if isinstance(value, Mapping):
        return "an object"
    return names.get(type(value), "a list" if isinstance(value, list | tuple) else type(value).__name__)


def cell_problem(row: Mapping[str, Any], column: str, chat: bool) -> str | None:
    """What is wrong with a cell that must hold a text, or (chat) a conversation; None where nothing is."""
    value = row.get(column)
    if column not in row:
        return f"has no '{column}' (it has {', '.join(map(str, row)) or 'nothing'})"
    if value is None:
        return f"'{column}' is null"
    if chat:
        problem = message_problem(value)
        return problem and f"'{column}' {problem}"
    if not isinstance(value, str):
        return f"'{column}' is {kind(value)}, not text"
    problem = text_problem(value)
    return problem and f"'{column}' {problem}"


def is_chat(source: Source, column: str) -> bool:
    """Whether a column holds conversations: what most of its values are, or as many as of texts and the first."""
    return source.kind(column).chat


def skips_template(source: Source, encoder: Encoder | None, *columns: str) -> bool:
    """Whether these columns hold plain texts, although the tokenizer has a chat template."""
    if encoder is None or encoder.template is None or not set(columns) <= set(source.columns):
        return False
    return not any(is_chat(source, name) for name in columns)


def is_blank(turns: Turns) -> bool:
    """Whether a completion says nothing: white space, or a last turn of it."""
    if isinstance(turns, str):
        return not turns.strip()
    last = turns[-1] if len(turns) else {}
    return not (last.get("content") or "").strip() and not last.get("tool_calls")


def is_answered(turns: Turns) -> bool:
    """Whether somebody answers in a conversation."""
    return isinstance(turns, str) or any(turn["role"] == "assistant" for turn in turns)


def unanswered(row: Mapping[str, Any], column: str, purpose: str = "judged") -> str | None:
    """What is wrong with a conversation in which nobody answers, or None."""
    if is_answered(row[column]):
        return None
    roles = ", ".join(dict.fromkeys(turn["role"] for turn in row[column]))
    return f"'{column}' has no assistant turn, the reply to be {purpose} (its roles: {roles})"


def missing(source: Source, wanted: Sequence[str], accepted: str) -> InputError:
    """The error for columns that are not there. `accepted`: the formats that would do."""
    have = source.columns
    absent = [column for column in wanted if column not in have]
    hints = "".join(suggest(column, have) for column in absent)
    columns = ", ".join(f"'{column}'" for column in absent)
    return InputError(
        f"{source.name} has no column {columns}; it has {', '.join(have)}.{hints} Accepted: {accepted}"
    )


def require_template(source: Source, encoder: Encoder) -> None:
    """Raise InputError where conversations meet a tokenizer without a chat template."""
    if encoder.template is None:
        raise InputError(
            f"{source.name} has conversations, and the tokenizer has no chat template: set "
            'chat_template = "plain", or give a template file'
        )
    if problem := encoder.chat.problem():
        raise InputError(problem)
