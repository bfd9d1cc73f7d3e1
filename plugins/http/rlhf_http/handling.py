"""What every route does: reads a body within limits, and answers with JSON, also where something is raised."""

from __future__ import annotations

import asyncio
import errno
import json
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from rlhf_core.errors import InputError, RunError, error_line, name_too_long, suggest
from rlhf_http.answers import error_body
from rlhf_http.fields import BadRequest

MOST_BYTES = 32 * 2**20
"""The largest body."""
BODY_SECONDS = 60.0
"""How long a client may take to send a body."""
MOST_MESSAGE = 4000
"""Characters of an error's message."""
RETRY_SECONDS = 1


class Busy(BadRequest):
    """A request that may be answered later."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, status=status, kind="overloaded_error")


def error_answer(
    message: str, status: int, kind: str = "invalid_request_error", param: str | None = None
) -> JSONResponse:
    """Write an error as OpenAI and vLLM do. A message may quote what a client sent: only so much of it is sent back."""
    if len(message) > MOST_MESSAGE:
        message = f"{message[:MOST_MESSAGE]} …"
    headers = {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else None
    return JSONResponse(error_body(message, status, kind, param), status_code=status, headers=headers)


def failure(error: Exception) -> JSONResponse:
    """Write what a request raised."""
    if isinstance(error, BadRequest):
        return error_answer(str(error), error.status, error.kind, error.param)
    if isinstance(error, InputError):
        return error_answer(str(error), 400)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return error_answer(name_too_long(error), 400)
    if isinstance(error, RunError):
        return error_answer(str(error), 500, "server_error")
    warnings.warn(f"a request failed: {error_line(error)}", stacklevel=1)
    return error_answer(f"the server failed: {type(error).__name__}", 500, "server_error")


async def body_of(request: Request) -> bytes:
    """Read a body. Raises BadRequest for one that is too large or comes too slowly."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > MOST_BYTES:
                    raise BadRequest(f"the body has more than {MOST_BYTES:,} bytes", status=413)
                parts.append(part)
    except TimeoutError:
        raise BadRequest(f"the body did not arrive within {BODY_SECONDS:.0f} s", status=408) from None
    return b"".join(parts)


def json_bytes(value: Any) -> bytes:
    """Write an answer as JSON. Raises ValueError for a number that JSON lacks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


Handler = Callable[[Request], Awaitable[Response]]


def answered(handler: Handler) -> Handler:
    """Turn what a handler raises into an answer."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return failure(error)

    return endpoint


async def http_error(request: Request, error: Exception) -> Response:
    """Answer a request that no route takes, as Starlette's handler of `HTTPException`."""
    assert isinstance(error, HTTPException)
    known = sorted({getattr(route, "path", "") for route in request.app.routes})
    if error.status_code == 404:
        path = request.url.path
        message = f"there is no {path}.{suggest(path, known)} Routes: {', '.join(known)}"
        return error_answer(message, 404, "NotFoundError")
    answer = error_answer(f"{request.method} {request.url.path}: {error.detail}", error.status_code)
    answer.headers.update(error.headers or {})
    return answer
