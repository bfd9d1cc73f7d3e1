"""Objects that chat templates write and that data may hold as JSON text: calls' arguments and tools' parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.errors import InputError, library_words
from rlhf_core.tokenizer.options import text_problem


def with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parse the arguments of a message's tool calls, where they are JSON text as in OpenAI's API.

    Empty text and null are no arguments, {}. Returns the message itself if there is nothing to parse. Raises InputError
    for arguments that are no JSON object.
    """
    calls = message.get("tool_calls")
    if calls is None or not len(calls):
        return message
    parsed = [_with_parsed(call, f"tool call {number}", "arguments") for number, call in enumerate(calls, 1)]
    if all(new is old for new, old in zip(parsed, calls, strict=True)):
        return message
    return {**message, "tool_calls": parsed}


def with_parsed_parameters(tools: Sequence[Any]) -> list[Any]:
    """Parse the parameters of tools, where they are JSON text. Raises InputError for those that are no JSON object."""
    return [_with_parsed(tool, f"tool {number}", "parameters") for number, tool in enumerate(tools, 1)]


def arguments_problem(message: Mapping[str, Any]) -> str | None:
    """Describe the first tool call of a message whose arguments are no JSON object, or return None."""
    try:
        with_parsed_arguments(message)
    except InputError as error:
        return str(error)
    return None


def _with_parsed(item: Any, place: str, field: str) -> Any:
    """Parse a field of an item, or of its `function`; return the item itself if there is nothing to parse."""
    if not isinstance(item, Mapping):
        return item
    function = item.get("function")
    if isinstance(function, Mapping):
        parsed = _with_parsed(function, f"{place}'s function", field)
        return item if parsed is function else {**item, "function": parsed}
    if field not in item or isinstance(item[field], Mapping):
        return item
    return {**item, field: _object(item[field], f"the {field} of {place}")}


def _object(value: Any, what: str) -> Mapping[str, Any]:
    """Read an object, or its JSON text. Raises InputError, which says what it is and what it should be."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    problem = "are not an object"
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_constant=_refuse_constant)
            unpaired = text_problem(json.dumps(value, ensure_ascii=False))
            problem = f"cannot be read: its text {unpaired}" if unpaired else problem
        except json.JSONDecodeError as error:
            problem = f"are not JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}"
        except RecursionError:
            problem = "are nested too deeply"
        except ValueError as error:
            problem = f"cannot be read: {library_words(error)}"
    if problem != "are not an object" or not isinstance(value, Mapping):
        raise InputError(f'{what} {problem}; give an object such as {{"x": 1}}, or its JSON text')
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
