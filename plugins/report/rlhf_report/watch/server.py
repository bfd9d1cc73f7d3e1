"""The server of `rlhf watch`: its routes, who may ask, and its run until it is stopped."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_http.fields import BadRequest
from rlhf_http.handling import error_answer, failure, http_error
from rlhf_http.listening import WebServer, close, listen, read_key
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from rlhf_core.errors import InputError, RunError
from rlhf_core.runtime.terminal import echo
from rlhf_report.frozen import PAGE, written
from rlhf_report.watch.rollout_view import SORTS, WantedRollouts
from rlhf_report.watch.watched import Watched, unreadable

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""Names of this machine that a browser may send as Host."""
ANYWHERE = ("0.0.0.0", "::", "")
COOKIE = "rlhf_watch"
MOST_BODY = 4096
"""Bytes of the only body that is read, the key."""
LARGEST = 2**53
"""Numbers of a query are whole below this."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Admission:
    """Middleware: answers browsers that ask for this server by its own name, and who has the key. Plain ASGI."""

    def __init__(self, app: Any, hosts: Sequence[str], key: str | None) -> None:
        """hosts: names that a request may ask for, without a port. key: None where every request is answered."""
        self.app, self.key = app, key
        self.hosts = frozenset(host.lower() for host in hosts)
        self.session = secrets.token_urlsafe(32)
        """What the cookie holds: not the key, so that a browser's store does not have it."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(given) != 1 or _without_port(given[0]).lower() not in self.hosts:
            answer = error_answer(
                "the header Host does not name this server; ask for the address that `rlhf watch` printed",
                400,
            )
            await _with_headers(answer)(scope, receive, send)
            return
        scope["admission"] = self
        path = scope["path"]
        if path.startswith("/api/") and path != "/api/key" and not self._is_known(Request(scope)):
            answer = error_answer("give the key", 401, "authentication_error")
            await _with_headers(answer)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_known(self, request: Request) -> bool:
        given = request.cookies.get(COOKIE, "")
        return self.key is None or hmac.compare_digest(given.encode(), self.session.encode())

    def accepts(self, key: str) -> bool:
        """Return whether this is the key."""
        return self.key is None or hmac.compare_digest(key.encode(errors="replace"), self.key.encode())


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return name if name and port.isdecimal() and not host.endswith("]") else host


def _with_headers(answer: Response) -> Response:
    answer.headers.update(HEADERS)
    return answer


def make_app(watched: Watched, hosts: Sequence[str] = LOOPBACK, key: str | None = None) -> Any:
    """Make the ASGI application. hosts: what a request may name as Host, besides a port."""
    stage = "/api/runs/{id}/{stage}"
    routes = [
        Route("/api/key", _answered(_sign_in), methods=["POST"]),
        Route("/api/runs", _json(lambda request: watched.runs()), methods=["GET"]),
        Route("/api/compare", _json(lambda request: _compare(watched, request)), methods=["GET"]),
        Route("/api/runs/{id}", _json(lambda request: watched.run(_id(request))), methods=["GET"]),
        Route("/api/runs/{id}/events", _json(lambda request: _events(watched, request)), methods=["GET"]),
        Route(f"{stage}/metrics", _json(lambda request: _metrics(watched, request)), methods=["GET"]),
        Route(f"{stage}/results", _json(lambda request: watched.results(*_place(request))), methods=["GET"]),
        Route(f"{stage}/rollouts", _json(lambda request: _rollouts(watched, request)), methods=["GET"]),
        Route(
            f"{stage}/rollouts/{{number}}/completions/{{index}}",
            _json(lambda request: _tokens(watched, request)),
            methods=["GET"],
        ),
        Route(f"{stage}/rows", _json(lambda request: _rows(watched, request)), methods=["GET"]),
        Route(f"{stage}/evaluations", _json(lambda request: _evaluations(watched, request)), methods=["GET"]),
        Route(
            f"{stage}/evaluations/{{update}}",
            _json(lambda request: _evaluation(watched, request)),
            methods=["GET"],
        ),
        Route("/static/{name}", _answered(_static), methods=["GET"]),
        Route("/", _answered(_index), methods=["GET"]),
        Route("/{name}", _answered(_index), methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False
    return Admission(app, hosts, key)


async def _http_error(request: Request, error: Exception) -> Response:
    return _with_headers(await http_error(request, error))


Handler = Callable[[Request], Awaitable[Response]]


def _answered(handler: Handler) -> Handler:
    """Turn what a handler raises into an answer, and add the headers of every answer."""

    async def endpoint(request: Request) -> Response:
        try:
            return _with_headers(await handler(request))
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return _with_headers(failure(unreadable(error) or error))

    return endpoint


def _json(read: Callable[[Request], Mapping[str, Any]]) -> Handler:
    """Answer with what a function reads from files, in a thread; 304 where the client has it."""

    async def handler(request: Request) -> Response:
        content = await asyncio.to_thread(lambda: written(read(request)))
        return _tagged(request, content, "application/json")

    return _answered(handler)


def _tagged(request: Request, content: bytes, kind: str) -> Response:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    asked = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    if tag in asked:
        return Response(status_code=304, headers={"ETag": tag})
    return Response(content, media_type=kind, headers={"ETag": tag})


async def _index(request: Request) -> Response:
    name = request.path_params.get("name", "")
    if "." in name or name in ("api", "static"):
        raise BadRequest(f"there is no /{name}", status=404)
    return _tagged(request, (PAGE / "index.html").read_bytes(), TYPES[".html"])


async def _static(request: Request) -> Response:
    """Answer with a file of the page. Names come from the folder, never from the request."""
    files = {path.name: path for path in PAGE.iterdir() if path.suffix in TYPES}
    name = request.path_params["name"]
    if name not in files:
        raise BadRequest(f"there is no /static/{name}", status=404)
    return _tagged(request, files[name].read_bytes(), TYPES[files[name].suffix])


async def _sign_in(request: Request) -> Response:
    """Take the key, and give a cookie that scripts cannot read and other sites cannot send."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY:
            raise BadRequest(f"the body has more than {MOST_BODY:,} bytes", status=413)
    try:
        given = json.loads(body)["key"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise BadRequest('the body must be {"key": "…"}') from None
    admission: Admission = request.scope["admission"]
    if not isinstance(given, str) or not admission.accepts(given):
        raise BadRequest("this is not the key", status=401, kind="authentication_error")
    answer = Response(b"{}", media_type="application/json")
    answer.set_cookie(COOKIE, admission.session, httponly=True, samesite="strict", path="/")
    return answer


def _id(request: Request) -> str:
    return str(request.path_params["id"])


def _place(request: Request) -> tuple[str, str]:
    return _id(request), str(request.path_params["stage"])


def _whole(text: str, name: str) -> int:
    """Read a number that is not negative. Raises BadRequest."""
    if not text.isascii() or not text.isdecimal() or len(text) > 16 or int(text) >= LARGEST:
        raise BadRequest(f"{name}: '{text[:40]}' is no whole number of 0 or more", param=name)
    return int(text)


def _number(text: str, name: str) -> float:
    """Read a finite number. Raises BadRequest."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value - value != 0:
        raise BadRequest(f"{name}: '{text[:40]}' is no number", param=name)
    return value


def _asked(request: Request, name: str, otherwise: int | None) -> int | None:
    text = request.query_params.get(name)
    return otherwise if text is None or text == "" else _whole(text, name)


def _bound(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    return None if text is None or text == "" else _number(text, name)


def _sort(request: Request, known: Sequence[str], otherwise: str) -> str:
    sort = request.query_params.get("sort") or otherwise
    if sort.removeprefix("-") not in known:
        raise BadRequest(f"sort: '{sort[:40]}' is none of {', '.join(known)}", param="sort")
    return sort


def _metrics(watched: Watched, request: Request) -> Mapping[str, Any]:
    after = request.query_params.get("after") or "-1"
    names = request.query_params.get("names")
    wanted = None if names is None else names.split(",")
    return watched.metrics(*_place(request), _number(after, "after"), wanted)


def _events(watched: Watched, request: Request) -> Mapping[str, Any]:
    return watched.events(_id(request), _number(request.query_params.get("after") or "-1", "after"))


def _rollouts(watched: Watched, request: Request) -> Mapping[str, Any]:
    query = request.query_params
    update = _asked(request, "update", None)
    if update == 0:
        raise BadRequest("update: updates are counted from 1", param="update")
    wanted = WantedRollouts(
        sort=_sort(request, SORTS, "order"),
        search=query.get("search", ""),
        finish=query.get("finish", ""),
        where=query.get("where", ""),
        least=_bound(request, "least"),
        most=_bound(request, "most"),
        without=query.get("without", "") not in ("", "0"),
        offset=_asked(request, "offset", 0) or 0,
        limit=_asked(request, "limit", 50) or 0,
    )
    return watched.rollouts(*_place(request), update, wanted)


def _tokens(watched: Watched, request: Request) -> Mapping[str, Any]:
    number, index = (_whole(request.path_params[name], name) for name in ("number", "index"))
    return watched.tokens(*_place(request), number, index)


def _rows(watched: Watched, request: Request) -> Mapping[str, Any]:
    update = _asked(request, "update", None)
    if update is None:
        raise BadRequest("update: give the update", param="update")
    sort = _sort(request, ("loss", "row"), "-loss")
    offset, limit = _asked(request, "offset", 0) or 0, _asked(request, "limit", 50) or 0
    return watched.rows(*_place(request), update, sort, offset, limit)


def _evaluations(watched: Watched, request: Request) -> Mapping[str, Any]:
    return watched.evaluations(*_place(request))


def _evaluation(watched: Watched, request: Request) -> Mapping[str, Any]:
    return watched.evaluation(*_place(request), _whole(request.path_params["update"], "update"))


def _compare(watched: Watched, request: Request) -> Mapping[str, Any]:
    ids = [id for id in request.query_params.get("runs", "").split(",") if id]
    if not 2 <= len(set(ids)) <= 6 or len(set(ids)) != len(ids):
        raise BadRequest("runs: give 2 to 6 different runs", param="runs")
    return watched.compare(ids)


def hosts_of(host: str) -> list[str]:
    """Return the names that a request may give as Host. Raises InputError for an address that names no machine."""
    if host in ANYWHERE:
        raise InputError(
            f"--host {host or chr(34) * 2}: name the address or the name by which browsers reach this machine, such as "
            "--host 192.168.0.7; other names are refused"
        )
    return [*LOOPBACK, f"[{host}]" if ":" in host else host]


def serve(directories: Sequence[Path], host: str, port: int, key_name: str | None) -> None:
    """Answer until SIGTERM or Ctrl-C. Raises InputError where the address is taken, or one elsewhere has no key."""
    hosts = hosts_of(host)
    if key_name is None and hosts[-1] not in LOOPBACK:
        raise InputError(
            f"--host {host}: other machines could read every completion; give --api-key-env NAME, an environment "
            "variable with a key that the page asks for"
        )
    app = make_app(Watched(directories), hosts, read_key(key_name))
    listener = listen(host, port)
    asyncio.run(_serve(app, listener, directories))


async def _serve(app: Any, listener: Any, directories: Sequence[Path]) -> None:
    web = WebServer.of(app)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    serving = asyncio.ensure_future(web.serve(sockets=[listener]))
    waiting = asyncio.ensure_future(stopping.wait())
    while not web.started and not serving.done():
        await asyncio.sleep(0.01)
    host, port = listener.getsockname()[:2]
    if not serving.done():
        where = f"[{host}]" if ":" in host else host
        echo(f"watching {', '.join(map(str, directories))} on http://{where}:{port}", err=True)
        for missing in [each for each in directories if not each.exists()]:
            echo(f"{missing} does not exist yet; its runs are shown once it does", err=True)
    await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
    await close(web, serving)
    if not stopping.is_set():
        raise RunError("the server ended by itself")
