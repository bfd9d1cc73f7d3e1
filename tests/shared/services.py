"""A service on this machine whose answers a test writes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Service:
    """Answers POST requests with `reply(body)`, GET requests with `models`.

    reply returns JSON, or (status, JSON or bytes, headers). requests: (path, authorization, body) of each POST, in the
    order of arrival. gets: paths.
    """

    def __init__(self, reply: Callable[[Any], Any]) -> None:
        self.reply = reply
        self.requests: list[tuple[str, str | None, Any]] = []
        self.gets: list[str] = []
        self.models: Any = {"data": [{"id": "gpt-9.5"}]}
        self.server: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@contextmanager
def serve(reply: Callable[[Any], Any], port: int = 0) -> Iterator[Service]:
    """Run a service until the block ends."""
    service = Service(reply)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            service.gets.append(self.path)
            self.answer(service.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            service.requests.append((self.path, self.headers.get("authorization"), body))
            self.answer(service.reply(body))

        def answer(self, given: Any) -> None:
            status, content, headers = given if isinstance(given, tuple) else (200, given, {})
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"content-length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """Print nothing of a client that did not wait."""

    service.server = Server(("127.0.0.1", port), Handler)
    thread = threading.Thread(
        target=service.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield service
    finally:
        service.server.shutdown()
        service.server.server_close()
