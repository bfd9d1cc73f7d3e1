"""Clients that vanish, are slow, send too much, have no key or send nonsense; and a server that is told to stop."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from rlhf_http import connections, handling, listening
from rlhf_serve import app, commands
from rlhf_serve import running as closing

from tests.shared import serving


def idle(running: Any) -> None:
    """Wait until nothing is sampled."""
    while any(policy.running or policy.incoming for policy in running.server.engine.policies):
        time.sleep(0.01)


def raw(running: Any, content: bytes) -> socket.socket:
    """Send bytes over a connection of their own."""
    address = (running.client.base_url.host, running.client.base_url.port)
    connection = socket.create_connection(address, timeout=60)
    connection.sendall(content)
    return connection


def posted(body: Any, path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


LONG = {"model": "policy", "prompt": [5, 6], "max_tokens": 90, "ignore_eos": True}


@pytest.mark.parametrize("stream", [True, False])
def test_what_a_client_that_vanishes_held_is_free_again(running: Any, stream: bool) -> None:
    policy = running.server.engine.policies[0]
    running.server.engine.frozen = True  # so that it vanishes before the end
    connections = [raw(running, posted({**LONG, "n": 8, "stream": stream})) for _ in range(6)]
    while len(policy.incoming) + len(policy.running) < 48:
        time.sleep(0.01)
    for connection in connections:
        connection.close()
    while running.server.calls:
        time.sleep(0.01)
    running.server.engine.frozen = False
    running.server.engine._wake.set()
    idle(running)
    assert not policy.schedule.slots.active.any()
    assert policy.schedule.holders == [None] * 32
    running.post("/v1/completions", {**LONG, "max_tokens": 2})


def test_slow_and_large_bodies(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handling, "BODY_SECONDS", 0.2)
    slow = raw(running, posted(LONG)[:-5])
    assert slow.recv(100).startswith(b"HTTP/1.1 408")
    monkeypatch.undo()
    text = "a b c " * (app.LARGE // 4)
    assert "the prompt has" in running.refused("/v1/completions", {"model": "policy", "prompt": text})
    monkeypatch.setattr(handling, "MOST_BYTES", 1000)
    assert "more than 1,000 bytes" in running.refused(
        "/v1/completions", {"model": "policy", "prompt": text}, 413
    )


HEADERS = [
    b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 70_000,
    b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 70_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x: a\r\n" * 40_000,
    b"GET /" + b"a" * 70_000,
    b"POST /score HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: " + b"a" * 300_000,
]


@pytest.mark.parametrize("content", HEADERS, ids=["a part", "one", "many", "an address", "a trailer"])
def test_headers_have_a_size(content: bytes, running: Any) -> None:
    answer = received(raw(running, content))
    assert answer.startswith(b"HTTP/1.1 431")
    assert b"65,536 bytes" in answer


def test_headers_have_a_time(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.2)
    begun, silent = raw(running, posted(LONG)[:30]), raw(running, b"")
    assert b"the headers did not arrive" in received(begun)
    assert received(silent) == b""
    # Neither the answer to one request nor the time before the next one counts.
    body = {"model": "policy", "prompt": "a", "max_tokens": 1}
    monkeypatch.setattr(running.server.engine, "frozen", True)
    kept = raw(running, posted(body))
    time.sleep(0.5)
    monkeypatch.setattr(running.server.engine, "frozen", False)
    running.server.engine._wake.set()
    answer = b""
    while b'"usage"' not in answer:
        answer += kept.recv(10_000)
    time.sleep(0.5)
    kept.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert received(kept).startswith(b"HTTP/1.1 200")


def received(connection: socket.socket) -> bytes:
    """Read until the server ends a connection."""
    with connection:
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
        return b"".join(parts)


def test_clients_that_do_not_read_cannot_keep_a_server_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "CLOSE_SECONDS", 0.2)
    server = closing.make_server({}, closing.ServeSettings(models=()))
    server.draining = True

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"a" * 2**16, "more_body": True})

    async def stuck(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    endless.routes = stuck.routes = []  # type: ignore[attr-defined]

    async def main(application: Any) -> None:
        counting = app.Counting(application, server)
        config = uvicorn.Config(
            counting, port=0, log_config=None, lifespan="off", http=connections.Connection
        )
        web = listening.WebServer(config)
        serving = asyncio.ensure_future(web.serve())
        while not web.started:
            await asyncio.sleep(0.01)
        address = web.servers[0].sockets[0].getsockname()
        with socket.create_connection(address) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            while not server.requests:
                await asyncio.sleep(0.01)
            async with asyncio.timeout(10):
                await listening.close(web, serving)

    for application in (endless, stuck):
        asyncio.run(main(application))
    assert server.requests == 0


def test_too_much_at_a_time(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.server, "most_waiting", 10)
    monkeypatch.setattr(running.server.engine, "frozen", True)
    thread = threading.Thread(
        target=lambda: running.post("/v1/completions", {**LONG, "n": 8, "max_tokens": 2})
    )
    thread.start()
    while not running.server.calls:
        time.sleep(0.01)
    answer = running.client.post("/v1/completions", json={**LONG, "n": 3})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["type"] == "overloaded_error"
    assert "of one request" in running.refused("/v1/completions", {**LONG, "n": 11})
    filling = threading.Thread(
        target=lambda: running.post("/v1/completions", {**LONG, "n": 2, "max_tokens": 2})
    )
    filling.start()  # exactly as many as may wait
    while len(running.server.calls) < 2:
        assert filling.is_alive()
    monkeypatch.undo()
    running.server.engine._wake.set()
    thread.join()
    filling.join()


def test_a_server_that_stops_takes_nothing_new(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.server, "draining", True)
    assert running.refused("/v1/completions", LONG, 503) == "the server is stopping"


def test_a_stream_to_nobody_is_not_made() -> None:
    made: list[int] = []

    async def parts() -> AsyncIterator[int]:
        for number in range(1000):
            made.append(number)
            yield number

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass  # as to a connection that is closed: nothing is waited for

    class Call:
        completions = prompts = ()
        target, began = SimpleNamespace(name="policy"), 0.0

    call: Any = Call()
    server = closing.make_server({}, closing.ServeSettings(models=()))
    asyncio.run(app.Flow(server, call, parts())({}, receive, send))
    assert len(made) < 10


def test_the_gate_is_before_the_server(running: Any, opened: dict[str, Any]) -> None:
    """What it lets pass: tests/plugins/http/test_gate.py."""
    locked = serving.serve({"rm": opened["rm"]}, "the key")
    with httpx.Client(base_url=locked.client.base_url) as stranger:
        for path in ("/v1/models", "/metrics", "/version", "/score", "/nothing"):
            assert stranger.get(path).status_code == 401
        assert stranger.get("/health").status_code == 200
    assert locked.client.get("/v1/models").json()["data"][0]["id"] == "rm"
    locked.close()
    page = {"origin": "http://evil.example"}
    assert running.client.post("/v1/completions", content=b"{}", headers=page).status_code == 403


def nonsense(draw: random.Random, depth: int = 0) -> Any:
    """Make a JSON value of any kind."""
    kinds = [
        lambda: draw.choice([None, True, False, 0, -1, 1e308, -0.0, 2**63, 10**30, 0.5]),
        lambda: draw.choice(["", "a", "policy", "\u0000", "é😀", "a b " * draw.randrange(50), "\\ud800"]),
        lambda: draw.randrange(-5, 60),
        lambda: [nonsense(draw, depth + 1) for _ in range(draw.randrange(4))],
        lambda: {draw.choice("abcd"): nonsense(draw, depth + 1) for _ in range(draw.randrange(3))},
    ]
    return draw.choice(kinds[: 3 if depth > 3 else 5])()


def fuzzed(draw: random.Random) -> tuple[str, bytes]:
    """Make a request: mostly a good one of which something is changed."""
    message = {"role": "user", "content": "a b"}
    prompts: list[Any] = ["a b c", [5, 6, 7], [[5], [6, 7]], ["a", "b c"]]
    good: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": draw.choice(prompts), "max_tokens": draw.randrange(1, 6)}),
        ("/v1/chat/completions", {"messages": [message], "max_tokens": 3, "stream": draw.random() < 0.3}),
        ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}),
        ("/score", {"model": "rm", "rows": [{"prompt": "a", "completion": " b"}]}),
        ("/classify", {"model": "rm", "input": "a b"}),
        ("/tokenize", {"prompt": "a b"}),
        ("/detokenize", {"tokens": [3, 4]}),
    ]
    path, body = draw.choice(good)
    body = {"model": "policy", **body}
    names = [
        *("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "logprobs"),
        *("stream", "echo", "prompt", "messages", "tools", "model", "rows", "input", "tokens", "prompt_logprobs"),
        *("stream_options", "tool_choice", "logit_bias", "response_format", "sampling_params", "text_1", "x"),
    ]  # fmt: skip
    for _ in range(draw.randrange(3)):
        name = draw.choice(names)
        body[name] = nonsense(draw)
        if draw.random() < 0.2:
            del body[draw.choice(list(body))]
    content = json.dumps(body).encode()
    if draw.random() < 0.1:
        at = draw.randrange(len(content))
        content = content[:at] + bytes([draw.randrange(256)]) + content[at + draw.randrange(2) :]
    return path, content


@pytest.mark.parametrize(
    "count", [150, pytest.param(10_000, marks=[pytest.mark.exhaustive, pytest.mark.long])]
)
def test_fuzzed_requests_are_answered_or_refused(count: int, running: Any) -> None:
    draw, seen = random.Random(count), Counter[int]()
    for _ in range(count):
        path, content = fuzzed(draw)
        answer = running.client.post(path, content=content)
        seen[answer.status_code] += 1
        assert answer.status_code in (200, 400, 404), (path, content, answer.text)
        assert "Traceback" not in answer.text
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, content
        assert "server_error" not in answer.text, (path, content, answer.text)
    assert min(seen[200], seen[400]) > count / 10
    idle(running)


@pytest.mark.long
def test_a_server_that_is_told_to_stop(directory: Path) -> None:
    def start(*flags: str) -> tuple[subprocess.Popen[str], str]:
        arguments = ["serve", f"policy={directory / 'policy'}", "--port", "0", "--slots", "4", *flags]
        made = subprocess.Popen(
            [sys.executable, "-m", "rlhf_core.cli", *arguments], stderr=subprocess.PIPE, text=True
        )
        assert made.stderr is not None
        for line in made.stderr:
            if line.startswith("serving policy on "):
                return made, line.split()[-1]
        raise AssertionError(made.wait())

    server, url = start("--max-model-len", "96")
    whole: list[Any] = []
    body = {**LONG, "n": 40}
    thread = threading.Thread(
        target=lambda: whole.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))
    )
    thread.start()
    while "rlhf_completions_running 4.0" not in httpx.get(f"{url}/metrics").text:
        time.sleep(0.01)
    server.send_signal(signal.SIGTERM)
    thread.join()
    said = server.communicate(timeout=60)[1]
    assert server.returncode == 0, said
    assert [len(choice["text"].split()) > 0 for choice in whole[0].json()["choices"]] == [True] * 40
    assert "stopping (SIGTERM): 1 request in flight has 30 s to end" in said
    assert "stopped: 1 request ended" in said

    server, url = start("--drain-seconds", "0")
    thread = threading.Thread(
        target=lambda: whole.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))
    )
    thread.start()
    while "rlhf_completions_running 4.0" not in httpx.get(f"{url}/metrics").text:
        time.sleep(0.01)
    server.send_signal(signal.SIGTERM)
    said = server.communicate(timeout=60)[1]
    thread.join()
    assert server.returncode == 0, said
    assert "abort" in {choice["finish_reason"] for choice in whole[1].json()["choices"]}
    assert "1 was cut off" in said


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("2.5", 2.5), ("30s", 30.0), ("1m30s", 90.0)])
def test_the_time_to_drain_is_seconds_or_a_duration(text, seconds):
    assert commands._drain_seconds(text) == seconds
