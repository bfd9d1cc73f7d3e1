"""Messages between the processes of a job: one JSON object per line of a TCP connection."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

LINE_SECONDS = 5.0


def send(link: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message; one that cannot be sent is lost, and its receiver notices by other means."""
    with suppress(OSError):
        link.sendall(json.dumps(message).encode() + b"\n")


def receive(link: socket.socket, seconds: float) -> dict[str, Any] | None:
    """Wait so long for the next message to begin, and read it; None where none begins, or it does not end.

    It is read byte by byte, so that nothing of the message after it is taken.
    """
    until, line = time.monotonic() + seconds, b""
    while not line.endswith(b"\n") and len(line) < 2**16:
        left = until - time.monotonic()
        if left <= 0 or not select.select([link], [], [], left)[0]:
            return None
        try:
            byte = link.recv(1)
        except OSError:
            return None
        if not byte:
            return None
        if not line:
            until = time.monotonic() + LINE_SECONDS
        line += byte
    return parse_message(line)


def is_gone(link: socket.socket) -> bool:
    """Whether the other end of a connection was closed."""
    try:
        return bool(select.select([link], [], [], 0)[0]) and not link.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def parse_message(line: bytes) -> dict[str, Any] | None:
    """The object in a line; None where there is none."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
