"""The JSON of answers, as OpenAI's and vLLM's clients expect it. Needs no server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def error_body(
    message: str, status: int, kind: str = "invalid_request_error", param: str | None = None
) -> dict[str, Any]:
    """Write an error. kind: its type. param: the field at fault."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_message(body: Any) -> str | None:
    """Read the message of an error, of these servers or others; None where there is none."""
    for key in ("error", "message", "detail"):
        body = body.get(key, body) if isinstance(body, Mapping) else body
    return body if isinstance(body, str) else None


def usage(read: int, written: int) -> dict[str, int]:
    """Write how many tokens the prompts and the completions of a request have."""
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def finish_reason(reason: str | None, message: Mapping[str, Any]) -> str | None:
    """Say why a chat's message ended. reason: of the completion; "stop" is "tool_calls" where the message has calls."""
    return "tool_calls" if message.get("tool_calls") and reason == "stop" else reason


def chat_completion(
    name: str, created: int, model: str, choices: Sequence[Mapping[str, Any]], used: Mapping[str, int]
) -> dict[str, Any]:
    """Write the answer to a request for a chat's next message. name: of the request. used: as `usage` writes it."""
    return {
        "id": name,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": list(choices),
        "usage": dict(used),
    }
