"""A server in a thread of this process, and a client of it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from rlhf_http.connections import Connection
from rlhf_serve.running import Opening, ServeSettings, application, make_server, open_model


class Running:
    """A server in a thread, and a client of it."""

    def __init__(
        self, models: dict[str, Any], settings: ServeSettings, key: str | None = None, opening: Any = None
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


def opened(path: Path, **opening: Any) -> Any:
    """Open a model as a server does."""
    return open_model(path.name, str(path), Opening(**opening))


def serve(
    models: Mapping[str, Any],
    key: str | None = None,
    opening: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Running:
    """Serve models, opened or in directories. opening: how; settings: as the command takes them."""
    how = Opening(**(opening or {}))
    served = {
        name: open_model(name, str(model), how) if isinstance(model, Path) else model
        for name, model in models.items()
    }
    return Running(served, ServeSettings(models=(), **settings), key, how)
