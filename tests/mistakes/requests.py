"""Requests that a server refuses: the status, the kind of error, the field, and what is said."""

from __future__ import annotations

import atexit
import json
from typing import Any

from rlhf_core.errors import InputError
from tests.mistakes.mistake import Mistake, call
from tests.shared import serving

RUNNING: list[serving.Running] = []
"""One server answers all requests; its models stay in memory when the place is made anew."""
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a b"}]


def running(place: Any) -> serving.Running:
    if not RUNNING:
        models = {"policy": place.path / "model", "rm": place.path / "scorer"}
        RUNNING.append(serving.serve(models, opening={"slots": 4, "length": 64, "chat_template": "plain"}))
        atexit.register(RUNNING[0].close)
    return RUNNING[0]


def post(path: str, body: Any, name: str = "") -> Mistake:
    """A request; a body of bytes is sent as it is."""

    def ask(place: Any) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = running(place).client.post(path, content=content)
        assert answer.status_code >= 400, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        raise InputError(f"{answer.status_code} {error['type']}, {error['param']}: {error['message']}")

    return call(f"POST {path} {name or json.dumps(body)}", ask)


def completion(**fields: Any) -> Mistake:
    return post(COMPLETIONS, {"model": "policy", "prompt": "a", **fields})


def chat(**fields: Any) -> Mistake:
    return post(CHATS, {"model": "policy", "messages": MESSAGES, **fields})


def called(arguments: str) -> Mistake:
    function = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return chat(messages=[*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [function]}])


def score(**fields: Any) -> Mistake:
    return post("/score", {"model": "rm", **fields})


SECTIONS = {
    "Requests for completions": [
        post(COMPLETIONS, {"model": "policy"}),
        completion(temprature=1),
        completion(int=1),
        post(COMPLETIONS, {"model": "policy", "prompt": "a", "list[int]": 1}),
        completion(n=10**6),
        post(COMPLETIONS, b'{"model": "policy", "prompt": "a", "temperature": NaN}', "with NaN"),
        post(COMPLETIONS, b'{"model": "policy", "prompt": "\\ud800"}', "with half a character"),
        post(COMPLETIONS, b"[" * 100_000, "with 100,000 brackets"),
        post(COMPLETIONS, [1]),
        completion(prompt=[4, 999]),
        post(COMPLETIONS, {"model": "policy", "prompt": [4] * 1_000_000}, "with a million tokens"),
        post(
            COMPLETIONS, {"model": "policy", "prompt": [4] * 60, "max_tokens": 7}, "with 60 tokens and 7 more"
        ),
        completion(prompt=[]),
        completion(prompt=[1, -1]),
        completion(max_tokens=0),
        completion(stop_token_ids=[999]),
        post(COMPLETIONS, {"model": "policy", "prompt": "a", "stop": ["x"] * 17}, "with 17 stop strings"),
        completion(stop=["x", 1]),
        post(
            COMPLETIONS,
            {"model": "policy", "prompt": "a", "x" * 2**20: 1},
            "with a field of a million characters",
        ),
        post(COMPLETIONS, {"model": "policy", "prompt": ["a"] * 1025}, "with 1,025 prompts"),
        completion(presence_penalty=0.5),
        completion(best_of=3),
        completion(model="polcy"),
        post("/v1/completion", {}),
        post("/detokenize", {"model": "policy", "tokens": [1, 999]}),
    ],
    "Requests for chats": [
        called("a"),
        called("[1]"),
        chat(tools=[{"function": {"name": "f", "parameters": "[]"}}]),
        chat(tools=[{"name": "f"}]),
        chat(tool_choice="required", tools=[{"type": "function", "function": {"name": "f"}}]),
        chat(messages=[]),
        chat(messages=[{"content": "a"}]),
        chat(messages=[{"role": "users", "content": "a"}]),
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        chat(response_format={"type": "json_object"}),
        chat(top_logprobs=3),
        chat(model="rm"),
    ],
    "Requests for scores": [
        score(rows=[]),
        score(),
        score(text_1=["a", "b"], text_2=["c", "d", "e"]),
        score(rows=[{"prompt": "a", "completion": " b"}, {"prompt": "a", "completion": 5}]),
        score(rows=[{"text_9": "a"}]),
        score(rows=[{"messages": [{"role": "user", "text": "a"}]}]),
        score(model="policy", rows=[{"prompt": "a", "completion": " b"}]),
    ],
}
