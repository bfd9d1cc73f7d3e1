"""Who may ask a server: holders of its key, and no web page of another address."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from typing import Any

from rlhf_http.handling import error_answer


class Gate:
    """Middleware: lets in who has the key, and no web page of another address. Plain ASGI, for streams."""

    OPEN = ("/health",)

    def __init__(self, app: Any, key: str | None, control: Sequence[str] = ()) -> None:
        """key: what clients send as a bearer token; None: nothing. control: the paths that change the server."""
        self.app = app
        self.key = key
        self.control = frozenset(control)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["path"] not in self.OPEN and not self._has_key(scope):
            answer = error_answer(
                "no valid key: send the header Authorization: Bearer KEY", 401, "authentication_error"
            )
            await answer(scope, receive, send)
            return
        if self._is_of_another_page(scope):
            answer = error_answer(
                "a web page of another address may not send this: leave the header Origin out, or start the server "
                "with --api-key-env",
                403,
                "permission_error",
            )
            await answer(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_of_another_page(self, scope: Any) -> bool:
        """Tell whether a web page that is not this server's own sent a request that may change or compute something.

        A browser sends such requests to any address, and names the page's own in Origin. A page may have been given a
        name that means this machine, which makes the two equal; so one that controls the server needs an address.
        """
        if self.key is not None or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return False
        origins = _header(scope, b"origin")
        if not origins:
            return False
        hosts = _header(scope, b"host")
        if [origin.partition("://")[2] for origin in origins] != hosts:
            return True
        return scope["path"] in self.control and not _is_address(hosts[0])

    def _has_key(self, scope: Any) -> bool:
        if self.key is None:
            return True
        given = _header(scope, b"authorization")
        wanted = b"Bearer " + self.key.encode()
        return len(given) == 1 and hmac.compare_digest(given[0].encode("latin-1"), wanted)


def _header(scope: Any, wanted: bytes) -> list[str]:
    """List the values of a header."""
    return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]


def _is_address(host: str) -> bool:
    """Tell an IP address, or this machine's own name, from a name that somebody else may give a meaning."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return True
