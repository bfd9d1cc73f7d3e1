"""The gate, the limits of bodies and what is raised, around an application without a model."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from rlhf_http import handling
from rlhf_http.fields import BadRequest
from rlhf_http.gate import Gate
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlhf_core import InputError, RunError


async def echo(request: Request) -> Response:
    return JSONResponse(len(await handling.body_of(request)))


async def fails(request: Request) -> Response:
    raise {
        "field": BadRequest("n: too many", param="n"),
        "input": InputError("no such file"),
        "run": RunError("it is down"),
        "bug": ZeroDivisionError(),
        "busy": handling.Busy("later", 429),
    }[request.path_params["kind"]]


def ask(method: str, path: str, key: str | None = None, **given: Any) -> httpx.Response:
    """Send a request to the application, whose routes are /health, /echo and /fails/KIND."""
    routes = [
        Route("/health", handling.answered(echo), methods=["GET"]),
        Route("/echo", handling.answered(echo), methods=["POST"]),
        Route("/fails/{kind}", handling.answered(fails), methods=["POST"]),
    ]
    inner = Starlette(routes=routes, exception_handlers={HTTPException: handling.http_error})

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(Gate(inner, key, ["/echo"]))
        async with httpx.AsyncClient(transport=transport, base_url="http://h.example") as client:
            return await client.request(method, path, **given)

    return asyncio.run(send())


def test_only_holders_of_the_key_pass() -> None:
    assert ask("GET", "/health", "k").status_code == 200
    for header in ({}, {"Authorization": "Bearer j"}, {"Authorization": "Bearer ks"}, {"Authorization": "k"}):
        refused = ask("POST", "/echo", "k", headers=header)
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
    assert ask("POST", "/echo", "k", headers={"Authorization": "Bearer k"}, content=b"abc").json() == 3
    assert ask("POST", "/echo", content=b"ab").json() == 2


@pytest.mark.parametrize(
    ("origin", "host", "path", "status"),
    [
        ("http://evil.example", "127.0.0.1:8000", "/fails/input", 403),
        ("null", "127.0.0.1:8000", "/fails/input", 403),
        ("http://[evil", "127.0.0.1:8000", "/fails/input", 403),
        ("http://evil.example", "127.0.0.1:8000", "/echo", 403),
        # A name that may mean this machine to a browser is not enough where a request changes the server.
        ("http://evil.example:8000", "evil.example:8000", "/echo", 403),
        ("http://evil.example:8000", "evil.example:8000", "/fails/input", 400),
        ("https://127.0.0.1:8000", "127.0.0.1:8000", "/echo", 200),
        ("http://localhost:8000", "localhost:8000", "/echo", 200),
        ("http://[::1]:8000", "[::1]:8000", "/echo", 200),
        (None, "evil.example", "/echo", 200),
    ],
)
def test_a_page_of_another_address_cannot_post(origin: str | None, host: str, path: str, status: int) -> None:
    headers = {"host": host, "content-type": "text/plain", **({"origin": origin} if origin else {})}
    assert ask("POST", path, content=b"{}", headers=headers).status_code == status
    assert ask("GET", "/health", headers=headers).status_code == 200


def test_a_body_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handling, "MOST_BYTES", 10)
    refused = ask("POST", "/echo", content=b"a" * 11)
    assert refused.status_code == 413
    assert refused.json()["error"]["message"] == "the body has more than 10 bytes"


@pytest.mark.parametrize(
    ("kind", "status", "said"),
    [
        ("field", 400, "n: too many"),
        ("input", 400, "no such file"),
        ("run", 500, "it is down"),
        ("busy", 429, "later"),
    ],
)
def test_what_is_raised_is_answered(kind: str, status: int, said: str) -> None:
    answer = ask("POST", f"/fails/{kind}")
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, said)
    assert ("retry-after" in answer.headers) == (kind == "busy")


def test_a_bug_is_answered_without_its_words() -> None:
    with pytest.warns(UserWarning, match="a request failed: raised ZeroDivisionError"):
        answer = ask("POST", "/fails/bug")
    assert answer.json()["error"]["message"] == "the server failed: ZeroDivisionError"


def test_a_path_that_is_not_there_names_the_nearest() -> None:
    answer = ask("POST", "/ecko")
    assert answer.status_code == 404
    assert "Did you mean '/echo'?" in answer.json()["error"]["message"]
    assert ask("GET", "/echo").status_code == 405
