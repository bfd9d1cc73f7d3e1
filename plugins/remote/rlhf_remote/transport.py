"""HTTP requests within limits: seconds for the whole of one, bytes of its answer, and the JSON that it holds."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from rlhf_core.hidden import scrub

T = TypeVar("T")
MOST_BYTES = 64 * 2**20
"""Bytes of an answer, where a caller does not expect more or fewer."""
CONNECT_SECONDS = 10.0
MOST_DIGITS = 300
"""Digits of an integer; float64 holds no number of 310."""
LONGEST_SHOWN = 200
"""Characters of an answer that a message shows."""


class AnswerError(Exception):
    """A request got no answer within its limits, or one that cannot be read; the message is "URL: PROBLEM"."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(scrub(f"{url}: {problem}"))
        self.problem = scrub(problem)


@dataclass(frozen=True)
class Answer:
    """A whole answer, of any status."""

    url: str
    status_code: int
    headers: httpx.Headers
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")

    def json(self) -> Any:
        """Parse the body. Raises AnswerError where it is not JSON, or no JSON that can be worked with."""
        try:
            return json.loads(self.body, parse_int=_integer)
        except json.JSONDecodeError:
            problem = f"the answer is not JSON: {shorten(self.text)}"
        except RecursionError:
            problem = "the answer is JSON that is nested too deeply"
        except ValueError as error:
            problem = f"the answer cannot be read: {error}"
        raise AnswerError(self.url, problem)


async def send(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    content: bytes | None = None,
    *,
    seconds: float,
    most_bytes: int = MOST_BYTES,
) -> Answer:
    """Send a request and read its whole answer.

    seconds: from the first byte that is sent to the last that is received. Raises AnswerError.
    """
    timeout = httpx.Timeout(None, connect=min(seconds, CONNECT_SECONDS))
    body = bytearray()
    try:
        async with (
            asyncio.timeout(seconds),
            client.stream(method, url, content=content, timeout=timeout) as response,
        ):
            async for part in response.aiter_bytes():
                body += part
                if len(body) > most_bytes:
                    raise AnswerError(url, f"the answer has more than {most_bytes:,} bytes")
    except TimeoutError:
        raise AnswerError(url, f"no answer within {seconds:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AnswerError(url, words(error)) from error
    return Answer(url, response.status_code, response.headers, bytes(body))


class Client:
    """Sends requests from any thread, which waits for the answer. They share connections."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers
        self._loop: _Loop | None = None
        self._client: httpx.AsyncClient | None = None

    def send(
        self,
        method: str,
        url: str,
        content: bytes | None = None,
        *,
        seconds: float,
        most_bytes: int = MOST_BYTES,
    ) -> Answer:
        """Send a request as the function `send` does."""
        loop = _running_loop()

        async def work() -> Answer:
            if self._client is None or self._loop is not loop:
                self._loop = loop
                limits = httpx.Limits(max_connections=None)
                self._client = httpx.AsyncClient(headers=self._headers, limits=limits)
            return await send(self._client, method, url, content, seconds=seconds, most_bytes=most_bytes)

        return loop.run(work())


def send_once(
    method: str,
    url: str,
    headers: dict[str, str],
    content: bytes | None = None,
    *,
    seconds: float,
    most_bytes: int = MOST_BYTES,
) -> Answer:
    """Send a request over a connection of its own, as the function `send` does."""

    async def work() -> Answer:
        async with httpx.AsyncClient(headers=headers) as client:
            return await send(client, method, url, content, seconds=seconds, most_bytes=most_bytes)

    return _running_loop().run(work())


class _Loop:
    """A thread with an event loop, on which a time limit holds for the whole of a request.

    Requests do not run on the loop of `rlhf_core.workers`, which a reward that blocks it would stop.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()  # a forked copy of the process has no such thread
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rlhf requests", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # in case this thread was interrupted
            raise


_lock = threading.Lock()
_current: _Loop | None = None


def _running_loop() -> _Loop:
    global _current
    with _lock:
        if _current is None or _current.owner != os.getpid():
            _current = _Loop()
        return _current


def words(error: Exception) -> str:
    """Describe what the transport raised."""
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionError) and cause.errno:
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def shorten(text: str) -> str:
    """Return a text on one line, as messages show it."""
    line = " ".join(text[: 10 * LONGEST_SHOWN].split()) or "nothing"
    return line if len(line) <= LONGEST_SHOWN else f"{line[:LONGEST_SHOWN]}…"


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it has an integer of {len(digits):,} digits")
    return int(digits)
