"""Requests over HTTP: their limits on time and size, and the JSON of their answers."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from rlhf_remote import service as sending
from rlhf_remote.transport import Answer, AnswerError, Client, send_once

from tests.shared import services

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@contextmanager
def server(*parts: bytes, every: float = 0.0) -> Iterator[str]:
    """Answer each request with parts, one `every` so many seconds, the last one again and again."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
            for part in parts:
                connection.sendall(part)
                time.sleep(every)
            while every:
                connection.sendall(parts[-1])
                time.sleep(every)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=answer, args=[connection], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/route"
    finally:
        listening.close()


@pytest.mark.parametrize(
    "parts", [[HEAD, b"x"], [HEAD + b"content-length: 1000\r\n\r\n", b" "]], ids=["headers", "body"]
)
def test_time_is_limited_for_the_whole_request(parts: list[bytes]) -> None:
    """Though the next byte is never long in coming."""
    with server(*parts, every=0.02) as url:
        began = time.monotonic()
        with pytest.raises(AnswerError, match=rf"^{url}: no answer within 0.2 s$"):
            send_once("GET", url, {}, seconds=0.2)
        assert 0.15 < time.monotonic() - began < 2


@pytest.mark.parametrize("packed", [False, True])
def test_no_more_is_read_than_the_limit(packed: bool) -> None:
    """Nor of a small answer that unpacks to a large one."""
    body = b"[" + b" " * 3_000_000
    body = gzip.compress(body) if packed else body
    head = HEAD + (b"content-encoding: gzip\r\n" if packed else b"") + b"transfer-encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%s\r\n" % (len(body), body)
    with (
        server(head, chunk, b"", every=0.01) as url,
        pytest.raises(AnswerError, match=f"^{url}: the answer has more than 3,000,000 bytes$"),
    ):
        send_once("GET", url, {}, seconds=20, most_bytes=3_000_000)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>no</html>", "the answer is not JSON: <html>no</html>"),
        (b"\xff\xfe\xfd", "the answer cannot be read: "),
        (b"[" * 100_000, "the answer is JSON that is nested too deeply"),
        (b"[%s]" % (b"9" * 400), "the answer cannot be read: it has an integer of 400 digits"),
        (b"[%s]" % (b"9" * 9000), "the answer cannot be read: it has an integer of 9,000 digits"),
    ],
)
def test_json_that_cannot_be_worked_with(body: bytes, said: str) -> None:
    with pytest.raises(AnswerError, match=f"^http://engine/route: {said}"):
        Answer("http://engine/route", 200, httpx.Headers(), body).json()


def test_threads_share_a_client() -> None:
    with services.serve(lambda body: body + 1) as service:
        client, url = Client({}), service.url
        with ThreadPoolExecutor(4) as threads:
            sent = threads.map(lambda i: client.send("POST", url, b"%d" % i, seconds=20), range(8))
            assert [answer.json() for answer in sent] == list(range(1, 9))
    with pytest.raises(AnswerError, match=f"^{url}: Connection refused$"):
        client.send("POST", url, b"1", seconds=20)


@pytest.mark.parametrize("score", ["1.5", True, [1.0], {}, float("nan"), float("inf")])
def test_scores_are_numbers(score: Any) -> None:
    with pytest.raises(ValueError, match="data with the scores of 2 rows"):
        sending.row_scores(2, {"data": [{"index": 0, "score": 1}, {"index": 1, "score": score}]})


def test_a_failed_request_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(sending, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    monkeypatch.setattr(sending, "_jitter", SimpleNamespace(uniform=lambda least, most: most))
    with services.serve(lambda body: (503, {}, {})) as service:
        asked = sending.Service(retries=8).post(service.url, {}, lambda answer: answer)
        with pytest.raises(sending.RequestError, match=r"HTTP 503: .* \(9 requests\)$"):
            asyncio.run(asked)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30]
