"""One server for all tests of a module, in a thread of this process, with a tiny policy and a tiny reward model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from rlhf_serve.connections import Connection
from rlhf_serve.opening import Opening, open_model
from rlhf_serve.running import Settings, application, make_server

SLOTS, LENGTH = 32, 96
CHAT = (
    "{%- if tools %}T {% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{%- for message in messages %}{% if message.role == 'user' %}Q {% else %}A {% endif %}"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "{% if message.role != 'user' %}</s>{% endif %} {% endfor %}{% if add_generation_prompt %}A {% endif %}"
)
"""A chat template that writes tool calls as Hermes and Qwen do."""


class Running:
    """A server in a thread, and a client of it."""

    def __init__(
        self, models: dict[str, Any], settings: Settings, key: str | None = None, opening: Any = None
    ) -> None:
        self.server = make_server(models, settings, key)
        app = application(self.server, settings, opening or Opening())
        config = uvicorn.Config(app, port=0, log_config=None, lifespan="on", http=Connection)
        self.web = uvicorn.Server(config)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.web.serve()), daemon=True)
        self.thread.start()
        while not self.web.started:
            assert self.thread.is_alive()
        port = self.web.servers[0].sockets[0].getsockname()[1]
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, headers=headers)

    def post(self, path: str, body: Any) -> Any:
        """Post a body, which must be answered."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, body: Any, status: int = 400) -> str:
        """Post a body, which must be refused; return why."""
        answer = self.client.post(path, **({"content": body} if isinstance(body, bytes) else {"json": body}))
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        message: str = error["message"]
        return message

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Post a body and return the events of the stream that answers it."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def close(self) -> None:
        self.client.close()
        self.web.should_exit = True
        self.thread.join()


@pytest.fixture(scope="module")
def directory(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    policy, reward = tiny.make_model(scale=8), tiny.make_model("score", scale=8)
    for model in (policy, reward):
        model.tokenizer.chat_template = CHAT
    policy.save(path / "policy")
    reward.save(path / "rm")
    return path


@pytest.fixture(scope="module")
def opened(tiny: Any, directory: Path) -> dict[str, Any]:
    # On one device, to compile less; the reward model on all, as commands are.
    policy = Opening(slots=SLOTS, length=LENGTH, mesh=tiny.one_device())
    return {
        name: open_model(name, str(directory / name), opening)
        for name, opening in (("policy", policy), ("rm", Opening()))
    }


@pytest.fixture(scope="module")
def running(opened: dict[str, Any]) -> Iterator[Running]:
    running = Running(opened, Settings(models=()))
    yield running
    running.close()
