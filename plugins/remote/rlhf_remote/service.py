"""A client of JSON services: addresses, retries with backoff, and the errors of failed requests."""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from rlhf_http.answers import error_message

from rlhf_core import RunError
from rlhf_core.hidden import scrub
from rlhf_remote.transport import MOST_BYTES, Answer, AnswerError, send, send_once, shorten

T = TypeVar("T")
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before the first retry, doubled before each further one up to the second number."""
LONGEST_RETRY_AFTER = 300.0
"""Seconds of a Retry-After header that are waited at most."""
WRONG_SETUP = {401, 403, 404, 405}
"""Statuses that no other text would change: a wrong key or a wrong address."""
REACH_SECONDS = 10.0


class RequestError(Exception):
    """A request failed after all its retries. failures: requests that failed. refused: whether its texts are why."""

    def __init__(self, message: str, failures: int, *, refused: bool = False) -> None:
        super().__init__(message)
        self.failures, self.refused = failures, refused


def address_problem(url: str) -> str | None:
    """Return what is wrong with the address of a service, if anything."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        return f"url: {url!r} is not an address: {error}"
    if parts.scheme not in ("http", "https") or not parts.host:
        return f"url: {url!r} is not an address such as http://127.0.0.1:8000/v1"
    if parts.userinfo:
        return 'url: the address has a password in it, which would be written to files; give api_key = { env = "NAME" }'
    return None


def api_root(url: str) -> str:
    """Return the address below which an OpenAI-compatible API has its routes; /v1 where only a host is given."""
    parts = httpx.URL(url).copy_with(fragment=None)
    return str(parts.copy_with(path="/v1") if parts.path in ("", "/") else parts).rstrip("/")


def headers(api_key: str | None) -> dict[str, str]:
    """Return the headers of a request."""
    return {
        "content-type": "application/json",
        **({"authorization": f"Bearer {api_key}"} if api_key else {}),
    }


def json_bytes(value: Any) -> bytes:
    """Write a value as JSON; values of tables that JSON lacks, such as dates, become text."""
    return json.dumps(value, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x)).encode()


def describe_answer(answer: Answer) -> str:
    """Describe an answer that is an error: its status, and the message in it."""
    try:
        message = error_message(answer.json())
    except AnswerError:
        message = None
    return scrub(f"HTTP {answer.status_code}: {shorten(answer.text if message is None else message)}")


def reach(url: str, api_key: str | None) -> Answer | str:
    """Send a GET request, which has no data; return the answer, or why there was none."""
    try:
        return send_once("GET", url, headers(api_key), seconds=REACH_SECONDS)
    except AnswerError as error:
        return f"cannot reach {error}"


def model_cards(answer: Answer) -> list[Mapping[str, Any]]:
    """Return the models in an answer of `/v1/models`; none if it is another answer."""
    try:
        cards = answer.json()["data"] if answer.status_code == 200 else []
        return [card for card in cards if isinstance(card["id"], str)]
    except (AnswerError, LookupError, TypeError):
        return []


def score_request(model: str, columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Make the body of a request to `/score` of `rlhf serve`; a row lacks the columns that are null in it."""
    rows = [
        {name: value for name, value in zip(columns, values, strict=True) if value is not None}
        for values in zip(*columns.values(), strict=True)
    ]
    return {"model": model, "rows": rows}


def row_scores(count: int, answer: Any) -> dict[str, list[float]]:
    """Read the answer of `/score` to `count` rows: {"score", or "chosen_score" and "rejected_score": numbers},
    NaN where one is null. Raises ValueError, with what it expects, for another answer.
    """
    try:
        data = sorted(answer["data"], key=lambda each: each["index"])
        names = ("chosen_score", "rejected_score") if "chosen_score" in data[0] else ("score",)
        scores = {name: [_score(each[name]) for each in data] for name in names}
        if [each["index"] for each in data] != list(range(count)):
            raise ValueError
    except (LookupError, TypeError, ValueError):
        raise ValueError(f"data with the scores of {count} rows") from None
    return scores


def is_number(value: Any) -> bool:
    """Check whether a value of JSON is a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _score(value: Any) -> float:
    if value is None:
        return math.nan
    if not is_number(value):
        raise ValueError
    return float(value)


def listed(names: Sequence[str]) -> str:
    """List names, the first of many."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}"


@dataclass
class Service:
    """Sends requests to one service, on the event loop that calls it.

    concurrency: requests in flight. request_timeout: seconds that one may take, from its first byte to the last of its
    answer. retries: of a request that failed for a reason that may pass: no connection, no answer in time, status 408,
    425, 429 or above 499, and an answer that cannot be read. max_answer_bytes: of an answer; a longer one is not read.
    """

    api_key: str | None = None
    concurrency: int = 8
    request_timeout: float = 60.0
    retries: int = 4
    max_answer_bytes: int = MOST_BYTES
    _loop: Any = field(default=None, init=False, repr=False)
    _client: Any = field(default=None, init=False, repr=False)
    _slots: Any = field(default=None, init=False, repr=False)

    def client(self) -> httpx.AsyncClient:
        """Return the client of the running loop; each stage has a loop of its own."""
        if self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._slots = asyncio.Semaphore(self.concurrency)
            limits = httpx.Limits(max_connections=self.concurrency)
            self._client = httpx.AsyncClient(headers=headers(self.api_key), limits=limits)
        client: httpx.AsyncClient = self._client
        return client

    async def post(self, url: str, body: Any, read: Callable[[Any], T]) -> tuple[T, int]:
        """Return (what `read` makes of the JSON of an answer, how many requests failed before it).

        read: raises ValueError, with what it expects, for JSON of another form. Raises RequestError if no request
        succeeds, and RunError for a wrong key or a wrong address.
        """
        client = self.client()
        content = json_bytes(body)
        async with self._slots:
            for failures in range(1, self.retries + 2):
                wait = min(FIRST_WAIT * 2 ** (failures - 1), LONGEST_WAIT) * _jitter.uniform(0.5, 1.0)
                try:
                    answer = await send(
                        client,
                        "POST",
                        url,
                        content,
                        seconds=self.request_timeout,
                        most_bytes=self.max_answer_bytes,
                    )
                    if answer.status_code == 200:
                        return read(answer.json()), failures - 1
                    problem = f"{url}: {describe_answer(answer)}"
                    if answer.status_code in WRONG_SETUP:
                        raise RunError(problem)
                    if answer.status_code < 500 and answer.status_code not in (408, 425, 429):
                        raise RequestError(problem, failures, refused=True)
                    wait = max(wait, retry_after(answer.headers.get("retry-after")))
                except AnswerError as error:
                    problem = str(error)
                except ValueError as error:
                    problem = f"{url}: expected {error}, got {shorten(answer.text)}"
                if failures <= self.retries:
                    await asyncio.sleep(wait)
        raise RequestError(f"{scrub(problem)} ({failures} requests)", failures)


_jitter = random.Random()
"""Of its own: a run's random numbers do not depend on its requests."""


def retry_after(value: str | None) -> float:
    """Return the seconds that a Retry-After header asks for, a number or a date; 0 without one."""
    if value is None:
        return 0.0
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*", value):
        seconds = float(value)
    else:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return 0.0
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER)


async def all_of(work: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all; the first that raises ends the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
