"""Run `rlhf` on a pseudo-terminal, and find what a text has sent to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Mapping
from pathlib import Path

from tests.torture.children import Child

PAYLOADS = {
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;b3duZWQ=\x1b\\",
    "link": "\x1b]8;;http://127.0.0.1/owned\x1b\\",
    "clear": "\x1b[2J\x1b[10;10H",
    "blink": "\x1b[5;7m",
    "reset": "\x1bc",
    "device": "\x1bP+q544e\x1b\\",
    "c1": "\x9b2J\x9d0;owned\x9c",
    "bell": "a\x07b\x08c",
    "override": "a\u202eb\u2066c\u061cd",
    "overwrite": "failed\rdone  \x0b\x0c",
    "delete": "a\x7fb\x0e\x0f",
}
EVERYTHING = "".join(PAYLOADS.values())
OWN = re.compile(
    r"\x1b\[(?:(?:[0-4]|2[1-4]|3[0-79]|4[0-79]|9[0-7]|10[0-7]|[34]8;5;\d+|[34]8;2;\d+;\d+;\d+)(?:;(?=\d)|(?=m)))*m"
    r"|\x1b\[\d*[ABCDGK]|\x1b\[\?25[hl]"
)
"""What the product sends: colours, moves within the lines of its own, and the cursor on and off."""
FORBIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]|failed\rdone"
)


def on_terminal(
    *arguments: str, cwd: Path, env: Mapping[str, str | None] | None = None, seconds: float = 240.0
) -> tuple[int, bytes]:
    """Run the command with a terminal for input, output and errors; return its exit code and what it sent."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    child = Child(_command, slave, arguments, cwd=cwd, env={"TERM": "xterm-256color", **(env or {})})
    os.close(slave)
    sent, until = b"", time.monotonic() + seconds
    while time.monotonic() < until:
        if not select.select([master], [], [], 0.1)[0]:
            if not child.running():
                break
            continue
        try:
            part = os.read(master, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        sent += part
    ended = child.wait(max(until - time.monotonic(), 5.0))
    os.close(master)
    return ended.code, sent


def _command(slave: int, arguments: tuple[str, ...]) -> None:
    import sys

    from rlhf_core import cli

    with contextlib.suppress(OSError):
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(slave, number)
    sys.argv = ["rlhf", *arguments]
    cli.main()


def smuggled(sent: bytes) -> list[str]:
    """List what no text may send: control characters that are not the product's own, each with its surroundings."""
    text = OWN.sub("", sent.decode(errors="surrogateescape"))
    found = []
    for match in FORBIDDEN.finditer(text):
        around = text[max(match.start() - 60, 0) : match.end() + 20]
        found.append(f"{match[0]!a} in {around!a}")
    if any(0xDC80 <= ord(letter) <= 0xDCFF for letter in text):
        found.append("bytes that are not UTF-8")
    return found
