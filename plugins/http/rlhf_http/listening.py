"""The address and the key of a server, and a web server inside a loop of another's, from its beginning to its end."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from rlhf_core.errors import InputError
from rlhf_core.hidden import remember
from rlhf_http.connections import Connection

CLOSE_SECONDS = 1.0
"""How long a client may take to read what was written to it when the server ends."""


def read_key(name: str | None) -> str | None:
    """Read the key that clients send. Raises InputError where the variable has none."""
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise InputError(f"--api-key-env {name}: the environment has no {name}, or it is empty")
    if not key.isascii() or any(c.isspace() for c in key):
        raise InputError(f"--api-key-env {name}: the key must be ASCII without white space")
    return remember(key)


def listen(host: str, port: int) -> socket.socket:
    """Take the address before models are loaded. Raises InputError where it is taken."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        raise InputError(f"--host {host} --port {port}: {error.strerror or error}; give another") from None
    return listener


class WebServer(uvicorn.Server):
    """uvicorn's server, without its handlers of signals, which would end the process by the signal again."""

    @classmethod
    def of(cls, app: Any) -> WebServer:
        """Make the server of an ASGI application, with limits on what clients may send."""
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="on", timeout_keep_alive=75, http=Connection
        )
        return cls(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield


async def close(web: WebServer, serving: asyncio.Future[None]) -> None:
    """End the server. Clients have `CLOSE_SECONDS` to take what was written to them; then they are cut off."""
    web.should_exit = True
    await asyncio.wait((serving,), timeout=CLOSE_SECONDS)
    if not serving.done():
        for connection in list(web.server_state.connections):
            connection.transport.abort()
        for task in list(web.server_state.tasks):
            task.cancel()
    await serving
