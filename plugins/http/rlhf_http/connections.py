"""Connections of clients: how many bytes a request's headers may have, and how long they may take."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from rlhf_http.answers import error_body

HEADER_BYTES = 64 * 1024
"""The most bytes of a request's address and headers, and of what stands between the parts of its body."""
HEADER_SECONDS = 30.0
"""How long a client may take to send a request's headers, from the connection or the request's first byte on."""


REFUSED_SECONDS = 1.0
"""How long more is read after a refusal: a client that is cut off while it sends does not see the answer."""


class Connection(HttpToolsProtocol):
    """A connection of uvicorn's, which keeps any headers and waits for them as long as the client likes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._header_bytes = 0
        self._unread = 0
        """Bytes since the parser last found the end of headers or a part of a body."""
        self._begun = False
        """Whether a request's headers have begun, and not ended."""
        self._refused = False
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes; a request whose headers are too large is refused."""
        if self._refused:
            return
        self._unread += len(data)
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if self._unread > HEADER_BYTES:
            self._refuse_headers()
        elif self._clock is None and self.timeout_keep_alive_task is None and not self._answering:
            self._start_clock()  # bytes that are no request, such as empty lines

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._header_bytes = 0
        self._begun = True
        self._start_clock()

    def on_url(self, url: bytes) -> None:
        """Take a part of the address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        self._unread = 0
        self._begun = False
        self._stop_clock()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._unread = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser refuses, the headers that `_count` refuses among it."""
        if self._header_bytes > HEADER_BYTES:
            self._refuse_headers()
        else:
            self._refuse(400, msg)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > HEADER_BYTES:
            raise ValueError("the headers are too large")  # ends the parser

    def _start_clock(self) -> None:
        self._stop_clock()
        self._clock = self.loop.call_later(HEADER_SECONDS, self._late)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _late(self) -> None:
        self._clock = None
        if self._answering:  # the answer to an earlier request
            self._start_clock()
        elif self._begun:
            self._refuse(408, f"the headers did not arrive within {HEADER_SECONDS:.0f} s")
        else:
            self.transport.close()

    def _refuse_headers(self) -> None:
        self._refuse(431, f"the address and headers of a request may have {HEADER_BYTES:,} bytes together")

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error, as `error_answer` writes it, and end the connection."""
        if self.pipeline or (self._answering and self.cycle.response_started):
            self.transport.close()  # an answer within another would be read as a part of it
            return
        if self._answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        content = json.dumps(error_body(message, status)).encode()
        lines = [
            STATUS_LINE[status],
            b"content-type: application/json\r\n",
            f"content-length: {len(content)}\r\n".encode(),
            b"connection: close\r\n\r\n",
            content,
        ]
        self._refused = True
        self._stop_clock()
        self.transport.write(b"".join(lines))
        self.transport.write_eof()
        self.loop.call_later(REFUSED_SECONDS, self.transport.close)
