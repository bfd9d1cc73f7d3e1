"""The JSON of answers, and of errors, which clients read as servers write it."""

from __future__ import annotations

import sys
from subprocess import run
from typing import Any

import pytest
from rlhf_http.answers import chat_completion, error_body, error_message, finish_reason, usage


def test_an_error_is_read_as_it_is_written() -> None:
    body = error_body("no such model", 404, "NotFoundError", "model")
    assert body == {
        "error": {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}
    }
    assert error_message(body) == "no such model"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": "busy"}, "busy"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"message": "m"}, "m"),
        ("text", "text"),
        ({"error": {"code": 3}}, None),
        ({"detail": [{"loc": ["body"]}]}, None),
        (3, None),
    ],
)
def test_errors_of_other_servers(body: Any, message: str | None) -> None:
    assert error_message(body) == message


def test_a_chat() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "0"}]}
    assert finish_reason("stop", called) == "tool_calls"
    assert finish_reason("length", called) == "length"
    assert finish_reason("stop", {"content": "a"}) == "stop"
    answer = chat_completion("c", 7, "policy", [{"index": 0}], usage(3, 4))
    assert answer == {
        "id": "c",
        "object": "chat.completion",
        "created": 7,
        "model": "policy",
        "choices": [{"index": 0}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }


def test_answers_need_no_server() -> None:
    """A client imports them without what a server needs."""
    code = (
        "import sys, rlhf_http.answers; print({'starlette', 'uvicorn', 'pydantic', 'jax'} & set(sys.modules))"
    )
    done = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
